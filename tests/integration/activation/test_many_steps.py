"""A thousand steps of changing shapes: bytes and records are as flat at the end as at the beginning."""

from __future__ import annotations

import gc
import random

import torch

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

from .helpers import engines
from .kinds import swap_everything
from .models import WIDTH

NUM_STEPS = 1000
MOST_ROWS = 64


class _Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin()


def test_a_thousand_steps_of_changing_shapes_leave_nothing_behind() -> None:
    chance = random.Random(0)
    swapped = hp.swap_wrapper(_Small())
    selective = hp.checkpoint_wrapper(_Small(), policy_fn=swap_everything, swap_inputs=True)
    hp.SwapManager().set_forward_prefetch_layer(swapped, selective)
    held_at: dict[int, int] = {}
    objects_at: dict[int, int] = {}
    live_at: dict[int, int] = {}
    with simulated_accelerator(window_bytes=2048, tail_bytes=1024, prefetch_bytes=2048) as sim:
        for step in range(NUM_STEPS):
            x = torch.rand(1 + chance.randrange(MOST_ROWS), WIDTH, requires_grad=True)
            out = selective(swapped(x))
            if step % 10 == 3:
                del out  # a forward that no backward follows
            elif step % 10 == 7:
                loss = out.sum()
                loss.backward(retain_graph=True)
                loss.backward()
                del loss, out
            else:
                out.sum().backward()
                del out
            del x
            if step % 100 == 99:
                gc.collect()
                stats = hp.stats()
                assert stats.live_records == 0
                assert all(tier.live_bytes == 0 for tier in stats.tiers)
                held_at[step] = stats.pinned_bytes
                live_at[step] = sim.live_bytes
                objects_at[step] = len(gc.get_objects())
        (tier,) = hp.stats().tiers
        (engine,) = engines()
        assert len(set(live_at.values())) == 1, "device bytes are those of parameters and gradients, every time"
        assert held_at[NUM_STEPS - 1] == held_at[NUM_STEPS // 2 - 1], "far memory stopped growing long ago"
        assert tier.peak_held_bytes <= 1.05 * tier.peak_live_bytes + 4096 * tier.allocations
        assert objects_at[NUM_STEPS - 1] - objects_at[199] < 500, "no list grows with the steps"
        assert engine.in_flight_bytes <= 2048
        assert not engine._forecasts
        assert len(engine._tail) + len(engine._in_flight) + len(engine._shared) < 500
