"""A small Llama: no wrapper, recompute, swap, and all policies mixed give the same gradients, bit by bit; bytes counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import mindspore
import pytest

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.testing import simulated_accelerator

from .llama import DEPTH, LENGTH, ROWS, WIDTH, Llama, tokens

POLICIES = {
    "Dense": CheckpointPolicy.MUST_SWAP,
    "Softmax": CheckpointPolicy.MUST_SAVE,
    "SiLU": CheckpointPolicy.PREFER_SAVE,
    "Mul": CheckpointPolicy.MUST_RECOMPUTE,
}


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """All five answers."""
    return POLICIES.get(op.name, CheckpointPolicy.PREFER_RECOMPUTE)


MODES = {
    "none": lambda layer: layer,
    "recompute": hp.checkpoint_wrapper,
    "swap": hp.swap_wrapper,
    "mixed": lambda layer: hp.checkpoint_wrapper(layer, policy_fn=policy, swap_inputs=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What one step gave and cost."""

    values: list[bytes]
    bytes_after_forward: int
    swapped_bytes: int
    stats: Any
    left_bytes: int


def step(mode: str, timing: str, **settings: Any) -> Step:
    hp.SwapManager().reset()
    model = Llama(MODES[mode])
    after_forward: list[int] = []
    with simulated_accelerator(timing, **settings) as sim:

        def loss(batch: Any) -> Any:
            value = model(batch)
            after_forward.append(sim.live_bytes)
            return value

        value, gradients = mindspore.value_and_grad(loss, None, model.trainable_params())(tokens())
        values = [tensor.asnumpy().tobytes() for tensor in (value, *gradients)]
        del value, gradients
        return Step(
            values=values,
            bytes_after_forward=after_forward[0],
            swapped_bytes=sim.swapped_bytes,
            stats=hp.stats(),
            left_bytes=sim.live_bytes,
        )


def saved_by_layers() -> int:
    """Bytes of the distinct storages that a plain step saves inside the layers, but for weights and tables."""
    found: dict[int, int] = {}
    held: list[Any] = []

    def pack(tensor: Any) -> Any:
        held.append(tensor)
        if tensor.param_info is None:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    def recorded(layer: Any) -> Any:
        def call(*args: Any) -> Any:
            with mindspore.saved_tensors_hooks(pack, lambda tensor: tensor):
                return layer(*args)

        return call

    model = Llama(MODES["none"])
    tables = {tensor.untyped_storage().data_ptr() for tensor in (*model.tables, model.mask)}
    with simulated_accelerator():
        run = [recorded(layer) for layer in model.layers]
        model.construct = lambda batch: _through(model, run, batch)
        mindspore.value_and_grad(model, None, model.trainable_params())(tokens())
        return sum(nbytes for key, nbytes in found.items() if key not in tables)


def _through(model: Any, run: list[Any], batch: Any) -> Any:
    x = mindspore.ops.gather(model.embedding, batch, 0)
    for layer in run:
        x = layer(x, *model.tables, model.mask)
    return model.head(model.norm(x)).sum()


@pytest.fixture(scope="module")
def none() -> Step:
    return step("none", "lazy")


@pytest.mark.parametrize("timing", ["lazy", "eager", "random"])
@pytest.mark.parametrize("mode", sorted(MODES))
def test_gradients_are_bitwise_equal(mode: str, timing: str, none: Step) -> None:
    for seed in range(3 if timing == "random" else 1):
        found = step(mode, timing, seed=seed, window_bytes=3000)
        assert found.values == none.values
        assert found.left_bytes == 0


def test_released_bytes_are_counted(none: Step) -> None:
    steps = {mode: step(mode, "lazy", window_bytes=0, prefetch_bytes=2000) for mode in MODES}
    layer_input_bytes = ROWS * LENGTH * WIDTH * 4
    after = {mode: found.bytes_after_forward for mode, found in steps.items()}
    # The two products of attention copy a transposed input for themselves: saved and swapped, but seen by no mode.
    copied_inside_ops = DEPTH * 2 * layer_input_bytes
    assert after["none"] - after["swap"] == saved_by_layers() - copied_inside_ops
    assert after["recompute"] - after["swap"] == DEPTH * layer_input_bytes
    assert after["mixed"] - after["swap"] == steps["mixed"].stats.saved_bytes > 0
    for mode in ("swap", "mixed"):
        stats = steps[mode].stats
        assert stats.swapped_out_bytes == steps[mode].swapped_bytes > 0
        assert stats.prefetch_hits > stats.misses
    assert steps["recompute"].stats.recomputed_bytes > steps["mixed"].stats.recomputed_bytes > 0
    assert {mode: found.stats.live_records for mode, found in steps.items()} == dict.fromkeys(MODES, 0)
