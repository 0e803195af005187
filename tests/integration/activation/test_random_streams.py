"""Random numbers around a selective region: whoever draws them, and whatever the replay leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch import random_state
from hyper_parallel.testing import simulated_accelerator

from .scenario import batch


@torch.library.custom_op("hyper_parallel_tests::thinned", mutates_args=())
def thinned(x: torch.Tensor) -> torch.Tensor:
    """A random op that does not say so, as attention kernels of other packages do not."""
    return x * (torch.rand_like(x) > 0.5)


def _keep_what_is_left(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (output,) = ctx.saved_tensors
    return grad * (output != 0)


thinned.register_autograd(_gradient, setup_context=_keep_what_is_left)


def _saving(name: str, policy: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    return lambda ctx, op, *args, **kwargs: policy if name in str(op) else CheckpointPolicy.MUST_RECOMPUTE


def _silent_then_known(x: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(thinned(x * 2), 0.5, True)[0].sin()


def _known_then_silent(x: torch.Tensor) -> torch.Tensor:
    return thinned(torch.bernoulli(x.sigmoid()) * x).sin()


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP], ids=["saved", "swapped"])
@pytest.mark.parametrize(
    ("function", "kept"), [(_silent_then_known, "thinned"), (_known_then_silent, "bernoulli")], ids=["kept", "replayed"]
)
def test_b47_an_op_that_draws_without_saying_so(
    function: Callable[[torch.Tensor], torch.Tensor], kept: str, policy: CheckpointPolicy
) -> None:
    x = batch()
    torch.manual_seed(3)
    (wanted,) = torch.autograd.grad(function(x).sum(), x)
    with simulated_accelerator():
        torch.manual_seed(3)
        (got,) = torch.autograd.grad(hp.checkpoint(function, x, policy_fn=_saving(kept, policy)).sum(), x)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("device", "is_opaque", "expected"),
    [
        ("cuda:1", False, ["cuda:1"]),
        ("cuda", False, ["cuda:3"]),  # one generator has one name, or the state put back last would be the wrong one
        ("cuda:1", True, ["cpu", "cuda:1"]),  # nobody says what a foreign op draws, or where
        ("meta", True, ["cpu"]),
    ],
)
def test_whose_state_is_kept(
    device: str, is_opaque: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(random_state, "_state_of", asked.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    random_state.RandomState.now(([4, 4],), {"device": torch.device(device)}, is_opaque=is_opaque)
    assert sorted(map(str, asked)) == expected


def test_a_foreign_op_may_draw_wherever_it_has_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(random_state, "_state_of", asked.append)
    lengths = torch.zeros(1)

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda:1")

    there = torch.zeros(1).as_subclass(Elsewhere)
    for args, kwargs in (((lengths, [there]), {}), ((lengths,), {"x": there})):
        asked.clear()
        random_state.RandomState.now(args, kwargs, is_opaque=True)
        assert sorted(map(str, asked)) == ["cpu", "cuda:1"]


@pytest.mark.parametrize("preserves", [True, False])
def test_a_replay_does_not_wind_the_random_stream_back(preserves: bool) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(torch.bernoulli(x.sigmoid()) * x, 0.5, True)[0].sin()

    torch.manual_seed(3)
    layer(layer(batch())).sum().backward()
    wanted = torch.rand(4)
    keywords: dict[str, Any] = {
        "policy_fn": _saving("bernoulli", CheckpointPolicy.MUST_SAVE),
        "preserve_rng_state": preserves,
    }
    torch.manual_seed(3)
    hp.checkpoint(layer, hp.checkpoint(layer, batch(), **keywords), **keywords).sum().backward()
    assert torch.equal(torch.rand(4), wanted)
