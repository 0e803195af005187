"""Bytes: what the device no longer holds, what the host pins, what goes to disk."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.backends.torch.devices import AcceleratorBackend

from .parts import SWAPPING, assert_same, stack, step

pytestmark = pytest.mark.gpu

MIB = 2**20
ROWS, WIDTH, LAYERS = 4096, 1024, 12
SAVED_BYTES = ROWS * WIDTH * 4  # one activation: 16 MiB


class _Sine(nn.Module):
    """Saves its input, and makes an output of the same size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def _peak_of_a_step(wrap: Any) -> int:
    """Device bytes at the highest moment of a step, above what was there before it."""
    model = nn.Sequential(*(wrap(_Sine()) for _ in range(LAYERS)))
    x = torch.ones(ROWS, WIDTH, device="cuda", requires_grad=True)
    model(x).sum().backward()
    x.grad = None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(x).sum().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_peak_is_the_sum_of_its_windows() -> None:
    plain = _peak_of_a_step(lambda layer: layer)
    assert plain >= (LAYERS - 1) * SAVED_BYTES
    with hp.configure(min_bytes=MIB, tail_bytes=0, window_bytes=2 * SAVED_BYTES, prefetch_bytes=2 * SAVED_BYTES):
        swapped = _peak_of_a_step(hp.swap_wrapper)
    # In flight out (one more is admitted before the oldest goes), brought back ahead (one more likewise), what the op
    # reads and writes, the gradient and its input.
    most = (2 + 1 + 2 + 1 + 4) * SAVED_BYTES
    assert swapped <= most < plain, (
        f"{swapped / SAVED_BYTES:.1f} activations at the peak, plain {plain / SAVED_BYTES:.1f}"
    )


@pytest.mark.parametrize("wrap", SWAPPING.values(), ids=SWAPPING)
def test_nothing_is_left_on_the_device(wrap: Any) -> None:
    model = stack(wrap)
    step(model)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for seed in range(3):
        step(model, seed=seed)
        model(torch.ones(2, 128, 256, device="cuda"))  # a forward without backward
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    assert hp.stats().live_records == 0


def test_pinned_memory_is_exact_and_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    allocate = AcceleratorBackend.allocate_host

    def counted(self: AcceleratorBackend, nbytes: int, *, pinned: bool) -> Any:
        asked.append(nbytes)
        return allocate(self, nbytes, pinned=pinned)

    monkeypatch.setattr(AcceleratorBackend, "allocate_host", counted)
    model = nn.Sequential(*(hp.swap_wrapper(_Sine()) for _ in range(LAYERS)))
    x = torch.ones(ROWS, WIDTH, device="cuda", requires_grad=True)
    with hp.configure(min_bytes=MIB, tail_bytes=0, window_bytes=2 * SAVED_BYTES, prefetch_bytes=2 * SAVED_BYTES):
        for _ in range(2):
            model(x).sum().backward()
        torch.cuda.synchronize()
        asked_by_then = list(asked)
        assert asked_by_then, "nothing was pinned"
        for _ in range(4):
            model(x).sum().backward()
        torch.cuda.synchronize()
        stats = hp.stats()
    assert asked == asked_by_then, f"host memory was asked for after the second step: {asked[len(asked_by_then) :]}"
    (pinned,) = [tier for tier in stats.tiers if tier.name == "pinned"]
    assert pinned.peak_live_bytes >= (LAYERS - 4) * SAVED_BYTES
    assert pinned.peak_held_bytes <= 1.05 * pinned.peak_live_bytes, f"{pinned}"
    assert sum(asked) <= 1.05 * pinned.peak_live_bytes, f"asked for {sum(asked)}, {pinned}"


def test_host_memory_is_really_page_locked() -> None:
    backend = AcceleratorBackend(torch.device("cuda", torch.cuda.current_device()))
    block = backend.allocate_host(3 * MIB + 17, pinned=True)
    assert block.is_pinned()
    assert block.nbytes == 3 * MIB + 17
    del block


@pytest.mark.parametrize("tiers", [("disk",), ("pinned", "disk"), ("pageable",)], ids="_".join)
@pytest.mark.parametrize("verify", [False, True], ids=["trusted", "verified"])
def test_other_tiers(tiers: tuple[str, ...], verify: bool, tmp_path: Path) -> None:
    wanted = step(stack())
    # Room for a few tensors only in the first tier, so that the rest spills.
    settings: dict[str, Any] = {"host_limit": 2 * MIB} if tiers == ("pinned", "disk") else {}
    config = hp.SwapConfig(
        min_bytes=0,
        tail_bytes=0,
        window_bytes=MIB,
        prefetch_bytes=MIB,
        tiers=tiers,
        disk_path=str(tmp_path) if "disk" in tiers else None,
        verify=verify,
        **settings,
    )
    model = stack(hp.swap_wrapper)
    with hp.configure(config):
        for _ in range(3):
            assert_same(step(model), wanted)
        written = {tier.name: tier.written_bytes for tier in hp.stats().tiers}
    for tier in tiers:
        assert written.get(tier, 0) > 0, f"nothing went to the {tier} tier: {written}"


def test_over_every_cap_values_stay() -> None:
    wanted = step(stack())
    model = stack(hp.swap_wrapper)
    with hp.configure(hp.SwapConfig(min_bytes=0, tail_bytes=0, window_bytes=MIB, prefetch_bytes=MIB, host_limit=MIB)):
        assert_same(step(model), wanted)
        stats = hp.stats()
    assert stats.kept_bytes.get("over_limit", 0) > 0, f"{stats}"


def test_parameters_stay() -> None:
    model = stack(hp.swap_wrapper)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    step(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert hp.stats().kept_count.get("parameter", 0) > 0
