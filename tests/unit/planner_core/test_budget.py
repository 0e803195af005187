from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.config import show_bytes
from hyper_parallel.planner.budget import parse_budget, show_setting

from .small import small_profile


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [("20GiB", 20 * 2**30), ("500MB", 500_000_000), ("1.5 kib", 1536), (7, 7), ("12", 12), ("2 TB", 2 * 10**12)],
)
def test_what_a_person_writes(given: Any, nbytes: int) -> None:
    assert parse_budget(given) == nbytes


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("20 potatoes", ValueError, r"budget: cannot read '20 potatoes' as bytes; write a number and one of B, KB"),
        ("", ValueError, r"budget: cannot read ''"),
        (0, ValueError, r"budget: 0 is no memory at all"),
        ("0GiB", ValueError, r"budget: '0GiB' is no memory at all"),
        (-1, ValueError, r"budget: -1 is negative"),
        ("-3GiB", ValueError, r"budget: '-3GiB' is negative"),
        (None, TypeError, r"budget: expected bytes as an int or a string such as '20GiB', got None"),
        (True, TypeError, r"budget: expected bytes .* got True"),
        (1.5, TypeError, r"budget: expected bytes .* got 1.5"),
        ("9" * 400 + "GiB", ValueError, r"is more than any machine has"),
    ],
)
def test_what_is_no_budget(given: Any, error: type[Exception], text: str) -> None:
    from hyper_parallel import plan_memory

    with pytest.raises(error, match=text):
        parse_budget(given)
    with pytest.raises(error, match=text):
        plan_memory(small_profile(), given)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (20 * 2**30, "20.00 GiB"), (2**51, "2048.00 TiB")],
)
def test_bytes_for_a_person(nbytes: int, text: str) -> None:
    assert show_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("min_bytes", 2**20, "1.00 MiB"),
        ("disk_limit", 2**30, "1.00 GiB"),
        ("attempts", 2**20, "1048576"),
        ("host_limit", None, "not set"),
        ("verify", False, "no"),
        ("tiers", ("pinned", "disk"), "pinned, disk"),
    ],
)
def test_settings_for_a_person(name: str, value: object, text: str) -> None:
    assert show_setting(name, value) == text
