"""What the pages list is what the code has: reasons, presets, names for ops, fates, defaults, adapters."""

from __future__ import annotations

import dataclasses
import re

import pytest

from hyper_parallel import CheckpointPolicy, SwapConfig, integrations
from hyper_parallel.config import KNOWN_TIERS
from hyper_parallel.core.activation_checkpoint import engine
from hyper_parallel.core.activation_checkpoint.statistics import KeepReason
from hyper_parallel.integrations.treatment import WORDS
from hyper_parallel.planner.rules import ALIASES, FATES, PRESETS

from .blocks import PAGES, ROOT

EVERYWHERE = "\n".join((ROOT / page).read_text() for page in PAGES)


def first_cells(page: str) -> set[str]:
    """What stands in backquotes in the first column of a page's tables."""
    return set(re.findall(r"^\| `\"?(\w+)\"?`", (ROOT / page).read_text(), re.MULTILINE))


def test_every_reason_for_keeping_is_explained() -> None:
    reasons = {value for name, value in vars(KeepReason).items() if name.isupper()}
    assert reasons <= first_cells("docs/troubleshooting.md")


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("docs/policies.md", [*PRESETS, *ALIASES, *FATES, *(p.name for p in CheckpointPolicy)]),
        ("docs/trainers.md", [*WORDS, "budget"]),
        ("docs/tiers.md", [*KNOWN_TIERS, "host_limit", "disk_limit", "disk_path", "verify"]),
        ("docs/concepts.md", ["tail_bytes", "window_bytes", "prefetch_bytes", "device_bytes"]),
    ],
)  # fmt: skip
def test_a_page_names_all_there_is(page: str, names: list[str]) -> None:
    quoted = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", (ROOT / page).read_text()))))
    assert set(names) - quoted == set()


def test_every_setting_is_spoken_of() -> None:
    assert [field.name for field in dataclasses.fields(SwapConfig) if field.name not in EVERYWHERE] == []


def test_defaults_are_those_of_the_code() -> None:
    assert engine._DEFAULT_TAIL_BYTES == 256 * 2**20
    assert engine._DEFAULT_WINDOW_BYTES == 512 * 2**20
    assert SwapConfig().min_bytes == 2**20
    assert "`tail_bytes` is 256 MiB, `window_bytes` 512 MiB" in (ROOT / "docs/concepts.md").read_text()
    reasons = (ROOT / "docs/troubleshooting.md").read_text()
    assert "`min_bytes` (1 MiB)" in reasons
    assert "`tail_bytes` (256 MiB)" in reasons


def test_every_adapter_is_shown() -> None:
    adapters = re.findall(r"^``(\w+)``  ", integrations.__doc__ or "", re.MULTILINE)
    assert len(adapters) == 8
    assert [name for name in adapters if f"hyper_parallel.integrations.{name}" not in EVERYWHERE
            and f"import {name}" not in EVERYWHERE] == []  # fmt: skip
