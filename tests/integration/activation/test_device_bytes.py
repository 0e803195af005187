"""``SwapConfig.device_bytes``: room that nobody uses is used, and not a byte more."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.testing import simulated_accelerator

WIDTH = 64
KIB = 1024
VALUE = 16 * KIB  # one activation


def layers(count: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(count))


def matmuls(answer: CheckpointPolicy) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return answer if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


SWAP, SAVE = matmuls(CheckpointPolicy.MUST_SWAP), matmuls(CheckpointPolicy.MUST_SAVE)


def run(stack: nn.ModuleList, policies: list[Any], *, swap_inputs: bool = True) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH).requires_grad_()
    y = x
    for layer, policy in zip(stack, policies):
        y = hp.checkpoint(layer, y, policy_fn=policy, swap_inputs=swap_inputs and policy is SWAP)
    gradients = torch.autograd.grad(y.square().sum(), [x, *stack.parameters()])
    return list(gradients)


def test_copies_lag_behind_the_window_while_there_is_room() -> None:
    stack = layers(6)
    with simulated_accelerator(timing="lazy", window_bytes=0, device_bytes=2**30) as sim:
        run(stack, [SWAP] * 6)
        roomy = [what for what, _ in sim.events]
    with simulated_accelerator(timing="lazy", window_bytes=0) as sim:
        run(stack, [SWAP] * 6)
        tight = [what for what, _ in sim.events]
    # Under lazy timing nothing is done before somebody waits: with room nobody does, and what is still here stays.
    assert "drop" not in roomy[: roomy.index("use")]
    assert "load" not in roomy
    assert tight[: tight.index("use")].count("drop") >= 6


def test_what_is_saved_beside_the_schedule_makes_the_copies_go() -> None:
    """Late layers that save everything admit nothing: the schedule must look all the same, or the early copies never go."""
    stack = layers(8)
    policies = [SWAP] * 3 + [SAVE] * 5

    def peak_and_events(**settings: Any) -> tuple[int, list[str]]:
        with simulated_accelerator(timing="lazy", window_bytes=0, prefetch_bytes=0, **settings) as sim:
            run(stack, policies)
            return sim.peak_bytes, [what for what, _ in sim.events]

    strict, _ = peak_and_events()
    roomy, _ = peak_and_events(device_bytes=2**30)
    bound, events = peak_and_events(device_bytes=strict - 4 * VALUE)
    assert bound <= strict < roomy
    forward = events[: events.index("load")]
    assert forward[:6] == ["offload"] * 6  # all copies are queued first
    assert forward.count("drop") == 6  # and all are gone by the turn


def test_loads_run_far_ahead_where_there_is_room() -> None:
    stack = layers(6)

    def loads_before_second_use(**settings: Any) -> int:
        with simulated_accelerator(timing="eager", window_bytes=0, prefetch_bytes=VALUE, **settings) as sim:
            run(stack, [SWAP] * 6)
            events = [what for what, _ in sim.events]
        return events[: events.index("use", events.index("use") + 1)].count("load")

    assert loads_before_second_use() == 2
    assert loads_before_second_use(device_bytes=300 * KIB) == 9
    assert loads_before_second_use(device_bytes=2**30) == 12


def test_a_layer_that_saves_everything_starts_the_loads_of_those_below() -> None:
    stack = layers(8)
    policies = [SWAP] * 4 + [SAVE] * 4
    with simulated_accelerator(timing="eager", window_bytes=0, prefetch_bytes=VALUE, device_bytes=2**30) as sim:
        run(stack, policies)
        events = [what for what, _ in sim.events]
    assert "miss" not in events


def test_gradients_are_bitwise_the_same() -> None:
    stack = layers(6)
    x = torch.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH).requires_grad_()
    y = x
    for layer in stack:
        y = layer(y)
    expected = torch.autograd.grad(y.square().sum(), [x, *stack.parameters()])
    for timing in ("lazy", "random", "eager"):
        for device_bytes in (0, 200 * KIB, 400 * KIB, 2**30):
            with simulated_accelerator(timing=timing, seed=3, device_bytes=device_bytes):
                got = run(stack, [SWAP, SAVE, SWAP, SWAP, SAVE, SAVE])
            assert all(torch.equal(a, b) for a, b in zip(got, expected)), (timing, device_bytes)
