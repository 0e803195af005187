"""One tensor's life, drawn in docs/architecture.md, compared with the files that run for it on the simulated accelerator."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

ROOT = Path(hp.__file__).parent
SECTION = (
    (ROOT.parent / "docs" / "architecture.md").read_text().split("\n## A tensor's life\n", 1)[1].split("\n## ", 1)[0]
)
DRAWING, BESIDE = SECTION.split("### The files of it\n", 1)[1].split("`tests/", 1)[0].split("Beside them", 1)
DEVICE = "backends/torch/devices.py"
ENGINE = "core/activation_checkpoint/"
CALL = {f"{ENGINE}calls.py", f"{ENGINE}wrapper.py", "backends/torch/wrappers.py", "backends/torch/checkpointing.py"}
ENTRIES = {  # what a framework calls for a saved tensor
    ("backends/torch/saved_tensors.py", "pack"),
    ("backends/torch/saved_tensors.py", "unpack"),
    (f"{ENGINE}packer.py", "__exit__"),
    (f"{ENGINE}engine.py", "end_of_task"),
    (f"{ENGINE}record.py", "__del__"),
}
MILESTONES = {  # where a life is decided, moves on or ends
    ("packer.py", "_decide"),
    ("pool.py", "lend"),
    ("devices.py", "copy_all"),
    ("forecast.py", "advance"),
    ("tensor_adapter.py", "view_for_backward"),
    ("host.py", "release"),
}


def named_in(text: str) -> set[str]:
    names = re.findall(r"[\w/]+\.py", text)
    return {name if (ROOT / name).exists() else ENGINE + name for name in names}


def name_of(code: CodeType) -> str | None:
    path = Path(code.co_filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


def chain_to(frame: FrameType) -> list[tuple[str, str]]:
    """The files and functions from what the framework called to ``frame``; the simulated device stands for a real one."""
    chain: list[tuple[str, str]] = []
    at: FrameType | None = frame
    while at is not None and (name := name_of(at.f_code)) is not None and name not in CALL:
        chain.insert(0, (name, at.f_code.co_name))
        at = at.f_back
    if not chain or chain[0] not in ENTRIES:
        return []
    simulated = [place for place, (name, _) in enumerate(chain) if "simulation" in name]
    return [*chain[: simulated[0]], (DEVICE, chain[simulated[0]][1])] if simulated else chain


@contextlib.contextmanager
def traced() -> Iterator[tuple[set[str], set[str]]]:
    """The files on the way to a milestone, and all files that ran for saved tensors."""
    path: set[str] = set()
    everything: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        chain = chain_to(frame) if event == "call" else []
        if chain:
            everything.add(chain[-1][0])
            if (Path(chain[-1][0]).name, chain[-1][1]) in MILESTONES:
                path.update(name for name, _ in chain)

    sys.setprofile(look)
    try:
        yield path, everything
    finally:
        sys.setprofile(None)


def forward(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = (x * 2).exp()
    return x


def lives(monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], set[str]]:
    """Steps whose values leave alone and at once, and in batches that are loaded ahead.

    They run without the native extension, whose answers about tensors take the place of some of the files beside the path.
    """
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "0")
    x = torch.ones(8, 64, requires_grad=True)
    swapped = hp.swap_wrapper(forward)

    def steps() -> None:
        for window_bytes in (0, None):
            with hp.configure(min_bytes=0, tail_bytes=0, window_bytes=window_bytes):
                swapped(x).sum().backward()

    with simulated_accelerator() as simulation:
        steps()  # the first step also makes the engine
        with traced() as (path, everything):
            steps()
        assert simulation.swapped_bytes > 0
    return path, everything


def test_the_drawn_files_are_those_that_a_swapped_tensor_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    path, everything = lives(monkeypatch)
    drawn = named_in(DRAWING)
    assert path == drawn
    assert len(drawn) <= 12
    assert everything - drawn == named_in(BESIDE)


def test_the_drawing_has_three_crossings() -> None:
    assert sorted(re.findall(r"crossing (\d)", DRAWING)) == ["1", "1", "2", "2", "3"]
