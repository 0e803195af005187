"""A load that was handed to a worker, and whose caller is interrupted before it has the completion in its hands."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.activation_checkpoint.far.disk import DiskTier
from hyper_parallel.core.activation_checkpoint.far.disk_workers import Direction
from hyper_parallel.testing import simulated_accelerator


@pytest.fixture(autouse=True)
def _on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")


def test_its_buffer_goes_only_when_the_copy_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A signal handler that raises: the buffer was let go as soon as the worker had queued the copy into it.
    submit = DiskTier._submit
    lost: list[Any] = []  # weak references to completions

    def interrupted(self: DiskTier, extent: Any, job: Any) -> None:
        is_first_read = job.direction is Direction.READ and not lost
        if is_first_read:
            lost.append(weakref.ref(job.completion))
        submit(self, extent, job)
        if is_first_read:
            raise SystemExit(143)

    monkeypatch.setattr(DiskTier, "_submit", interrupted)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    x = torch.randn(8, 64)

    def step() -> torch.Tensor:
        y = hp.swap(lambda v: (v @ weight).sin().exp(), x)
        y.sum().backward()
        gradient, weight.grad = weight.grad, None
        return gradient

    with simulated_accelerator(
        timing="lazy", min_bytes=0, tail_bytes=0, window_bytes=0, tiers=("disk",), disk_path=str(tmp_path)
    ):
        with pytest.raises(SystemExit):
            step()
        weight.grad = None
        while lost[0]() is not None:  # until the worker has done what was handed to it
            time.sleep(0.002)
        got = step()  # any op raises what went wrong meanwhile
    assert torch.equal(got, step())


def test_a_load_that_was_waited_for_holds_its_buffer_no_longer(tmp_path: Path) -> None:
    """The record keeps the completion as long as a retained graph lives, and must not keep the bytes with it."""
    x = torch.randn(8, 64, requires_grad=True)
    x.grad = torch.zeros_like(x)
    with simulated_accelerator(
        min_bytes=0, tail_bytes=0, window_bytes=0, tiers=("disk",), disk_path=str(tmp_path)
    ) as device:
        loss = hp.swap(lambda v: (v * 2).sin().exp(), x).sum()
        before = device.live_bytes
        for _ in range(2):
            loss.backward(retain_graph=True)
            assert device.live_bytes <= before + x.nbytes  # the gradient
        assert device.swapped_bytes
