"""What a recomputed region reads beside its inputs: a replay finds what forward found, or an error names the difference.

Torch's own checkpoint is silently wrong in most of these. Each program runs plainly and recomputed, from the same start, and
gradients, buffers and the effects of forward are compared.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch.region_state import RegionState
from hyper_parallel.core.activation_checkpoint import region_state
from hyper_parallel.errors import InPlaceChangeError
from hyper_parallel.testing import simulated_accelerator

WIDTH = 6


def _save_some(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP if "addmm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "inputs swapped": {"swap_inputs": True},
    "matmuls saved": {"policy_fn": ["addmm", "mm"]},
    "matmuls swapped": {"policy_fn": _save_some, "swap_inputs": True},
}


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def way(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """One way to recompute."""
    with simulated_accelerator(min_bytes=1):
        yield request.param


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def run(step: Callable[[nn.Module], Any], model: nn.Module) -> dict[str, Any]:
    """One step from a known start; everything that it leaves behind."""
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(0)
    output = step(model)
    left = {name: value.clone() for name, value in model.state_dict().items()}
    left |= {f"{name}.grad": value.grad for name, value in model.named_parameters()}
    left["random"] = torch.rand(2), random.random(), float(np.random.rand())
    return {"output": output, **left}


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else bool(one == two)


def compare(block: nn.Module, way: dict[str, Any], step: Callable[[nn.Module], Any]) -> None:
    plain, ours = copy.deepcopy(block), hp.checkpoint_wrapper(copy.deepcopy(block), **way)
    wanted, got = run(step, plain), run(step, ours)
    assert equal(wanted, got), {key: (wanted[key], got[key]) for key in wanted if not equal(wanted[key], got[key])}


def backward(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    x = batch()
    model(x, *args, **kwargs).square().sum().backward()
    assert x.grad is not None
    return x.grad


class Block(nn.Module):
    """Two layers with something in between that needs its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.middle(torch.sigmoid(self.inner(x)))).exp()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


# ------------------------------------------------------------------ weights by place


def test_functional_call_recomputes_with_the_weights_it_was_given(way: dict[str, Any]) -> None:
    def step(model: nn.Module) -> Any:
        weights = {name: torch.full_like(value, 0.3).requires_grad_() for name, value in model.named_parameters()}
        functional_call(model, weights, (batch(),)).square().sum().backward()
        return [value.grad for value in weights.values()]

    compare(Block(), way, step)


def test_second_order_meta_learning_over_a_wrapped_block(way: dict[str, Any]) -> None:
    def step(model: nn.Module) -> Any:
        weights = dict(model.named_parameters())
        for _ in range(2):
            loss = functional_call(model, weights, (batch(),)).square().sum()
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: value - 0.01 * gradient for (name, value), gradient in zip(weights.items(), gradients)}
        functional_call(model, weights, (batch(2),)).square().sum().backward()

    compare(Block(), way, step)


def test_a_parameter_that_is_replaced_after_forward(way: dict[str, Any]) -> None:
    def step(model: nn.Module) -> Any:
        x, old = batch(), model.inner.weight
        loss = model(x).square().sum()
        model.inner.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        new = model.inner.weight
        loss.backward()
        assert model.inner.weight is new
        return x.grad, old.grad

    compare(Block(), way, step)


# ------------------------------------------------------------------ changed in place


def test_a_weight_stepped_between_forward_and_backward_is_named(way: dict[str, Any]) -> None:
    """A GAN that steps its discriminator before the generator's backward: the plain step raises too."""
    model = hp.checkpoint_wrapper(Block(), **way)
    loss = model(batch()).sum()
    with torch.no_grad():
        model.inner.weight.add_(1)
    with pytest.raises(
        (InPlaceChangeError, RuntimeError), match=r"parameter 'weight' of Linear|modified by an inplace"
    ):
        loss.backward()


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "python"])
@pytest.mark.parametrize(
    "policy", [None, ["mm"], lambda *_, **__: CheckpointPolicy.MUST_SAVE], ids=["no", "names", "saves"]
)
def test_a_changed_weight_that_the_last_op_saves_is_named(
    policy: Any, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay ends when it has the last saved value: the op that saved it, and would read the weight, does not run."""
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", native)
    with simulated_accelerator(min_bytes=1):
        model = hp.checkpoint_wrapper(nn.Linear(WIDTH, WIDTH), policy_fn=policy)
        loss = model(batch()).sum()
        with torch.no_grad():
            model.weight.mul_(2)
        with pytest.raises(InPlaceChangeError, match=r"which backward reads|parameter 'weight'"):
            loss.backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        got, wanted = batch(), batch()
        model(got).sum().backward()
        nn.functional.linear(wanted, model.weight, model.bias).sum().backward()
    assert torch.equal(got.grad, wanted.grad)


class Ungated(Block):
    """Reads a buffer in an op whose backward does not need it: the plain step is right after a change of it."""

    def __init__(self, numel: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((numel,), 0.25))
        self.register_buffer("unread", torch.zeros(3))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.shift[:WIDTH]).sigmoid()


def _change(model: nn.Module, name: str) -> Any:
    x = batch()
    loss = model(x).sum()
    with torch.no_grad():
        getattr(model, name).add_(1)
    loss.backward()
    return x.grad


def test_a_small_buffer_changed_between_forward_and_backward(way: dict[str, Any]) -> None:
    compare(Ungated(), way, lambda model: _change(model, "shift"))


@pytest.mark.python_replay
def test_a_large_buffer_changed_between_forward_and_backward_is_named(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_state, "COPIED_BYTES", 1024)
    model = hp.checkpoint_wrapper(Ungated(1000), **way)
    with pytest.raises(InPlaceChangeError, match=r"checkpoint of Ungated: .* the buffer 'shift' of Ungated"):
        _change(model, "shift")


def test_a_changed_tensor_that_the_region_does_not_read_is_nothing_to_raise_for(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_state, "COPIED_BYTES", 0)
    compare(Ungated(), way, lambda model: _change(model, "unread"))


# ------------------------------------------------------------------ state that forward writes


def test_batch_norm_changes_its_statistics_once(way: dict[str, Any]) -> None:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH))
    compare(block, way, backward)


def test_batch_norm_under_several_forwards_before_a_backward(way: dict[str, Any]) -> None:
    def step(model: nn.Module) -> Any:
        inputs = [batch(seed) for seed in range(3)]
        losses = [model(x).square().sum() for x in inputs]
        for loss in losses:
            loss.backward()
        return [x.grad for x in inputs]

    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH))
    compare(block, way, step)


def test_spectral_norm_iterates_once(way: dict[str, Any]) -> None:
    block = Block()
    nn.utils.parametrizations.spectral_norm(block.inner)
    compare(block, way, backward)


class Quantised(Block):
    """An observer that forward updates and reads."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        self.fake = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.fake(x * 3).sin()


@pytest.mark.filterwarnings("ignore:torch.ao.quantization")
def test_fake_quantize_observes_once(way: dict[str, Any]) -> None:
    compare(Quantised(), way, backward)


class Codebook(Block):
    """Reads a codebook, then moves it towards what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(0, 1, 4 * WIDTH).view(4, WIDTH))
        self.register_buffer("uses", torch.zeros(4))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        picked = self.codes[nearest].clone()
        with torch.no_grad():
            self.codes.lerp_(x.mean(0).expand(4, WIDTH), 0.5)
            self.uses += 1
        return x * picked


def test_a_codebook_moves_once_and_is_read_as_it_was(way: dict[str, Any]) -> None:
    compare(Codebook(), way, backward)


@pytest.mark.python_replay
def test_a_large_codebook_is_named(way: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_state, "COPIED_BYTES", 0)
    with pytest.raises(InPlaceChangeError, match="the buffer 'codes' of Codebook"):
        backward(hp.checkpoint_wrapper(Codebook(), **way))


class Counting(Block):
    """Keeps numbers, tensors and lists of its own, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.last: torch.Tensor | None = None
        self.history: list[float] = []
        self.by_name: dict[str, int] = {}

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(float(self.calls))
        self.by_name[f"call {self.calls}"] = self.calls
        before = 0.5 if self.last is None else self.last
        self.last = x.detach().mean()
        return x * before * self.calls * len(self.history) * len(self.by_name)


def test_attributes_and_lists_of_a_module_change_once(way: dict[str, Any]) -> None:
    def step(model: nn.Module) -> Any:
        gradients = [backward(model) for _ in range(3)]
        return gradients, model.calls, model.history, model.by_name, model.last

    compare(Counting(), way, step)


@pytest.mark.parametrize("inner", [hp.swap_wrapper, hp.checkpoint_wrapper])
def test_attributes_behind_a_wrapper_in_the_region_change_once(way: dict[str, Any], inner: Callable[..., Any]) -> None:
    def step(model: nn.Module) -> Any:
        return backward(model), model[1].calls, model[1].history

    compare(nn.Sequential(nn.Linear(WIDTH, WIDTH), inner(Counting()), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()), way, step)


def test_a_module_in_a_list_of_a_module_is_in_reach(way: dict[str, Any]) -> None:
    class Listed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [Counting()]

        def middle(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.hidden[0].middle(x)
            return hidden

    compare(Listed(), way, lambda model: [backward(model), backward(model), model.hidden[0].calls])


def test_two_forwards_before_two_backwards_read_their_own_state(way: dict[str, Any]) -> None:
    def step(model: nn.Module) -> Any:
        inputs = [batch(1), batch(2)]
        losses = [model(x).square().sum() for x in inputs]
        for loss in reversed(losses):
            loss.backward()
        return [x.grad for x in inputs], model.calls, model.history

    compare(Counting(), way, step)


class Tempered(Block):
    """Reads a number and a list that others change."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0
        self.scales = [0.5, 1.5]

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return (x / self.temperature).sin() * self.scales[0] * len(self.scales)


def test_an_attribute_that_others_change_before_backward(way: dict[str, Any]) -> None:
    def step(model: nn.Module) -> Any:
        x = batch()
        loss = model(x).square().sum()
        model.temperature = 7.0
        model.scales.reverse()
        model.scales.append(3.0)
        loss.backward()
        return x.grad, model.temperature, model.scales

    compare(Tempered(), way, step)


class Turning(Block):
    """Changes a list and a number, and changes them back before it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [0.5, 1.5, 2.0]
        self.depth = 0

    def forward(self, x: torch.Tensor, shared: dict[str, float]) -> torch.Tensor:
        for _ in self.scales:
            self.depth += 1
            shared["scale"] += 1
            self.scales.append(self.scales.pop(0))
            x = (x * self.scales[0] * self.depth * shared["scale"]).sin()
        self.depth -= 3
        shared["scale"] -= 3
        return x + self.depth


def test_a_replay_that_stops_between_a_change_and_its_opposite_leaves_no_trace(way: dict[str, Any]) -> None:
    def step(model: nn.Module) -> Any:
        shared = {"scale": 1.0}
        gradients = [backward(model, shared) for _ in range(2)]
        return gradients, model.scales, model.depth, shared

    compare(Turning(), way, step)


def test_eval_between_forward_and_backward(way: dict[str, Any]) -> None:
    def step(model: nn.Module) -> Any:
        x = batch()
        loss = model(x).square().sum()
        model.eval()
        loss.backward()
        assert not model.training
        model.train()
        return x.grad

    compare(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)), way, step)


# ------------------------------------------------------------------ randomness


class Noisy(Block):
    """Draws from whatever it is given."""

    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor, source: Any = None) -> torch.Tensor:
        x = torch.sigmoid(self.inner(x)) * self.draw(source)
        return self.outer(x * x).exp() * self.draw(source)


def _from_torch(source: Any) -> Any:
    return torch.rand(WIDTH, generator=source)


DRAWS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "torch.Generator": (_from_torch, lambda: torch.Generator().manual_seed(5)),
    "random": (lambda _: random.random(), lambda: None),
    "numpy.random": (lambda _: float(np.random.rand()), lambda: None),
    "random.Random": (lambda source: source.random(), lambda: random.Random(5)),
    "numpy Generator": (lambda source: float(source.random()), lambda: np.random.default_rng(5)),
    "numpy RandomState": (lambda source: float(source.rand()), lambda: np.random.RandomState(5)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("place", ["argument", "keyword", "list"])
def test_a_random_source_draws_the_same_again(way: dict[str, Any], name: str, place: str) -> None:
    draw, make = DRAWS[name]
    block = Noisy(draw) if place != "list" else Noisy(lambda source: draw(source[0]))

    def step(model: nn.Module) -> Any:
        source = make()
        given = [source] if place == "list" else source
        gradient = backward(model, source=given) if place == "keyword" else backward(model, given)
        return gradient, draw(source)

    compare(block, way, step)


class OwnGenerator(Block):
    """Has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.source = random.Random(7)
        self.numbers = np.random.default_rng(7)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        generator = self.__dict__.setdefault("generator", torch.Generator().manual_seed(7))
        factor = self.source.random() + float(self.numbers.random())
        return x * torch.rand(WIDTH, generator=generator).exp() * factor


def test_a_generator_of_the_module_draws_the_same_again(way: dict[str, Any]) -> None:
    compare(OwnGenerator(), way, lambda model: [backward(model), backward(model)])


@pytest.mark.parametrize("name", ["torch.Generator", "random.Random", "numpy Generator"])
def test_a_random_source_of_the_module_draws_the_same_again(way: dict[str, Any], name: str) -> None:
    draw, make = DRAWS[name]

    class OwnSource(Block):
        def middle(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x).exp() * draw(self.source)

    def step(model: nn.Module) -> Any:
        model.source = make()
        return backward(model), backward(model), draw(model.source)

    compare(OwnSource(), way, step)


def test_a_kept_draw_leaves_a_users_generator_in_step() -> None:
    """The replay skips the saved op that drew first; the one after it must not draw the first one's numbers."""

    def forward(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        first = torch.bernoulli(torch.sigmoid(x.detach()), generator=generator)
        second = torch.bernoulli(torch.sigmoid(x.detach()), generator=generator)
        return (x * first).exp() * (x * second).exp()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        policy.calls += "bernoulli" in str(op)  # type: ignore[attr-defined]
        is_first = "bernoulli" in str(op) and policy.calls == 1  # type: ignore[attr-defined]
        return CheckpointPolicy.MUST_SAVE if is_first else CheckpointPolicy.PREFER_RECOMPUTE

    policy.calls = 0  # type: ignore[attr-defined]
    gradients = []
    for call in (lambda *given: forward(*given), lambda *given: hp.checkpoint(forward, *given, policy_fn=policy)):
        x, generator = batch(), torch.Generator().manual_seed(2)
        call(x, generator).sum().backward()
        gradients.append((x.grad, torch.rand(3, generator=generator)))
    assert equal(*gradients)


# ------------------------------------------------------------------ arguments


class Up(Block):
    """The second half of a U-Net: takes what it needs off a list."""

    def forward(self, x: torch.Tensor, skips: Any) -> torch.Tensor:
        x = torch.sigmoid(self.inner(x)) * skips.pop()
        return self.outer(x * skips.pop()).exp()


def test_skips_that_the_block_pops(way: dict[str, Any]) -> None:
    def step(model: nn.Module) -> Any:
        tensors = [batch(seed) for seed in range(4)]
        skips = [tensor * 1 for tensor in tensors]
        gradient = backward(model, skips)
        return gradient, [tensor.grad is None for tensor in tensors], len(skips), tensors[3].grad

    compare(Up(), way, step)


class Pulling(Block):
    """Takes what it needs from an iterator."""

    def forward(self, x: torch.Tensor, source: Any) -> torch.Tensor:
        x = torch.sigmoid(self.inner(x)) * next(source)
        return self.outer(x * next(source)).exp()


@pytest.mark.parametrize("make", [iter, lambda items: iter(tuple(items)), reversed, lambda items: iter(set(items))])
def test_an_iterator_goes_on_from_the_same_place(way: dict[str, Any], make: Callable[[Any], Any]) -> None:
    def step(model: nn.Module) -> Any:
        source = make([0.5, 0.25, 2.0])
        return backward(model, source), list(source)

    compare(Pulling(), way, step)


@pytest.mark.parametrize("make", [lambda: (n for n in (1.0, 2.0)), lambda: map(float, [1, 2]), lambda: zip([1], [2])])
@pytest.mark.python_replay
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

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        context.calls += 1
        context.inner["state"]["scale"] += 0.5
        if context.values:
            x = x + context.values[-1]
        x = torch.sigmoid(self.inner(x)) * context.calls * context.inner["state"]["scale"]
        context.values.append(x.detach())
        return self.outer(x * x).exp()


def test_a_plain_object_among_the_arguments_is_changed_once(way: dict[str, Any]) -> None:
    def step(model: nn.Module) -> Any:
        context, x = Context(), batch()
        (model(x, context) * model(x, context)).sum().backward()
        return x.grad, context.calls, context.inner, context.values

    compare(Passing(), way, step)


def test_forwards_tensors_are_not_held_by_the_state_of_a_plain_object() -> None:
    context, x = Context(), batch()
    loss = hp.checkpoint(Passing(), x, context).sum()
    held = context.values[0]
    context.values.clear()
    reference = weakref.ref(held)
    del held
    assert reference() is None
    del loss


class InPlaceOfAnObject(Block):
    """Changes a tensor of an object in place, and reads it: no stand-in can be put in its place."""

    def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:
        x = torch.sigmoid(self.inner(x)) * context.inner["state"]
        context.inner["state"].add_(1)
        return self.outer(x * x).exp()


@pytest.mark.python_replay
def test_a_tensor_of_an_object_that_forward_changes_in_place_is_named(way: dict[str, Any]) -> None:
    context = Context()
    context.inner["state"] = torch.ones(WIDTH)
    with pytest.raises(InPlaceChangeError, match="a tensor of an object among its arguments"):
        backward(hp.checkpoint_wrapper(InPlaceOfAnObject(), **way), context)


def test_a_closure_over_a_module_and_a_list_is_in_reach(way: dict[str, Any]) -> None:
    results = []
    for is_ours in (False, True):
        block, losses = Block(), []

        def forward(x: torch.Tensor, block: nn.Module = block, losses: list[float] = losses) -> torch.Tensor:
            return block(x)

        def region(x: torch.Tensor) -> torch.Tensor:
            losses.append(len(losses) + 1.0)  # noqa: B023
            return forward(x) * losses[-1]  # noqa: B023

        x = batch()
        (hp.checkpoint(region, x, **way) if is_ours else region(x)).sum().backward()
        results.append((x.grad, list(losses), [value.grad for value in block.parameters()]))
    assert equal(*results)


@pytest.mark.python_replay
def test_an_error_in_a_replay_leaves_the_state_as_it_was() -> None:
    block = Counting()
    model = hp.checkpoint_wrapper(block)
    x = batch()
    loss = model(x).sum()
    original = type(block).middle

    def failing(self: Counting, x: torch.Tensor) -> torch.Tensor:
        original(self, x)
        raise ValueError("in the replay")

    type(block).middle = failing  # type: ignore[method-assign]
    try:
        with pytest.raises(ValueError, match="in the replay"):
            loss.backward()
    finally:
        type(block).middle = original  # type: ignore[method-assign]
    assert (block.calls, block.history, block.by_name) == (1, [1.0], {"call 1": 1})
    loss.backward()
    plain, y = Counting(), batch()
    plain(y).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.grad)


@pytest.mark.python_replay
def test_a_region_that_is_dropped_is_freed_without_a_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        model, context, x = hp.checkpoint_wrapper(Codebook()), Context(), batch()
        loss = model(x).sum() + hp.checkpoint(Passing(), x, context).sum()
        alive = [value for value in gc.get_objects() if type(value) is RegionState]
        references = [weakref.ref(value) for value in alive]
        assert len(references) == 2
        del alive, loss
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
