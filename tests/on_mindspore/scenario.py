"""What a scenario is: a function of a kind that trains something small and logs every array worth comparing.

MindSpore has no ``backward()`` and no ``.grad``: a scenario takes gradients of a function, all at once (:meth:`Log.step`),
or in two halves where forwards and backwards interleave (:class:`Halves`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import mindspore
import numpy as np
from mindspore import ops

from .kinds import PLAIN, RECOMPUTE, Kind
from .models import WIDTH

__all__ = [
    "DRAWS",
    "MAY_REFUSE",
    "SCENARIOS",
    "SECOND_ORDER",
    "Halves",
    "Log",
    "assert_same",
    "batch",
    "oracle",
    "run",
    "scenario",
]

Results = dict[str, Any]  # numpy arrays, or None
Scenario = Callable[[Kind, "Log"], None]

SCENARIOS: dict[str, Scenario] = {}
MAY_REFUSE: set[str] = set()
"""Scenarios with a change in place that a kind which files op outputs may refuse instead of being right."""
SECOND_ORDER: set[str] = set()
"""Scenarios that differentiate a gradient: served by recomputing everything, refused by name by every other kind."""
DRAWS: set[str] = set()
"""Scenarios with random ops: MindSpore's own recompute draws other numbers again, so the plain step is the oracle."""


def scenario(function: Scenario) -> Scenario:
    """Enter a scenario in the table."""
    assert function.__name__ not in SCENARIOS, f"two scenarios are called {function.__name__}"
    SCENARIOS[function.__name__] = function
    return function


def batch(rows: int = 4, width: int = WIDTH, *, seed: int = 1) -> Any:
    """An input that does not move the global random state."""
    return mindspore.Tensor(np.random.RandomState(seed).standard_normal((rows, width)).astype(np.float32))


def _square_mean(out: Any) -> Any:
    return out.square().mean()


class Log:
    """Every array worth comparing, copied at the moment it was logged."""

    def __init__(self) -> None:
        self.results: Results = {}

    def keep(self, name: str, value: Any) -> None:
        if isinstance(value, mindspore.Tensor):
            with mindspore._no_grad():
                wide = value.to(mindspore.float32) if value.dtype == mindspore.bfloat16 else value
                value = np.array(wide.asnumpy(), copy=True)
        self.results[f"{len(self.results)}:{name}"] = value

    def all(self, name: str, values: Iterable[Any]) -> None:
        for value in values:
            self.keep(name, value)

    def step(
        self,
        kind: Kind,
        forward: Any,
        *inputs: Any,
        model: Any = None,
        loss: Callable[[Any], Any] = _square_mean,
        of_inputs: bool = True,
    ) -> tuple[Any, ...]:
        """One step: the value, the gradients of the inputs and of the model's parameters, logged and returned."""
        owner = forward if model is None else model
        weights = owner.trainable_params() if isinstance(owner, mindspore.nn.Cell) else list(owner)
        positions = tuple(range(len(inputs))) if of_inputs else None
        function = mindspore.value_and_grad(
            lambda *args: loss(kind.forward(forward, *args)), positions, weights or None
        )
        value, gradients = function(*inputs)
        found = _leaves(gradients)
        self.keep("loss", value)
        self.all("gradient", found)
        return tuple(found)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, mindspore.Tensor):
        return [tree]
    return [leaf for item in tree for leaf in _leaves(item)]


class Halves:
    """A cell whose forwards and backwards are called apart, as a pipeline stage's are."""

    def __init__(self, kind: Kind, cell: Any) -> None:
        self._kind = kind
        self._cell = cell
        self._weights = cell.trainable_params()
        self._gradient = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)(cell, self._weights)
        self.constructs = 0
        cell.set_grad(True)
        cell.register_forward_pre_hook(self._count)

    def _count(self, *args: Any) -> None:
        self.constructs += 1

    def forward(self, x: Any) -> Any:
        return self._kind.forward(self._cell, x)

    def backward(self, x: Any, sensitivity: Any) -> list[Any]:
        """The gradients of the input and the weights, from the graph that the forward of this very input left."""
        before = self.constructs
        gradients = _leaves(self._gradient(x, sensitivity))
        assert self.constructs == before, "MindSpore ran the forward again instead of using its graph"
        return gradients


def run(name: str, kind: Kind) -> Results:
    """One scenario under one kind."""
    log = Log()
    mindspore.set_seed(5)
    np.random.seed(5)
    SCENARIOS[name](kind, log)
    return log.results


@functools.cache
def oracle(name: str, kind: Kind) -> Results:
    """What the step gives without the engine."""
    return run(name, kind)


def assert_same(name: str, kind: Kind, results: Results) -> None:
    """Bitwise equal to the oracle, in every array."""
    expected = oracle(name, PLAIN)
    replayed = oracle(name, RECOMPUTE) if kind.recomputes and name not in DRAWS else expected
    assert list(results) == list(expected), f"{name} under {kind}: other arrays than without the engine"
    for key, value in results.items():
        wanted = replayed[key]
        if not _equal(value, wanted) and (key.endswith("statistics") or not _recomputes_casts(kind)):
            wanted = expected[key]  # a region that keeps an op's output does it once, as the plain step does
        assert _equal(value, wanted), _difference(name, kind, key, value, wanted)


def _recomputes_casts(kind: Kind) -> bool:
    """Whether a region of this kind saves everything through replays, as MindSpore's recompute does.

    MindSpore's own recompute of a cell that computes in float16 differs in the last bit from the plain step; where the
    innermost hooks are those of a swap, a region replays nothing.
    """
    return kind.name != "swap_in_checkpoint"


def _equal(value: Any, wanted: Any) -> bool:
    if value is None or wanted is None:
        return value is wanted
    return (
        value.dtype == wanted.dtype
        and value.shape == wanted.shape
        and np.array_equal(np.ascontiguousarray(value).view(np.uint8), np.ascontiguousarray(wanted).view(np.uint8))
        if value.ndim
        else value.tobytes() == wanted.tobytes()
    )


def _difference(name: str, kind: Kind, key: str, value: Any, wanted: Any) -> str:
    error = "" if value is None or wanted is None else f", largest error {np.abs(value - wanted).max()}"
    return f"{name} under {kind}: {key} differs{error}"
