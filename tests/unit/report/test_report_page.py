"""The page, the figure and the trace as text: complete, escaped, alone."""

from __future__ import annotations

import html.parser
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hyper_parallel.records.run_record import MemoryCurve
from hyper_parallel.report.figure import render_figure, write_figure
from hyper_parallel.report.page import render_page, write_page
from hyper_parallel.report.trace import run_trace, write_run_trace
from tests.unit.report.runs import HOSTILE, hostile_run, planned_step, small_run, small_step


class Reader(html.parser.HTMLParser):
    """What a browser would see: tags, text outside scripts, the embedded data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.data = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = "data" if ("id", "run") in attrs else tag
        for name, value in attrs:
            assert name not in ("src", "srcset", "onclick", "onerror", "onload"), (tag, name)
            assert name != "href" or value == "data:,", (tag, value)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside not in ("script", "style"):
            self.words.append(data)


def test_the_page_says_everything_in_words_too() -> None:
    words = " ".join(Reader(render_page(small_run())).words)
    for expected in (
        "A small run",
        "700.00 MiB",
        "-25%",
        "bitwise equal",
        "below min bytes",
        "it leaves while forward runs",
        "Predicted against measured",
        "80.00 MiB",
        "backward of layers.0",
        "torch",
        "2.13.0",
        "('disk',)",
        "sampled",
    ):
        assert expected in words, expected


def test_different_gradients_are_shouted() -> None:
    page = render_page(small_run(steps=(small_step("none"), small_step("swap", gradients="other"))))
    assert "DIFFERENT" in page
    assert "DIFFERENT" not in render_page(small_run())


def test_hostile_names_stay_words() -> None:
    plain, hostile = Reader(render_page(small_run())), Reader(render_page(hostile_run()))
    assert hostile.tags.count("script") == plain.tags.count("script") == 2
    assert "img" not in hostile.tags
    assert HOSTILE in hostile.words, "the name is shown as it is"
    data = json.loads(hostile.data)
    assert data["steps"][0]["name"] == HOSTILE
    assert data["steps"][0]["spans"][0]["name"] == HOSTILE
    assert data["steps"][1]["ops"][0]["op"] == HOSTILE
    assert not re.search(r"[<>&\u2028]", hostile.data), "nothing in the data could end the script"


def test_the_page_forbids_requests_and_makes_none() -> None:
    page = render_page(small_run())
    assert "default-src 'none'" in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page), (
        "only the name of a namespace looks like an address"
    )


def test_a_run_without_plan_or_engine_has_no_empty_sections() -> None:
    import dataclasses

    bare = dataclasses.replace(small_step("none"), fates=(), spans=(), peak_parts={}, peak_where="", notes=())
    page = render_page(small_run(steps=(bare,), budget_bytes=None))
    assert "Predicted against measured" not in page
    assert "<h2>Notes</h2>" not in page
    assert json.loads(Reader(page).data)["budget_line"] is None


def test_the_budget_lies_above_what_the_process_holds_anyway() -> None:
    assert json.loads(Reader(render_page(small_run())).data)["budget_line"] == 400 * 2**20


@pytest.mark.parametrize("run", [small_run(), hostile_run()], ids=["plain", "hostile"])
def test_the_figure_is_one_svg_without_scripts(run, tmp_path: Path) -> None:
    write_figure(tmp_path / "figure.svg", run)
    root = ET.fromstring((tmp_path / "figure.svg").read_text())
    tags = {element.tag.split("}")[1] for element in root.iter()}
    assert tags == {"svg", "title", "rect", "path", "text", "polyline"}
    assert len([e for e in root.iter() if e.tag.endswith("polyline")]) == len(run.steps)


def test_the_figure_shows_the_timeline_that_was_asked_for() -> None:
    import dataclasses

    quiet = dataclasses.replace(small_step("none"), spans=())
    run = small_run(steps=(quiet, small_step("swap")))
    assert "copy out" in render_figure(run, timeline_of="swap")
    assert "copy out" not in render_figure(run, timeline_of="none")
    with pytest.raises(ValueError, match=r"no way is called 'swop'; known are none, swap"):
        render_figure(run, timeline_of="swop")


def test_the_trace_has_a_process_per_way_and_memory_as_a_counter(tmp_path: Path) -> None:
    run = small_run(steps=(small_step("swap"), planned_step()))
    write_run_trace(tmp_path / "trace.json", run)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == run_trace(run)["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"swap", "auto"}
    copies = [event for event in events if event["ph"] == "X" and event["args"]["bytes"] == 100 * 2**20]
    assert [(event["name"], event["ts"], event["dur"]) for event in copies] == [
        ("copy out 100 MiB", 20_000, 40_000)
    ] * 2
    memory = [(event["ts"], event["args"]["bytes"]) for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert memory == list(zip(run.steps[0].memory.times_us, run.steps[0].memory.nbytes))


def test_the_page_is_written(tmp_path: Path) -> None:
    write_page(tmp_path / "report.html", small_run())
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render_page(small_run())


@pytest.mark.parametrize("scale", [1.0, 1.3, 1.99, 5.5, 9.99])
def test_the_axes_of_the_figure_have_a_few_round_marks(scale: float) -> None:
    import dataclasses

    for power in range(1, 8):
        curve = MemoryCurve(times_us=(0.0, scale * 10**power), nbytes=(1, int(scale * 1000**power)))
        step = dataclasses.replace(small_step("none"), spans=(), memory=curve)
        words = re.findall(
            r'text-anchor="(?:middle|end)"[^>]*>([^<]*)<', render_figure(small_run(steps=(step,), budget_bytes=None))
        )
        times = [float(word.removesuffix(" ms")) for word in words if word.endswith(" ms")]
        sizes = [word for word in words if word.endswith("B")]
        assert 3 <= len(times) <= 7, times
        assert times[0] == 0
        assert times == pytest.approx([float(f"{times[1]:.1g}") * at for at in range(len(times))])
        assert 4 <= len(sizes) <= 9, sizes
        assert len(set(sizes)) == len(sizes)
