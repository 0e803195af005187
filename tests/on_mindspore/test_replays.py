"""What a replay must not do: draw other numbers, move a stream, keep its graph, or trip over a gradient inside the region."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import mint, nn, ops
from mindspore.common.initializer import initializer

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.mindspore import checkpointing
from hyper_parallel.backends.mindspore.graph import is_in_backward
from hyper_parallel.backends.mindspore.ops import facts_of
from hyper_parallel.errors import ActivationError, InPlaceChangeError
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.testing import simulated_accelerator

from .scenario import batch

SMALL: dict[str, Any] = {"window_bytes": 0, "prefetch_bytes": 300}


def recompute_everything(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def swap_everything(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP


# ---------------------------------------------------------------------- what is drawn in Python


def _draws_by_numpy() -> Any:
    return mindspore.Tensor(np.random.standard_normal((4, 8)).astype(np.float32))


def _draws_by_initialiser() -> Any:
    return initializer("uniform", [4, 8], mindspore.float32).init_data()


def _two_steps(region: Any, draw: Any) -> list[bytes]:
    """Two gradients, and the numbers that come after them. An odd count of normals leaves one in numpy's pocket."""
    mindspore.set_seed(3)
    np.random.standard_normal()

    def forward(x: Any) -> Any:
        return mint.exp(x * 0.1) * mint.tanh(draw() * x) * ops.randn(4, 8)

    found = [mindspore.grad(lambda x: region(forward, x).sum())(batch()).asnumpy().tobytes() for _ in range(2)]
    return [*found, np.random.standard_normal(3).tobytes(), ops.randn(3).asnumpy().tobytes()]


@pytest.mark.parametrize("policy", [None, recompute_everything, swap_everything])
@pytest.mark.parametrize("timing", ["lazy", "random"])
@pytest.mark.parametrize("draw", [_draws_by_numpy, _draws_by_initialiser])
def test_what_is_drawn_in_python_is_drawn_again(draw: Any, timing: str, policy: Any) -> None:
    plain = _two_steps(lambda forward, x: forward(x), draw)
    with simulated_accelerator(timing, **SMALL):
        found = _two_steps(lambda forward, x: hp.checkpoint(forward, x, policy_fn=policy), draw)
        inner = lambda forward: lambda x: hp.checkpoint(forward, x)  # noqa: E731
        nested = _two_steps(lambda forward, x: hp.checkpoint(inner(forward), x, policy_fn=policy), draw)
    assert found == plain
    assert nested == plain


def test_what_is_drawn_in_python_is_drawn_again_without_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Ascend a region without a policy has no dispatch mode; the streams in Python are the same there."""

    def gradient(region: Any) -> list[bytes]:
        mindspore.set_seed(3)
        forward = lambda x: mint.tanh(_draws_by_numpy() * x) * mint.exp(x)  # noqa: E731
        found = mindspore.grad(lambda x: region(forward, x).sum())(batch())
        return [found.asnumpy().tobytes(), np.random.standard_normal(3).tobytes()]

    plain = gradient(lambda forward, x: forward(x))
    monkeypatch.setattr(checkpointing, "on_cpu", lambda: False)
    assert gradient(hp.checkpoint) == plain


def test_a_replay_that_fails_leaves_the_streams_where_they_were() -> None:
    def fails_in_replay(x: Any) -> Any:
        scale = float(np.random.standard_normal())
        if is_in_backward():
            raise RuntimeError("only in the replay")
        return mint.exp(x * scale)

    mindspore.set_seed(3)
    fails_in_replay(batch())
    expected = np.random.standard_normal(3)
    mindspore.set_seed(3)
    with pytest.raises(RuntimeError, match="only in the replay"):
        mindspore.grad(lambda x: hp.checkpoint(fails_in_replay, x).sum())(batch())
    np.testing.assert_array_equal(np.random.standard_normal(3), expected)


@pytest.mark.parametrize("name", ["Lgamma", "Digamma", "Igamma", "Polygamma", "GridSampler2D", "GridSampler3D"])
def test_ops_that_only_sound_like_drawing_are_recomputed(name: str) -> None:
    assert not facts_of(name).is_random


@pytest.mark.parametrize("name", ["Gamma", "RandomGamma", "UniformCandidateSampler", "NonDeterministicInts"])
def test_ops_that_draw_are_known_by_name(name: str) -> None:
    assert facts_of(name).is_random


# ---------------------------------------------------------------------- the replayed graph


def test_a_kept_value_does_not_hold_the_replayed_graph() -> None:
    """A LayerNorm is saved by the graph past all hooks. What was used in backward must go before the region ends."""
    norm, dense = nn.LayerNorm((8,)), nn.Dense(8, 8)
    seen: list[int] = []
    x = batch(64)
    with simulated_accelerator(**SMALL) as sim:

        def look(gradient: Any) -> Any:
            seen.append(sim.live_bytes)
            return gradient

        def forward(x: Any) -> Any:
            for _ in range(4):
                x = norm(dense(x))
                if not is_in_backward():
                    x.register_hook(look)
            return mint.exp(x)

        mindspore.grad(lambda x: hp.checkpoint(forward, x, policy_fn=["LayerNorm"]).sum())(x)
    assert seen == [seen[0] - index * x.nbytes for index in range(4)]  # one replayed product less for each layer


# ---------------------------------------------------------------------- a gradient inside the region


def _force(weight: Any) -> Any:
    return mindspore.grad(lambda z: (mint.tanh(mint.matmul(z, weight)) * mint.exp(z * 0.1)).sum())


@pytest.mark.parametrize("is_differentiated", [True, False])
@pytest.mark.parametrize("timing", ["lazy", "random"])
def test_a_gradient_may_be_taken_inside_a_region(timing: str, is_differentiated: bool) -> None:
    weight = mindspore.Parameter(batch(8, seed=3) * 0.3, name="weight")

    def forward(x: Any) -> Any:
        force = _force(weight)(x) if is_differentiated else ops.stop_gradient(_force(weight)(ops.stop_gradient(x)))
        return force * mint.exp(mint.matmul(x, weight) * 0.1)

    def step(region: Any) -> list[bytes]:
        value, (of_x, of_weight) = mindspore.value_and_grad(lambda x: region(forward, x).sum(), 0, [weight])(batch())
        return [tensor.asnumpy().tobytes() for tensor in (value, of_x, of_weight[0])]

    plain = step(lambda forward, x: forward(x))
    with simulated_accelerator(timing, **SMALL):
        assert step(hp.checkpoint) == plain
        assert step(hp.checkpoint) == plain


def test_a_gradient_before_a_random_op_of_the_region_is_refused_by_name() -> None:
    weight = mindspore.Parameter(batch(8, seed=3), name="weight")

    def forward(x: Any) -> Any:
        return ops.stop_gradient(_force(weight)(ops.stop_gradient(x))) * ops.randn(4, 8) * x

    with pytest.raises(
        ActivationError,
        match=r"checkpoint of .*: cannot take a gradient inside the region before StandardNormal; because",
    ):
        mindspore.grad(lambda x: hp.checkpoint(forward, x).sum())(batch())
    compat.end_failed_gradient()
    found = mindspore.grad(lambda x: hp.checkpoint(mint.exp, x).sum())(batch())
    assert found.asnumpy().tobytes() == mint.exp(batch()).asnumpy().tobytes()


# ---------------------------------------------------------------------- tensors that a region makes and fills


def _filled_by_copy(x: Any) -> Any:
    made = mint.zeros((4, 8))
    made.copy_(x)
    return made


def _filled_by_items(x: Any) -> Any:
    made = ops.zeros((4, 8))
    made[0] = x[0]
    return made


def _changed_complex(x: Any) -> Any:
    """Zeros keep their signs: a copy by arithmetic loses that of a complex one, and MindSpore waited for it for ever."""
    zero = mindspore.Tensor(np.full((4, 8), -0.0, np.float32))
    made = ops.Complex()(zero, zero)
    made.copy_(ops.stop_gradient(made) * 1)
    return x * (1 / ops.real(made)).clip(-1.0, 1.0)


@pytest.mark.parametrize("policy", [None, ["LayerNorm", "Complex", "Real"]])
@pytest.mark.parametrize("made", [_filled_by_copy, _filled_by_items, _changed_complex])
def test_what_a_region_makes_and_fills_comes_back(made: Any, policy: Any) -> None:
    """An older primitive that is handed out its kept output must not wait for an input that a factory made."""
    norm = nn.LayerNorm((8,))
    forward = lambda x: norm(made(x)) * mint.exp(x)  # noqa: E731
    plain = mindspore.grad(lambda x: forward(x).sum())(batch())
    found = mindspore.grad(lambda x: hp.checkpoint(forward, x, policy_fn=policy).sum())(batch())
    assert found.asnumpy().tobytes() == plain.asnumpy().tobytes()


def test_a_gradient_that_mindspore_loses_is_refused_by_name() -> None:
    """MindSpore records a copy into what ``mint.empty`` returns, but not where any dispatch mode is active."""

    def forward(x: Any) -> Any:
        made = mint.empty((4, 8), dtype=mindspore.float32)
        made.copy_(x)
        return mint.tanh(made) * mint.exp(x)

    def step() -> None:
        mindspore.grad(lambda x: hp.checkpoint(forward, x).sum())(batch())

    with pytest.raises(
        ActivationError, match=r"checkpoint of .*: a tensor \(4, 8\) Float32 was filled in place and lost"
    ):
        step()


def test_a_buffer_that_is_filled_from_activations_is_left_alone() -> None:
    mean = mindspore.Parameter(mint.zeros((8,)), name="mean", requires_grad=False)

    def forward(x: Any) -> Any:
        mean.copy_(ops.stop_gradient(mint.exp(x)).mean(0))
        return mint.tanh(x) * mean

    plain = mindspore.grad(lambda x: forward(x).sum())(batch())
    found = mindspore.grad(lambda x: hp.checkpoint(forward, x).sum())(batch())
    assert found.asnumpy().tobytes() == plain.asnumpy().tobytes()


def test_a_random_op_on_what_a_region_made_is_refused_instead_of_waiting_for_ever() -> None:
    drop = nn.Dropout(p=0.4).set_train()
    with pytest.raises(
        ActivationError, match=r"cannot hand out what Dropout drew in forward; because it was given a tensor"
    ):
        mindspore.grad(lambda x: hp.checkpoint(lambda x: drop(mint.ones((4, 8)) + 1) * mint.exp(x), x).sum())(batch())


# ---------------------------------------------------------------------- the caller's own objects


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_list_that_the_function_fills(by_keyword: bool) -> None:
    def layer(x: Any, aux: list[Any]) -> Any:
        h = mint.sin(x)
        aux.append((h * h).mean())
        return mint.exp(h)

    def ours(x: Any) -> Any:
        aux: list[Any] = []
        y = (
            hp.checkpoint(layer, x=x, aux=aux, swap_inputs=True)
            if by_keyword
            else hp.checkpoint(layer, x, aux, swap_inputs=True)
        )
        return y.sum() + 3 * sum(aux)

    def plain(x: Any) -> Any:
        aux: list[Any] = []
        return layer(x, aux).sum() + 3 * sum(aux)

    x = batch()
    wanted = mindspore.grad(plain)(x)
    with simulated_accelerator(**SMALL):
        got = mindspore.grad(ours)(x)
    assert np.array_equal(got.asnumpy(), wanted.asnumpy())


# ---------------------------------------------------------------------- changes of what the replay saves


def _squared_then_overwritten(x: Any) -> Any:
    value = x * 1.0
    squared = mint.square(value)  # saves its input for the backward
    value.copy_(x * 0.5)
    return squared + value


def _only(*names: str) -> Any:
    """Saves the outputs of these ops and recomputes every other."""
    chosen = CheckpointPolicy.MUST_SAVE
    return lambda _, op, *__: chosen if op.name in names else CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize(
    "policy", [None, _only(), _only("Square"), _only("Add")], ids=["none", "nothing", "square", "add"]
)
def test_a_value_that_a_replay_saves_and_then_changes_is_an_error(policy: Any) -> None:
    x = batch()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mindspore.grad(lambda x: mint.sum(_squared_then_overwritten(x)))(x)
    compat.end_failed_gradient()
    with pytest.raises(
        InPlaceChangeError, match=r"checkpoint of _squared.*: a saved tensor \(4, 8\) Float32 was changed"
    ):
        mindspore.grad(lambda x: mint.sum(hp.checkpoint(_squared_then_overwritten, x, policy_fn=policy)))(x)
    compat.end_failed_gradient()
    assert np.array_equal(mindspore.grad(lambda x: mint.sum(hp.checkpoint(mint.square, x)))(x), x * 2)


@pytest.mark.parametrize("fate", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP])
def test_a_kept_value_that_the_region_changes_gives_the_gradient_of_forward_or_an_error(fate: Any) -> None:
    x = batch()
    try:
        found = mindspore.grad(
            lambda x: mint.sum(hp.checkpoint(_squared_then_overwritten, x, policy_fn=lambda *_: fate))
        )(x)
    except InPlaceChangeError:
        compat.end_failed_gradient()
    else:
        assert np.array_equal(found, x * 2 + 0.5)


def test_values_saved_in_an_inner_replay_are_checked_too() -> None:
    def outer(x: Any) -> Any:
        return hp.checkpoint(_squared_then_overwritten, mint.tanh(x))

    with pytest.raises(InPlaceChangeError, match="was changed in place after it was saved"):
        mindspore.grad(lambda x: mint.sum(hp.checkpoint(outer, x)))(batch())
    compat.end_failed_gradient()
