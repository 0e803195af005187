"""The page where people read it: it renders, its controls work, nothing is complained about, nothing is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_parallel.report.page import write_page
from tests.integration.report.browser import CHROMIUM, Browser, browser
from tests.unit.report.runs import HOSTILE, hostile_run, small_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")

LINES = "document.querySelectorAll('#memory-plot path[data-step]').length"
TIP = "document.getElementById('tip').style.display === 'block' ? document.getElementById('tip').textContent : ''"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def page(shared: Browser, tmp_path: Path) -> Iterator[Browser]:
    write_page(tmp_path / "report.html", small_run())
    shared.events.clear()
    shared.open(tmp_path / "report.html")
    yield shared
    assert shared.problems() == []
    assert shared.requests() == [(tmp_path / "report.html").resolve().as_uri()], "nothing but the page itself"


def test_every_part_is_drawn(page: Browser) -> None:
    assert page.value(LINES) == 3
    assert page.value("document.querySelectorAll('#timeline-plot rect').length") > 6
    assert page.value("document.querySelectorAll('#peak-plot rect').length") == 9
    assert page.value("document.querySelectorAll('#fate-plot rect').length") == 6
    assert page.value("document.querySelectorAll('#ops-plot rect').length") == 3
    words = page.value("document.body.innerText")
    for expected in ("In one table", "Memory over one step", "bitwise equal", "Predicted against measured"):
        assert expected in words
    assert page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off at the side"


def test_a_way_is_hidden_and_shown_again(page: Browser) -> None:
    page.click("#memory-steps button")
    assert page.value(LINES) == 2
    assert page.value("document.querySelector('#memory-steps button').getAttribute('aria-pressed')") == "false"
    page.click("#memory-steps button")
    assert page.value(LINES) == 3


@pytest.mark.parametrize("plot", ["memory", "timeline"])
def test_dragging_zooms_and_the_button_goes_back(page: Browser, plot: str) -> None:
    labels = f"[...document.querySelectorAll('#{plot}-plot text')].map((t) => t.textContent).join('|')"
    before = page.value(labels)
    assert page.value(f"document.getElementById('{plot}-reset').disabled")
    box = page.box(f"#{plot}-plot svg")
    y = box["y"] + 20
    page.mouse("mousePressed", box["x"] + 0.4 * box["width"], y)
    page.mouse("mouseMoved", box["x"] + 0.5 * box["width"], y)
    page.mouse("mouseReleased", box["x"] + 0.6 * box["width"], y)
    assert page.value(labels) != before
    page.click(f"#{plot}-reset")
    assert page.value(labels) == before


def test_pointing_at_the_curve_reads_every_way(page: Browser) -> None:
    x, y = page.middle("#memory-plot svg")
    page.mouse("mouseMoved", x, y)
    said = page.value(TIP)
    assert [line.split(":")[0] for line in said.splitlines()[1:]] == ["none", "swap", "auto"]
    assert "MiB" in said


def test_pointing_at_a_span_names_it(page: Browser) -> None:
    page.mouse("mouseMoved", *page.middle("#timeline-plot g rect"))
    assert page.value(TIP).startswith("forward layers.0\n0 µs + 90.0 ms")


def test_another_timeline_is_chosen(page: Browser) -> None:
    page.click("#timeline-steps button:first-child")
    pressed = "[...document.querySelectorAll('#timeline-steps button')].map((b) => b.getAttribute('aria-pressed'))"
    assert page.value(pressed) == ["true", "false", "false"]


def test_light_and_dark_follow_the_system_and_the_button(page: Browser, tmp_path: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.value(ground)
    page.click("#theme")
    dark = page.value(ground)
    assert dark != light
    page.events.clear()
    page.open(tmp_path / "report.html", theme="dark")
    assert page.value(ground) == dark


def test_paper_is_white_even_from_the_dark(page: Browser) -> None:
    page.click("#theme")
    page.ask("Emulation.setEmulatedMedia", media="print")
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.value("getComputedStyle(document.querySelector('.controls')).display") == "none"
    page.ask("Emulation.setEmulatedMedia", media="")


def test_on_a_phone_charts_are_tall_letters_keep_their_size_and_cells_are_below_each_other(
    shared: Browser, tmp_path: Path
) -> None:
    write_page(tmp_path / "report.html", small_run())
    shared.open(tmp_path / "report.html", width=390, height=844)
    assert shared.value("document.documentElement.scrollWidth") <= 390
    assert shared.box("#memory-plot svg")["height"] > 250
    letters = "document.querySelector('#memory-plot text').getBoundingClientRect().height"
    assert shared.value(letters) > 9
    first, second = (shared.box(f"td:nth-child({at})") for at in (1, 2))
    assert second["y"] >= first["y"] + first["height"] - 1
    head = shared.value("getComputedStyle(document.querySelector('td:nth-child(2)'), '::before').content")
    assert head.replace('" "', "") == '"peak: "'


def test_on_paper_the_lines_have_names_and_sections_may_break(page: Browser) -> None:
    page.ask("Emulation.setEmulatedMedia", media="print")
    assert page.value("getComputedStyle(document.getElementById('memory-steps')).display") != "none"
    assert page.value("getComputedStyle(document.getElementById('memory-reset').parentNode).display") == "none"
    assert page.value("getComputedStyle(document.querySelector('section')).breakInside") == "auto"
    page.value("dispatchEvent(new Event('beforeprint'))")
    assert page.value("document.querySelector('#memory-plot svg').getAttribute('viewBox')").startswith("0 0 680 ")
    page.ask("Emulation.setEmulatedMedia", media="")


def test_hostile_names_are_only_words(shared: Browser, tmp_path: Path) -> None:
    write_page(tmp_path / "hostile.html", hostile_run())
    shared.events.clear()
    shared.open(tmp_path / "hostile.html")
    assert shared.value("document.title") == HOSTILE
    assert shared.value("document.querySelectorAll('img').length") == 0
    assert shared.value("document.scripts.length") == 2
    assert shared.value("document.querySelector('#memory-steps button').textContent") == HOSTILE
    assert shared.problems() == []
    assert len(shared.requests()) == 1
