"""A budget as people write it: amounts, shares of the device, and what is refused."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import PlanError
from hyper_parallel.planner.budget import DeviceMemory, agreed_budget, check_budget, parse_budget

GIB = 2**30
CARD = DeviceMemory(device="a card", available_bytes=10 * GIB, expected_state_bytes=2 * GIB)


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        ("90%", 9 * GIB),
        (" 50 % ", 5 * GIB),
        ("12.5%", 10 * GIB // 8),
        ("100%", 10 * GIB),
        ("auto", 7 * GIB),  # 90 %, less the optimizer states that are still to come
        ("Auto", 7 * GIB),
        ("3GiB", 3 * GIB),
        (12345, 12345),
    ],
)
def test_shares_are_of_what_the_device_can_give(budget: int | str, nbytes: int) -> None:
    assert parse_budget(budget, memory=lambda: CARD) == nbytes


@pytest.mark.parametrize("budget", ["0%", "101%", "100.5%", "0.0 %"])
def test_a_percentage_out_of_range_is_refused(budget: str) -> None:
    with pytest.raises(ValueError, match=r"a percentage is above 0 and up to 100, such as '90%'"):
        check_budget(budget)


@pytest.mark.parametrize(
    "budget", ["-5%", "%", "ninety%", "1e2%", "9 0%", "automatic", "90 percent", "20 potatoes", ""]
)
def test_other_words_are_refused_with_examples(budget: str) -> None:
    with pytest.raises(ValueError, match=r"a budget is '20GiB', '500MB', a number of bytes, 'auto', or .* '90%'"):
        check_budget(budget)


def test_a_share_needs_a_device_with_a_limit() -> None:
    with pytest.raises(PlanError, match=r"'auto' is a share of a device's memory, and nothing here says how much"):
        parse_budget("auto")
    with pytest.raises(PlanError, match=r"'90%' is a share.* and an endless card has no limit.*capacity_bytes"):
        parse_budget("90%", memory=lambda: DeviceMemory(device="an endless card"))


def test_an_auto_budget_that_leaves_nothing_says_what_is_there() -> None:
    small = DeviceMemory(device="a card", available_bytes=GIB, expected_state_bytes=2 * GIB)
    with pytest.raises(PlanError, match=r"leaves no memory: a card can give 1\.00 GiB .*states of 2\.00 GiB are still"):
        parse_budget("auto", memory=lambda: small)
    assert parse_budget("90%", memory=lambda: small) == int(0.9 * GIB)


def test_amounts_do_not_ask_the_device() -> None:
    def fails() -> DeviceMemory:
        raise AssertionError("asked")

    assert parse_budget("1KiB", memory=fails) == 1024


class _Ranks:
    """This rank, and another one whose row is given."""

    def __init__(self, other: tuple[int, str | None]) -> None:
        self._other = other

    def gather(self, value: object) -> list[object]:
        return [value, self._other]


def test_of_all_ranks_the_one_with_the_least_decides() -> None:
    assert agreed_budget("50%", lambda: CARD, _Ranks((3 * GIB, None))) == 3 * GIB
    assert agreed_budget("20%", lambda: CARD, _Ranks((3 * GIB, None))) == 2 * GIB


def test_a_rank_that_cannot_read_its_budget_stops_the_others() -> None:
    with pytest.raises(PlanError, match=r"rank 1 failed, so this one stops too: PlanError: no card"):
        agreed_budget("50%", lambda: CARD, _Ranks((0, "PlanError: no card")))
    with pytest.raises(PlanError, match=r"has no limit to its memory"):
        agreed_budget("50%", lambda: DeviceMemory(device="an endless card"), _Ranks((3 * GIB, None)))
