"""The threads and descriptors of a disk tier live as long as something uses it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

import hyper_parallel as hp
from hyper_parallel.config import SwapConfig

from .helpers import collector_off
from .scenario import batch

LIMIT_S = 600.0


def _disk_threads() -> int:
    return sum(thread.name.startswith("hyper_parallel disk") for thread in threading.enumerate())


def _open_files(directory: Path) -> int:
    """Descriptors on swap files under a directory; they have no name there any more."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # the descriptor of the listing itself
    return sum(link.startswith(str(directory)) for link in links)


def _settings(directory: Path) -> SwapConfig:
    directory.mkdir(exist_ok=True)
    return SwapConfig(tiers=("disk",), disk_path=str(directory), min_bytes=1, tail_bytes=0)


def _step(config: SwapConfig) -> torch.Tensor:
    x = batch()
    (gradient,) = torch.autograd.grad(hp.swap(lambda x: x.sin().exp(), x, swap_config=config).sum(), x)
    return gradient


def _wait_for(directory: Path, *, files: int, threads: int) -> None:
    """Threads end by themselves, soon; this waits for them."""
    end = time.monotonic() + LIMIT_S
    while (_open_files(directory), _disk_threads()) != (files, threads) and time.monotonic() < end:
        time.sleep(0.01)
    assert (_open_files(directory), _disk_threads()) == (files, threads)


def test_a_sweep_over_disk_paths_keeps_the_resources_of_one(tmp_path: Path) -> None:
    x = batch()
    (wanted,) = torch.autograd.grad(x.sin().exp().sum(), x)
    with collector_off():
        _step(_settings(tmp_path / "first"))
        files, threads = _open_files(tmp_path), _disk_threads()
        assert files > 0
        assert threads > 0
        for number in range(5):
            assert torch.equal(_step(_settings(tmp_path / str(number))), wanted)
        _wait_for(tmp_path, files=files, threads=threads)
        hp.SwapManager().reset()
        _wait_for(tmp_path, files=0, threads=0)


def test_settings_that_somebody_holds_find_their_file_again(tmp_path: Path) -> None:
    one, two = _settings(tmp_path / "one"), _settings(tmp_path / "two")
    for _ in range(3):
        _step(one)
        _step(two)
    assert [tier.allocations for tier in hp.stats().tiers] == [1, 1]


def test_settings_made_anew_for_every_step_find_their_file_again(tmp_path: Path) -> None:
    for _ in range(3):
        _step(_settings(tmp_path))
    assert [tier.allocations for tier in hp.stats().tiers] == [1]


def test_a_graph_keeps_its_disk_tier_while_others_come_and_go(tmp_path: Path) -> None:
    x = batch()
    (wanted,) = torch.autograd.grad(x.sin().exp().sum(), x)
    y = hp.swap(lambda x: x.sin().exp(), x, swap_config=_settings(tmp_path / "kept"))
    for number in range(3):
        _step(_settings(tmp_path / str(number)))
    (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got, wanted)
    del y, got
    with collector_off():
        _step(_settings(tmp_path / "last"))
        _wait_for(tmp_path, files=_open_files(tmp_path / "last"), threads=2)
