"""What the host takes to issue work, measured where the device cannot hold it up.

A host that runs ahead of a busy device is stopped by a full launch queue, so the seconds of a whole step say what the device
takes, not the host. Blocks are therefore begun on an idle device: what the host then takes for a block is its own. And the
device's own seconds are measured behind work that keeps it busy until the host has issued the block: no gap between two
kernels is the host's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from hyper_parallel.backends.torch.checkpointing import checkpoint
from hyper_parallel.backends.torch.planner.meters import Meter
from hyper_parallel.backends.torch.planner.trial_steps import KEEP_NOTHING, BlockCall, TrialStep
from hyper_parallel.config import SwapConfig
from hyper_parallel.planner.profile import HostCost

__all__ = ["Issued", "host_cost", "issued"]

_ROUNDS: Final = 9
_VALUES: Final = 8  # swapped together, as a region's are
_BYTES: Final = 2**16  # of each
_ALL_LEAVE: Final = SwapConfig(
    min_bytes=0, tail_bytes=0, window_bytes=_VALUES * _BYTES // 2, prefetch_bytes=_VALUES * _BYTES
)

Issued = tuple[float, float]  # seconds of the host, forward and backward


def issued(trial: TrialStep, numbers: Iterable[int]) -> Issued:
    """Medians over the calls ``numbers`` of a trial whose blocks begin on an idle device."""
    calls = [trial.calls[number] for number in numbers if number < len(trial.calls)]
    return _median(map(_forward, calls)), _median(map(_backward, calls))


def _forward(call: BlockCall) -> float | None:
    begin, end = call.forward_begin, call.forward_end
    return None if begin is None or end is None else end.host_seconds - begin.host_seconds


def _backward(call: BlockCall) -> float | None:
    begin, end = call.backward_begin, call.backward_end
    return None if begin is None or end is None else end.host_seconds - begin.host_seconds


def _median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0


def host_cost(
    device: torch.device, meter: Meter, alone: Sequence[Issued], region: Sequence[Issued], ops: int, replayed: int
) -> HostCost:
    """What regions and swaps cost the host.

    ``alone`` and ``region``: each call's seconds left alone and as a region that keeps nothing; ``alone`` is empty where the
    step left alone does not fit, and then the costs per op are not known and count for nothing. ``ops`` and ``replayed``: how
    many ops all calls have, and how many of them such regions run again.
    """
    plain, bare, swapping = small_steps(device, meter, (_run_plain, _run_region, _run_swapped))
    begin = max(0.0, bare[0] - plain[0])
    begin_backward = max(0.0, bare[1] - plain[1])
    regions = len(region)
    recorded = sum(forward for forward, _ in region) - sum(forward for forward, _ in alone) - regions * begin
    rerun = sum(backward for _, backward in region) - sum(backward for _, backward in alone) - regions * begin_backward
    return HostCost(
        region_seconds=begin,
        region_backward_seconds=begin_backward,
        region_op_seconds=max(0.0, recorded) / max(1, ops) if alone else 0.0,
        replayed_op_seconds=max(0.0, rerun) / max(1, replayed) if alone else 0.0,
        swap_out_seconds=max(0.0, swapping[0] - bare[0]) / _VALUES,
        swap_in_seconds=max(0.0, swapping[1] - bare[1]) / _VALUES,
    )


# ------------------------------------------------------------------ small steps


def _total(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack(values).sin()


def _run_plain(values: list[torch.Tensor]) -> Any:
    return _total(*values)


def _run_region(values: list[torch.Tensor]) -> Any:
    return checkpoint(_total, *values, policy_fn=KEEP_NOTHING)


def _run_swapped(values: list[torch.Tensor]) -> Any:
    return checkpoint(_total, *values, swap_inputs=True, policy_fn=KEEP_NOTHING, swap_config=_ALL_LEAVE)


def small_steps(
    device: torch.device, meter: Meter, ways: Sequence[Callable[[list[torch.Tensor]], Any]]
) -> list[Issued]:
    """The host's seconds of a step with next to no work, in each way: medians of rounds in which the ways take turns.

    The first rounds build and prove tapes and are left out.
    """
    rounds: list[list[Issued]] = [[] for _ in ways]
    with torch.enable_grad():
        leaves = [torch.ones(_BYTES // 4, device=device, requires_grad=True) for _ in range(_VALUES)]
        for _ in range(_ROUNDS):
            for run, times in zip(ways, rounds):
                times.append(_small_step(leaves, meter, run))
    late = _ROUNDS // 3
    return [
        (statistics.median(step[0] for step in times[late:]), statistics.median(step[1] for step in times[late:]))
        for times in rounds
    ]


def _small_step(leaves: Sequence[torch.Tensor], meter: Meter, run: Callable[[list[torch.Tensor]], Any]) -> Issued:
    values = [leaf * 1 for leaf in leaves]
    meter.wait()
    start = time.perf_counter()
    output = run(values)
    forward = time.perf_counter() - start
    gradient = torch.ones_like(output)
    del values
    meter.wait()
    start = time.perf_counter()
    torch.autograd.grad(output, leaves, gradient)
    return forward, time.perf_counter() - start
