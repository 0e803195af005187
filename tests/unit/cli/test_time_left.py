"""Estimates of the time that is left, on timelines of runs: steady ones, a demo as it was, and machines that change."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

import pytest

from hyper_parallel.cli.console import Console
from hyper_parallel.cli.steps_done import add_step, watched_steps
from hyper_parallel.cli.time_left import TimeLeft, in_words


def steady(units: int, seconds: float) -> list[float]:
    return [seconds * (at + 1) for at in range(units)]


def twice_slower_half_way(units: int) -> list[float]:
    half = units // 2
    return [1.0 + at for at in range(half)] + [half + 2.0 * (at + 1) for at in range(units - half)]


def ratios(ends: list[float], *, skip: int) -> list[float]:
    """What was said beside what it came to, at the end of each unit but the first and the last ones."""
    left = TimeLeft(len(ends), 0.0)
    found = []
    for at, end in enumerate(ends):
        left.reach(at + 1, end)
        said = left.seconds(end)
        assert said is not None
        if skip <= at < len(ends) - 3:
            found.append(said / (ends[-1] - end))
    return found


def test_a_steady_machine_is_told_exactly() -> None:
    assert ratios(steady(60, 1.5), skip=0) == pytest.approx([1.0] * 57)


def test_a_machine_that_becomes_twice_slower_half_way_is_noticed_within_a_sixth_of_the_work() -> None:
    found = ratios(twice_slower_half_way(80), skip=0)
    assert min(found[:39]) == pytest.approx(2 / 3, abs=0.35), "nobody can know before it happens"
    assert found[40 + 13 :] == pytest.approx([1.0] * len(found[40 + 13 :]))


def test_a_machine_that_becomes_twice_faster_is_noticed_too() -> None:
    ends = twice_slower_half_way(80)
    ends = [ends[-1] - end for end in reversed([0.0, *ends[:-1]])]
    assert ratios(ends, skip=54) == pytest.approx([1.0] * 23)


def test_noise_of_half_a_unit_is_within_a_third() -> None:
    ends = [at + 1 + 0.5 * (-1) ** at for at in range(60)]
    assert all(0.66 < ratio < 1.5 for ratio in ratios(ends, skip=8)[:-8])


# Seconds and steps of a demo on two cores that up to twenty other programs used, with a start of a process before some steps.
DEMO = [
    (25, 1),
    (29, 2),
    (32, 3),
    (73, 4),
    (91, 5),
    (103, 6),
    (119, 7),
    (135, 8),
    (151, 9),
    (167, 10),
    (181, 11),
    (197, 12),
    (215, 13),
    (223, 14),
    (235, 15),
    (253, 16),
    (278, 17),
    (300, 18),
    (311, 19),
    (322, 20),
    (336, 21),
    (358, 22),
    (386, 23),
    (402, 24),
    (419, 25),
    (489, 26),
    (522, 27),
    (536, 28),
    (576, 29),
    (601, 30),
    (612, 31),
    (619, 33),
    (621, 34),
    (657, 35),
    (680, 36),
    (703, 37),
    (750, 38),
    (761, 39),
    (790, 40),
    (811, 41),
    (830, 42),
    (849, 43),
    (864, 44),
    (882, 45),
    (900, 46),
    (912, 47),
    (930, 48),
    (1037, 52),
    (1050, 53),
    (1062, 54),
    (1072, 55),
    (1081, 56),
    (1092, 57),
    (1103, 58),
]


def test_a_demo_on_a_busy_machine_is_told_within_a_factor_of_two_and_mostly_better() -> None:
    """The shares that were used before said too little by a factor of two to three."""
    end, total = DEMO[-1]
    left = TimeLeft(total, 0.0)
    found = []
    for now, done in DEMO:
        left.reach(done, now)
        said = left.seconds(now)
        assert said is not None
        found.append(said / max(end - now, 1.0))
    assert all(0.6 < ratio < 2.0 for ratio in found[6:-6])
    assert sum(0.7 < ratio < 1.5 for ratio in found[6:-6]) > 0.75 * len(found[6:-6])
    assert statistics.median(found) == pytest.approx(1.0, abs=0.25)


def test_a_unit_that_does_not_end_makes_the_estimate_longer() -> None:
    left = TimeLeft(10, 0.0)
    assert left.seconds(0.5) is None, "nothing is done yet"
    for at in range(1, 6):
        left.reach(at, at)
    said = [left.seconds(now) for now in (5.0, 6.0, 20.0, 60.0)]
    assert said[0] == pytest.approx(5.0)
    assert said[1] == pytest.approx(4.2)
    assert said[3] is not None
    assert said[2] is not None
    assert said[3] > said[2] > 0


def test_work_that_turns_out_to_be_less_does_not_look_like_speed() -> None:
    """Seen in a demo: planning ended after 20 of 35 steps, and 700 s before the end "about 30 s left" was said."""
    left = TimeLeft(100, 0.0)
    for at in range(1, 31):
        left.reach(at, 10.0 * at)
    left.shrink(15)
    assert left.seconds(300.0) == pytest.approx(550.0)


def test_a_part_that_tells_how_far_it_is_and_ends_early_shortens_the_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Console(is_plain=True).progress("x", 3, shares=[10.0, 40.0, 10.0]) as progress:
        progress("first")
        for tenth in range(1, 11):
            now[0] += 10.0
            progress.reach(tenth / 10)
        progress("second")
        for fortieth in range(1, 11):
            now[0] += 10.0
            progress.reach(fortieth / 40)
        capsys.readouterr()
        progress("third")
    assert capsys.readouterr().err == "[3/3] third (200 s so far, about 2 min left)\n"


def test_nothing_is_left_when_all_is_done_and_less_than_before_is_not_taken() -> None:
    left = TimeLeft(4, 0.0)
    left.reach(4, 8.0)
    left.reach(2, 9.0)
    assert left.seconds(9.0) == 0.0


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.0, "a few seconds"), (44.0, "about 40 s"), (200.0, "about 3 min")], ids=str
)
def test_estimates_are_rounded(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_steps_of_another_process_are_told_and_leave_no_file(tmp_path: Path) -> None:
    path, told, is_told = tmp_path / "steps", [], threading.Event()

    def tell(done: int) -> None:
        told.append(done)
        if done == 2:
            is_told.set()

    with watched_steps(path, tell):
        add_step(path)
        add_step(path)
        assert is_told.wait(600)
    assert told == sorted(told)
    assert not path.exists()
    add_step(None)  # nobody asked
