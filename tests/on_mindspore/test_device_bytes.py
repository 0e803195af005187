"""``SwapConfig.device_bytes`` on MindSpore: the engine checks its window at the end of every region, and not inside one."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import mint

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.testing import simulated_accelerator

WIDTH = 64
VALUE = 4 * WIDTH * WIDTH  # bytes of one activation


def exponentials(answer: CheckpointPolicy) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return answer if op.name == "Exp" else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


SWAP, SAVE = exponentials(CheckpointPolicy.MUST_SWAP), exponentials(CheckpointPolicy.MUST_SAVE)


def layer(x: Any) -> Any:
    return mint.tanh(mint.exp(x * 0.5) * 0.25)


def gradient(policies: list[Any]) -> Any:
    def forward(x: Any) -> Any:
        for policy in policies:
            x = layer(x) if policy is None else hp.checkpoint(layer, x, policy_fn=policy, swap_inputs=policy is SWAP)
        return x.sum()

    x = mindspore.Tensor(np.linspace(-1, 1, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH))
    return mindspore.grad(forward)(x).asnumpy()


def test_what_is_saved_beside_the_schedule_makes_the_copies_go() -> None:
    """Late regions that save everything admit nothing: the engine must check its window all the same."""
    policies = [SWAP] * 3 + [SAVE] * 5
    plain = gradient([None] * len(policies))

    def peak_and_events(**settings: Any) -> tuple[int, list[str]]:
        with simulated_accelerator(timing="lazy", window_bytes=0, prefetch_bytes=0, **settings) as sim:
            np.testing.assert_array_equal(gradient(policies), plain)
            return sim.peak_bytes, [what for what, _ in sim.events]

    strict, _ = peak_and_events()
    roomy, _ = peak_and_events(device_bytes=2**30)
    bound, events = peak_and_events(device_bytes=strict - 2 * VALUE)
    assert bound <= strict + VALUE < roomy  # the last region may hold one value when it ends
    forward = events[: events.index("load")]
    assert forward.count("drop") == forward.count("offload")


def test_the_window_is_checked_when_a_region_ends_and_not_inside_one(monkeypatch: Any) -> None:
    """Inside a region its passing values are counted too, and they go by themselves."""
    log: list[str] = []
    check, admit = Engine._trim_to_window, Engine.admit

    def checked(self: Engine) -> None:
        log.append("check")
        check(self)

    def admitted(self: Engine, *args: Any, **options: Any) -> Any:
        log.append("admit")
        record = admit(self, *args, **options)
        log.append("admitted")
        return record

    monkeypatch.setattr(Engine, "_trim_to_window", checked)
    monkeypatch.setattr(Engine, "admit", admitted)
    with simulated_accelerator(timing="lazy", window_bytes=0, prefetch_bytes=0, tail_bytes=0, device_bytes=2**30):
        gradient([SWAP])
    assert log[:2] == ["admit", "admitted"], log  # nothing is checked while the region's first value is admitted
    assert "check" in log[2:]
