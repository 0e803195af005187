"""State beside a region's inputs that a replay of the user's Python finds as forward found it, in less common places."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.errors import InPlaceChangeError
from hyper_parallel.testing import simulated_accelerator

WIDTH = 8


@pytest.fixture(params=["tape", "python"])
def way(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A region that runs from a tape where there is one, and a region whose policy makes its Python run again."""
    with simulated_accelerator():
        yield {} if request.param == "tape" else {"policy_fn": lambda ctx, op, *args, **kwargs: False}


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


class WithoutDict:
    """An object with slots, one of them empty at first."""

    __slots__ = ("__hidden", "calls", "last")

    def __init__(self) -> None:
        self.calls = 0
        self.__hidden = 0

    def count(self, x: torch.Tensor) -> int:
        self.calls += 1
        self.__hidden += 2
        found = self.calls * self.__hidden + hasattr(self, "last")
        self.last = x.detach()
        return found

    def left(self) -> Any:
        return self.calls, self.__hidden, self.last.sum().item()


class InDict(collections.UserDict):  # type: ignore[type-arg]
    """A dict of the user's."""


def _count_in(held: Any, x: torch.Tensor) -> int:
    held["calls"] = held.get("calls", 0) + 1
    return int(held["calls"])


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], int], Callable[[Any], Any]]] = {
    "slots": (WithoutDict, lambda held, x: held.count(x), lambda held: held.left()),
    "UserDict": (collections.UserDict, _count_in, dict),
    "a subclass of UserDict": (InDict, _count_in, dict),
    "ChainMap": (collections.ChainMap, _count_in, dict),
    "UserList": (collections.UserList, lambda held, x: held.append(1) or len(held), list),
}


class Counting(nn.Module):
    def __init__(self, count: Callable[[Any, torch.Tensor], int]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.count = count

    def forward(self, x: torch.Tensor, held: Any) -> torch.Tensor:
        return (self.inner(x) * self.count(held, x)).tanh()


@pytest.mark.parametrize("name", KINDS)
def test_an_object_among_the_arguments_is_changed_once(way: dict[str, Any], name: str) -> None:
    make, count, left = KINDS[name]
    found = []
    for wrap in (lambda block: block, lambda block: hp.checkpoint_wrapper(block, **way)):
        torch.manual_seed(0)
        block, held, x = Counting(count), make(), batch().requires_grad_()
        model = wrap(block)
        model(model(x, held), held).sum().backward()
        found.append((x.grad, block.inner.weight.grad, left(held)))
    (one, two, plain), (three, four, ours) = found
    assert torch.equal(one, three)
    assert torch.equal(two, four)
    assert plain == ours


def _with_other_weight(model: Any, linear: nn.Linear) -> list[torch.Tensor]:
    """Set a weight as a plain attribute for one forward, as older meta-learning code does."""
    x, own = batch().requires_grad_(), linear.weight
    other = torch.full_like(own, 0.1, requires_grad=True)
    del linear._parameters["weight"]
    linear.weight = other * 2  # type: ignore[assignment]
    y = model(x)
    del linear.weight
    linear.weight = own
    y.sum().backward()
    assert "weight" not in vars(linear)
    assert linear.weight is own
    assert own.grad is None
    assert x.grad is not None
    assert other.grad is not None
    return [y, x.grad, other.grad]


def test_a_weight_that_was_an_attribute_in_forward_is_the_replays_too(way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    plain = _with_other_weight(block, block[0])
    ours = _with_other_weight(hp.checkpoint_wrapper(block, **way), block[0])
    assert all(map(torch.equal, plain, ours))


def test_a_parameter_that_was_deleted_after_forward_stays_deleted(way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    y = hp.checkpoint_wrapper(block, **way)(batch())
    own = block[0].weight
    del block[0].weight
    y.sum().backward()
    assert own.grad is not None
    assert "weight" not in block[0]._parameters


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_that_steps_between_forward_and_backward_is_named(way: dict[str, Any], foreach: bool) -> None:
    """A step of the discriminator before the generator's backward. Under a dispatch mode torch moves no version for lists."""
    torch.manual_seed(0)
    generator = nn.Linear(WIDTH, WIDTH)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(block.parameters(), foreach=foreach)
    model = hp.checkpoint_wrapper(block, **way)
    fake = generator(batch())
    loss = -model(fake).mean()
    model(fake.detach()).mean().backward()
    optimizer.step()
    with pytest.raises(InPlaceChangeError, match=r"the parameter '(weight|bias)' of Linear"):
        loss.backward()


def test_a_list_op_in_a_region_with_a_policy_moves_the_versions_of_what_it_writes() -> None:
    x = batch().requires_grad_()
    outside = x.exp()
    saved_outside = outside.sin()

    def region(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch._foreach_mul_([outside.detach()], 3.0)
        return y.tanh()

    y = hp.checkpoint(region, x, policy_fn=lambda ctx, op, *args, **kwargs: hp.CheckpointPolicy.MUST_SAVE)
    with pytest.raises(InPlaceChangeError, match=r"which aten\._foreach_mul_.* reads, was changed in place"):
        (saved_outside + y).sum().backward()
