"""The examples of the Platform contract: one file each, run unchanged on every framework, with two and four processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
TRIES = 3
TAKEN = re.compile(r"address already in use|EADDRINUSE|Failed to bind", re.IGNORECASE)
EXAMPLES = {
    "sequence_parallel_attention": (1, r"{size} ranks, {tokens} tokens each: value and gradients as in one process"),
    "data_parallel": (0, r"rank \d of {size}: weights after 3 clipped steps as in one process"),
    "sharded_checkpoint": (0, r"rank \d of {size}: wrote {rows} rows, read {columns} columns of all rows"),
}
"""Name to how many ranks speak (0: all) and what they say."""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(name: str, platform_name: str, size: int) -> tuple[list[int], str]:
    """The exit codes of all ranks, and what they wrote. Ranks meet as torchrun tells them to: by its variables."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    quiet = {"OMP_NUM_THREADS": "1", "GLOG_v": "3", "HYPER_PARALLEL_PLATFORM": platform_name}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"examples.{name}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, **meeting, **quiet, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    try:
        written = "".join(rank.communicate(timeout=LIMIT_S)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.wait() for rank in ranks], written


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_same_file_runs_on_this_framework(name: str, platform_name: str, size: int) -> None:
    for _ in range(TRIES):
        codes, written = run(name, platform_name, size)
        if not any(codes) or not TAKEN.search(written):
            break
    assert not any(codes), written
    speakers, line = EXAMPLES[name]
    said = re.findall(line.format(size=size, tokens=32 // size, rows=16 // size, columns=8 // size), written)
    assert len(said) == (speakers or size), written


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_short_and_names_no_framework(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert len(text.splitlines()) < 80
    assert not re.search(r"^\s*(import|from) (torch|mindspore)", text, re.MULTILINE)
