"""What a recomputed region reads beside its inputs: a replay finds what forward found, or an error names the difference.

MindSpore's own recompute is silently wrong in most of these. Each program runs plainly and recomputed, from the same start,
and gradients, parameters and the effects of forward are compared bitwise.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import mint, nn, ops

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.mindspore import checkpointing
from hyper_parallel.backends.mindspore.graph import is_in_backward
from hyper_parallel.backends.mindspore.region_state import RegionState
from hyper_parallel.errors import InPlaceChangeError
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.testing import simulated_accelerator

from .scenario import WIDTH, batch

NOTED: list[Any] = []  # a global name is not in reach of a region: what a replay adds stays


def _swap_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP if "MatMul" in op.name else CheckpointPolicy.PREFER_RECOMPUTE


WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "inputs swapped": {"swap_inputs": True},
    "products saved": {"policy_fn": ["MatMul"]},
    "products swapped": {"policy_fn": _swap_products, "swap_inputs": True},
}


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def way(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """One way to recompute."""
    with simulated_accelerator(min_bytes=1):
        yield request.param


def plain_value(value: Any) -> Any:
    """The same with every tensor as its bytes."""
    if isinstance(value, mindspore.Tensor):
        return tuple(value.shape), value.asnumpy().tobytes()
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in value.items()}
    return [plain_value(item) for item in value] if isinstance(value, list | tuple) else value


def run(step: Callable[[Any], Any], model: Any) -> dict[str, Any]:
    """One step from a known start; everything that it leaves behind."""
    mindspore.set_seed(3)
    random.seed(0)
    output = plain_value(step(model))
    left = {name: plain_value(value) for name, value in model.parameters_and_names()}
    left |= {name: plain_value(value) for name, value in model.state_dict().items()}
    return {"output": output, **left, "random": (random.random(), float(np.random.rand()))}


def compare(make: Callable[[], Any], way: dict[str, Any], step: Callable[[Any], Any]) -> None:
    wanted, got = run(step, made(make)), run(step, hp.checkpoint_wrapper(made(make), **way))
    assert wanted == got, [key for key in wanted if wanted[key] != got.get(key)]


def made(make: Callable[[], Any]) -> Any:
    mindspore.set_seed(7)
    return make().set_train()


def backward(model: Any, *args: Any, seed: int = 1, **kwargs: Any) -> Any:
    """The gradients of the input and the weights."""
    step = mindspore.value_and_grad(lambda x: mint.square(model(x, *args, **kwargs)).sum(), 0, model.trainable_params())
    value, (of_input, of_weights) = step(batch(seed=seed))
    return value, of_input, list(of_weights)


class Block(nn.Cell):
    """Two layers with something in between that needs its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dense(WIDTH, WIDTH)
        self.outer = nn.Dense(WIDTH, WIDTH)

    def construct(self, x: Any) -> Any:
        return mint.exp(self.outer(self.middle(mint.sigmoid(self.inner(x)))) * 0.1)

    def middle(self, x: Any) -> Any:
        return x * x


class Halves:
    """Forward and backward of one cell, called apart."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._calls = 0
        model.set_grad(True)
        model.register_forward_pre_hook(self._count)
        self._backward = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)(
            model, model.trainable_params()
        )

    def _count(self, *args: Any) -> None:
        self._calls += 1

    def forward(self, x: Any) -> Any:
        return self._model(x)

    def backward(self, x: Any) -> Any:
        before = self._calls
        of_inputs, of_weights = self._backward(x, ops.ones_like(x))
        assert self._calls == before, "MindSpore ran the forward again instead of using its graph"
        return list(of_inputs), list(of_weights)


# ------------------------------------------------------------------ tensors of a cell


def _normalised(norm: Any) -> Callable[[], Any]:
    return lambda: nn.SequentialCell(nn.Dense(WIDTH, WIDTH), norm(WIDTH), nn.Sigmoid(), nn.Dense(WIDTH, WIDTH))


def test_batch_norm_changes_its_statistics_once(way: dict[str, Any]) -> None:
    compare(_normalised(nn.BatchNorm1d), way, lambda model: [backward(model), backward(model, seed=2)])


def test_batch_norm_in_evaluation_reads_its_statistics(way: dict[str, Any]) -> None:
    compare(_normalised(nn.BatchNorm1d), way, lambda model: [backward(model), backward(model.set_train(False))])


def test_batch_norm_under_several_forwards_before_a_backward(way: dict[str, Any]) -> None:
    def step(model: Any) -> Any:
        halves, inputs = Halves(model), [batch(seed=seed) for seed in range(3)]
        outputs = [halves.forward(x) for x in inputs]
        return outputs, [halves.backward(x) for x in inputs]

    compare(_normalised(nn.BatchNorm1d), way, step)


class Codebook(Block):
    """Reads a codebook that is a parameter, then moves it towards what it saw."""

    def __init__(self, rows: int = 1) -> None:
        super().__init__()
        start = np.linspace(0, 1, rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH)
        self.codes = mindspore.Parameter(mindspore.Tensor(start), name="codes", requires_grad=False)

    def middle(self, x: Any) -> Any:
        picked = self.codes[:1] * 1
        self.move(ops.stop_gradient(x).mean(0))
        return x * picked

    def move(self, towards: Any) -> None:
        ops.assign(self.codes, self.codes * 0.5 + towards * 0.5)


class CopiedCodebook(Codebook):
    """The same with an op that MindSpore counts."""

    def move(self, towards: Any) -> None:
        self.codes.copy_(self.codes * 0.5 + towards * 0.5)


class BufferedCodebook(CopiedCodebook):
    """The same with a buffer."""

    def __init__(self, rows: int = 1) -> None:
        super().__init__(rows)
        start = self.codes.asnumpy()
        del self.codes
        self.register_buffer("codes", mindspore.Tensor(start))


@pytest.mark.parametrize("rows", [1, 2100])
@pytest.mark.parametrize("kind", [Codebook, CopiedCodebook, BufferedCodebook])
def test_a_codebook_moves_once_and_is_read_as_it_was(way: dict[str, Any], kind: Any, rows: int) -> None:
    assert rows == 1 or kind(rows).codes.nbytes > 1 << 16
    compare(lambda: kind(rows), way, lambda model: [backward(model), backward(model, seed=2)])


class Shifted(Block):
    """Reads a buffer and an attribute in ops whose backward does not need them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", mindspore.Tensor(np.full(WIDTH, 0.25, np.float32)))
        self.more = mindspore.Tensor(np.full(WIDTH, 0.5, np.float32))

    def middle(self, x: Any) -> Any:
        return mint.sigmoid(x + self.shift + self.more)


@pytest.mark.parametrize("name", ["shift", "more"])
def test_a_small_buffer_changed_between_forward_and_backward(way: dict[str, Any], name: str) -> None:
    def step(model: Any) -> Any:
        halves, x = Halves(model), batch()
        output = halves.forward(x)
        getattr(model, name)[0] = 7.0
        return output, halves.backward(x), getattr(model, name)

    compare(Shifted, way, step)


@pytest.mark.parametrize("name", ["shift", "more"])
def test_a_small_buffer_whose_items_forward_assigns(way: dict[str, Any], name: str) -> None:
    class Assigning(Shifted):
        def middle(self, x: Any) -> Any:
            found = super().middle(x)
            getattr(self, name)[0] = 7.0
            return found

    compare(Assigning, way, lambda model: [backward(model), backward(model), getattr(model, name)])


def test_a_parameter_that_is_replaced_after_forward(way: dict[str, Any]) -> None:
    def step(model: Any) -> Any:
        halves, x = Halves(model), batch()
        halves.forward(x)
        new = mindspore.Parameter(mindspore.Tensor(np.zeros((WIDTH, WIDTH), np.float32)), name=model.inner.weight.name)
        model.inner.weight = new
        gradients = halves.backward(x)
        assert model.inner.weight is new
        return gradients

    compare(Block, way, step)


def _copied_into(parameter: Any) -> None:
    with mindspore._no_grad():
        parameter.copy_(ops.ones_like(parameter))


def _set(parameter: Any) -> None:
    parameter.set_data(mindspore.Tensor(np.ones(parameter.shape, np.float32)))


@pytest.mark.parametrize("change", [_copied_into, _set])
def test_a_weight_changed_between_forward_and_backward_is_named(
    way: dict[str, Any], change: Callable[[Any], None]
) -> None:
    block = made(Block)
    halves, x = Halves(hp.checkpoint_wrapper(block, **way)), batch()
    halves.forward(x)
    change(block.inner.weight)
    with pytest.raises(InPlaceChangeError, match=r"checkpoint of Block: .* the parameter 'weight' of Dense"):
        halves.backward(x)


@pytest.mark.parametrize("change", [_copied_into, _set])
def test_a_changed_weight_that_the_region_does_not_read_is_nothing_to_raise_for(
    way: dict[str, Any], change: Callable[[Any], None]
) -> None:
    class Unread(Block):
        def __init__(self) -> None:
            super().__init__()
            self.unread = mindspore.Parameter(mindspore.Tensor(np.zeros(3, np.float32)), name="unread")

    def step(model: Any) -> Any:
        halves, x = Halves(model), batch()
        halves.forward(x)
        change(model.unread)
        return halves.backward(x)

    compare(Unread, way, step)


# ------------------------------------------------------------------ Python state of a cell


class Counting(Block):
    """Keeps numbers, tensors and lists of its own, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.last: Any = None
        self.history: list[float] = []
        self.by_name: dict[str, int] = {}

    def middle(self, x: Any) -> Any:
        self.calls += 1
        self.history.append(float(self.calls))
        self.by_name[f"call {self.calls}"] = self.calls
        before = 0.5 if self.last is None else self.last
        self.last = ops.stop_gradient(x).mean()
        return x * before * (self.calls * len(self.history) * len(self.by_name))


def _left_in(model: Any) -> Any:
    return model.calls, list(model.history), dict(model.by_name), model.last


def test_attributes_and_lists_of_a_cell_change_once(way: dict[str, Any]) -> None:
    compare(Counting, way, lambda model: ([backward(model) for _ in range(3)], _left_in(model)))


@pytest.mark.parametrize("inner", [hp.swap_wrapper, hp.checkpoint_wrapper])
def test_attributes_behind_a_wrapper_in_the_region_change_once(way: dict[str, Any], inner: Any) -> None:
    make = lambda: nn.SequentialCell(nn.Dense(WIDTH, WIDTH), inner(Counting()), nn.Dense(WIDTH, WIDTH), nn.Sigmoid())  # noqa: E731
    compare(make, way, lambda model: ([backward(model), backward(model)], _left_in(model[1])))


def test_a_cell_in_a_list_of_a_cell_is_in_reach(way: dict[str, Any]) -> None:
    class Listed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [Counting()]

        def middle(self, x: Any) -> Any:
            return self.hidden[0].middle(x)

    compare(Listed, way, lambda model: [backward(model), backward(model), _left_in(model.hidden[0])])


def test_a_function_that_a_cell_holds_is_in_reach(way: dict[str, Any]) -> None:
    def make() -> Any:
        block, calls = Block(), []

        def middle(x: Any) -> Any:
            calls.append(1)
            return x * x * len(calls)

        block.middle = middle
        return block

    compare(make, way, lambda model: [backward(model), backward(model)])


def test_two_forwards_before_two_backwards_read_their_own_state(way: dict[str, Any]) -> None:
    def step(model: Any) -> Any:
        halves, inputs = Halves(model), [batch(seed=1), batch(seed=2)]
        outputs = [halves.forward(x) for x in inputs]
        return outputs, [halves.backward(x) for x in reversed(inputs)], _left_in(model)

    compare(Counting, way, step)


def test_evaluation_between_forward_and_backward(way: dict[str, Any]) -> None:
    def step(model: Any) -> Any:
        halves, x = Halves(model), batch()
        output = halves.forward(x)
        model.set_train(False)
        gradients = halves.backward(x)
        assert not model.training
        return output, gradients

    compare(_normalised(lambda width: nn.Dropout(p=0.5)), way, step)


def test_what_mindspore_keeps_in_a_cell_is_left_alone() -> None:
    """MindSpore fills names of its own when a cell is called; a replay must not take them away."""

    class Filling(Block):
        def middle(self, x: Any) -> Any:
            NOTED.append(self.arguments_key)
            self.arguments_key = "filled"
            return x * x

    NOTED.clear()
    backward(hp.checkpoint_wrapper(Filling()))
    assert NOTED == ["", "filled"]


# ------------------------------------------------------------------ randomness


class Noisy(Block):
    """Draws from whatever it is given."""

    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.draw = draw

    def construct(self, x: Any, source: Any = None) -> Any:
        x = mint.sigmoid(self.inner(x)) * self.draw(source)
        return mint.exp(self.outer(x * x) * 0.1) * self.draw(source)


def _from_mindspore(source: Any) -> float:
    return 1.0 + float(source._step(mindspore.Tensor(3, mindspore.int64))[1].asnumpy())


DRAWS: dict[str, tuple[Callable[[Any], float], Callable[[], Any]]] = {
    "mindspore.Generator": (_from_mindspore, lambda: mindspore.Generator().manual_seed(5)),
    "random": (lambda _: random.random(), lambda: None),
    "numpy.random": (lambda _: float(np.random.rand()), lambda: None),
    "random.Random": (lambda source: float(source.random()), lambda: random.Random(5)),
    "numpy Generator": (lambda source: float(source.random()), lambda: np.random.default_rng(5)),
    "numpy RandomState": (lambda source: float(source.rand()), lambda: np.random.RandomState(5)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("place", ["argument", "keyword", "list"])
def test_a_random_source_draws_the_same_again(way: dict[str, Any], name: str, place: str) -> None:
    draw, make = DRAWS[name]
    block = (lambda: Noisy(lambda source: draw(source[0]))) if place == "list" else (lambda: Noisy(draw))

    def step(model: Any) -> Any:
        source = make()
        given = [source] if place == "list" else source
        found = backward(model, source=given) if place == "keyword" else backward(model, given)
        return found, draw(source)

    compare(block, way, step)


@pytest.mark.parametrize("name", ["mindspore.Generator", "random.Random", "numpy Generator"])
def test_a_random_source_of_the_cell_draws_the_same_again(way: dict[str, Any], name: str) -> None:
    draw, make = DRAWS[name]

    class OwnSource(Block):
        def __init__(self) -> None:
            super().__init__()
            self.source = make()

        def middle(self, x: Any) -> Any:
            return x * x * draw(self.source)

    compare(OwnSource, way, lambda model: [backward(model), backward(model), draw(model.source)])


@pytest.mark.parametrize("name", DRAWS)
def test_without_preserve_rng_state_a_replay_draws_other_numbers(name: str) -> None:
    draw, make = DRAWS[name]
    NOTED.clear()

    def forward(x: Any, source: Any) -> Any:
        NOTED.append(draw(source))
        return mint.exp(x * NOTED[-1])

    mindspore.grad(lambda x: hp.checkpoint(forward, x, make(), preserve_rng_state=False).sum())(batch())
    assert len(set(NOTED)) == 2


def test_python_state_without_a_dispatch_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Ascend a region without a policy has no dispatch mode."""
    wanted = run(lambda model: ([backward(model), backward(model)], _left_in(model)), made(Counting))
    monkeypatch.setattr(checkpointing, "on_cpu", lambda: False)
    model = hp.checkpoint_wrapper(made(Counting))
    assert run(lambda model: ([backward(model), backward(model)], _left_in(model)), model) == wanted


# ------------------------------------------------------------------ arguments


class Up(Block):
    """The second half of a U-Net: takes what it needs off a list."""

    def construct(self, x: Any, skips: Any) -> Any:
        x = mint.sigmoid(self.inner(x)) * skips.pop()
        return mint.exp(self.outer(x * skips.pop()) * 0.1)


@pytest.mark.parametrize("place", ["argument", "keyword", "dict"])
def test_skips_that_the_block_pops(way: dict[str, Any], place: str) -> None:
    def step(model: Any) -> Any:
        left = []

        def forward(*tensors: Any) -> Any:
            skips = [tensor * 1 for tensor in tensors]
            if place == "dict":
                out = model(tensors[0], {"list": skips})
            else:
                out = model(tensors[0], skips=skips) if place == "keyword" else model(tensors[0], skips)
            left.append(len(skips))
            return mint.square(out).sum()

        gradients = mindspore.grad(forward, (0, 1, 2, 3))(*(batch(seed=seed) for seed in range(4)))
        return list(gradients), left

    class Inside(Up):
        def construct(self, x: Any, skips: Any) -> Any:
            return super().construct(x, skips["list"])

    compare(Inside if place == "dict" else Up, way, step)


class Pulling(Block):
    """Takes what it needs from an iterator."""

    def construct(self, x: Any, source: Any) -> Any:
        x = mint.sigmoid(self.inner(x)) * next(source)
        return mint.exp(self.outer(x * next(source)) * 0.1)


@pytest.mark.parametrize("make", [iter, lambda items: iter(tuple(items)), reversed, lambda items: iter(set(items))])
def test_an_iterator_goes_on_from_the_same_place(way: dict[str, Any], make: Callable[[Any], Any]) -> None:
    def step(model: Any) -> Any:
        source = make([0.5, 0.25, 2.0])
        return backward(model, source), list(source)

    compare(Pulling, way, step)


@pytest.mark.parametrize("make", [lambda: (n for n in (1.0, 2.0)), lambda: map(float, [1, 2]), lambda: zip([1], [2])])
def test_an_iterator_that_cannot_be_read_twice_is_refused(way: dict[str, Any], make: Callable[[], Any]) -> None:
    model = hp.checkpoint_wrapper(Pulling(), **way)
    with pytest.raises(TypeError, match=r"checkpoint of Pulling: cannot take a (generator|map|zip) .*Pass a list"):
        model(batch(), make())


class Context:
    """A plain object that travels through the layers."""

    def __init__(self) -> None:
        self.calls = 0
        self.values: list[Any] = []
        self.inner: dict[str, Any] = {"state": {"scale": 1.0}}


class Passing(Block):
    """Reads and writes the object that it is given."""

    def construct(self, x: Any, context: Context) -> Any:
        context.calls += 1
        context.inner["state"]["scale"] += 0.5
        if context.values:
            x = x + context.values[-1]
        x = mint.sigmoid(self.inner(x)) * (context.calls * context.inner["state"]["scale"])
        context.values.append(ops.stop_gradient(x))
        return mint.exp(self.outer(x * x) * 0.1)


def test_a_plain_object_among_the_arguments_is_changed_once(way: dict[str, Any]) -> None:
    def step(model: Any) -> Any:
        context = Context()
        gradient = mindspore.grad(lambda x: (model(x, context) * model(x, context)).sum())(batch())
        return gradient, context.calls, context.inner, context.values

    compare(Passing, way, step)


def test_forwards_tensors_are_not_held_by_the_state_of_a_plain_object() -> None:
    context, alive = Context(), []

    def forward(x: Any) -> Any:
        out = hp.checkpoint(Passing(), x, context)
        reference = weakref.ref(context.values[0])
        context.values.clear()
        alive.append(reference() is not None)
        return out.sum()

    mindspore.grad(forward)(batch())
    assert alive == [False]


def test_a_closure_over_a_cell_and_a_list_is_in_reach(way: dict[str, Any]) -> None:
    results = []
    for is_ours in (False, True):
        block, losses = made(Counting), []

        def region(x: Any) -> Any:
            losses.append(len(losses) + 1.0)  # noqa: B023
            return counting(x) * losses[-1]  # noqa: B023

        counting = block.construct
        forward = (lambda x: hp.checkpoint(region, x, **way)) if is_ours else region
        gradient = mindspore.grad(lambda x: forward(x).sum())(batch())  # noqa: B023
        results.append(plain_value((gradient, losses, _left_in(block))))
    assert results[0] == results[1]


def test_the_state_of_a_region_dies_with_its_graph() -> None:
    gc.collect()
    gc.disable()
    try:
        backward(hp.checkpoint_wrapper(Counting()))
        compat.end_failed_gradient()  # MindSpore keeps a graph until the next gradient
        assert not any(type(found) is RegionState for found in gc.get_objects())
    finally:
        gc.enable()


def test_an_error_in_a_replay_leaves_the_state_as_it_was() -> None:
    class Failing(Counting):
        def middle(self, x: Any) -> Any:
            found = super().middle(x)
            if is_in_backward():
                raise ValueError("in the replay")
            return found

    block = made(Failing)
    with pytest.raises(ValueError, match="in the replay"):
        backward(hp.checkpoint_wrapper(block))
    assert (block.calls, block.history, block.by_name) == (1, [1.0], {"call 1": 1})
