"""Functional collectives in regions that run Python again: they run once, and their output is there only after its wait."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch import selective
from hyper_parallel.errors import InPlaceChangeError
from hyper_parallel.testing import simulated_accelerator

pytestmark = pytest.mark.python_replay

TIGHT: dict[str, Any] = {"window_bytes": 0, "prefetch_bytes": 0, "min_bytes": 1}
ARRIVED = 3.0


class Late:
    """A collective of one rank whose bytes come after it has returned."""

    def __init__(self) -> None:
        self.runs = 0
        self.output = torch.empty(0)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.output = torch.zeros_like(x)
        return self.output


# A replay puts back the Python state that its function can reach; what is in a context variable it cannot reach.
CURRENT: contextvars.ContextVar[Late] = contextvars.ContextVar("late")
LIBRARY = torch.library.Library("c10d_functional", "FRAGMENT")
LIBRARY.define("late(Tensor x) -> Tensor")
LIBRARY.impl("late", lambda x: CURRENT.get().run(x), "CompositeExplicitAutograd")


def arrive() -> None:
    """The bytes come, and no op shows it."""
    CURRENT.get().output.numpy()[...] = ARRIVED


@pytest.fixture
def late() -> Late:
    found = Late()
    CURRENT.set(found)
    return found


def answers(policy: CheckpointPolicy) -> Any:
    def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if "late" in str(op) else CheckpointPolicy.MUST_RECOMPUTE

    return policy_fn


@pytest.mark.parametrize("policy", list(CheckpointPolicy))
@pytest.mark.parametrize("calls", [1, 3])
def test_a_collective_runs_once_whatever_the_policy_says(
    policy: CheckpointPolicy, calls: int, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = 0

    def wait_for(output: torch.Tensor) -> None:
        nonlocal waited
        waited += 1
        assert output.sum() == 0, "it is waited for before its bytes are there"
        arrive()

    monkeypatch.setattr(selective, "wait_for", wait_for)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.c10d_functional.late(x.detach())
        arrive()
        y = torch.ops._c10d_functional.wait_tensor(y)
        return (x.exp() * y).sin()

    x = torch.linspace(0, 1, 512, requires_grad=True)
    wanted = torch.autograd.grad((x.exp() * ARRIVED).sin().sum(), x)[0]
    with simulated_accelerator(**TIGHT):
        before = hp.stats().replayed_ops.get("changed_unseen", 0)
        for call in range(calls):
            (got,) = torch.autograd.grad(hp.checkpoint(function, x, policy_fn=answers(policy)).sum(), x)
            assert torch.equal(got, wanted)
            assert late.runs == call + 1
        assert waited == (calls if policy is CheckpointPolicy.MUST_SWAP else 0)
        assert hp.stats().replayed_ops.get("changed_unseen", 0) == before, "what arrives is not a foreign write"


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_a_foreign_write_after_the_wait_is_seen(policy: CheckpointPolicy, late: Late) -> None:
    """Kept because the policy wants it: an error. Kept unasked: the replay runs the collective, as the policy said."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.c10d_functional.late(x.detach())
        arrive()
        y = torch.ops._c10d_functional.wait_tensor(y)
        y.detach().numpy()[...] *= 2
        return (x.exp() * y).sin()

    x = torch.linspace(0, 1, 512, requires_grad=True)
    wanted = torch.autograd.grad((x.exp() * 2 * ARRIVED).sin().sum(), x)[0]
    with simulated_accelerator(**TIGHT):
        if policy is CheckpointPolicy.MUST_SAVE:
            with pytest.raises(InPlaceChangeError, match="because other ranks take part in it"):
                hp.checkpoint(function, x, policy_fn=answers(policy))
            return
        (got,) = torch.autograd.grad(hp.checkpoint(function, x, policy_fn=answers(policy)).sum(), x)
        assert torch.equal(got, wanted)
        assert late.runs == 2


def test_bytes_that_arrive_after_a_new_sequence_of_ops_began_are_no_foreign_write(late: Late) -> None:
    """The kept outputs of that call are looked at from there on; this one has not arrived yet."""

    is_other: contextvars.ContextVar[bool] = contextvars.ContextVar("is_other")  # no argument: it is the same region

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.c10d_functional.late(x.detach())
        z = x.cos() if is_other.get() else x
        arrive()
        y = torch.ops._c10d_functional.wait_tensor(y)
        return (z.exp() * y).sin()

    x = torch.linspace(0, 1, 512, requires_grad=True)
    policy = answers(CheckpointPolicy.MUST_SAVE)
    with simulated_accelerator(**TIGHT):
        for now in (False, True):
            is_other.set(now)
            wanted = torch.autograd.grad(((x.cos() if now else x).exp() * ARRIVED).sin().sum(), x)[0]
            (got,) = torch.autograd.grad(hp.checkpoint(function, x, policy_fn=policy).sum(), x)
            assert torch.equal(got, wanted)
    assert late.runs == 2
