"""Rules, presets and the table of ops in PyNative mode: cells found as blocks, gradients bitwise those of the plain step."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import mint, nn, ops

import hyper_parallel as hp
from hyper_parallel.errors import PlanError
from hyper_parallel.planner.rules import PRESETS
from hyper_parallel.testing import simulated_accelerator
from tests.on_mindspore.llama import DEPTH, LENGTH, ROWS, VOCABULARY, WIDTH, Llama, tokens

SMALL = hp.SwapConfig(min_bytes=1)


class Trained:
    """A model, its step, and what the plain step gives."""

    def __init__(self) -> None:
        self.model = Llama(lambda layer: layer)
        self.function = mindspore.value_and_grad(self.model, None, self.model.trainable_params())
        self.plain = self.step()

    def step(self) -> Any:
        return self.function(tokens())

    def check(self) -> None:
        loss, gradients = self.step()
        assert loss.asnumpy().tobytes() == self.plain[0].asnumpy().tobytes()
        for one, other in zip(gradients, self.plain[1]):
            assert one.asnumpy().tobytes() == other.asnumpy().tobytes()


@pytest.fixture
def trained() -> Trained:
    return Trained()


def test_the_table_names_cells_and_ops_with_their_bytes(trained: Trained) -> None:
    rows = {(row.module, row.op): (row.count, row.output_bytes) for row in hp.list_ops(trained.model, trained.step)}
    width = ROWS * LENGTH * WIDTH * 4
    for layer in range(DEPTH):
        assert rows[f"layers.{layer}.attention.q", "Dense"] == (1, width)
        assert rows[f"layers.{layer}.feed_forward.up", "Dense"] == (1, 2 * width)
        assert rows[f"layers.{layer}", "AddExt"] == (2, 2 * width)
        assert rows[f"layers.{layer}", "input"][0] == 1
    assert not [key for key in rows if key[0].startswith("head")]
    trained.check()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_give_the_gradients_of_the_plain_step(trained: Trained, name: str) -> None:
    with simulated_accelerator() as simulation:
        hp.configure(SMALL)
        with hp.apply_rules(trained.model, name) as applied:
            trained.check()
            counted = applied.stats()
    assert counted.recomputed_bytes > 0
    if name in ("boundary", "attention", "auto"):
        assert counted.swapped_out_bytes > 0
    if name in ("elementwise", "auto"):
        assert counted.saved_bytes > 0
    assert simulation.peak_bytes > 0
    trained.check()


def test_a_rule_names_a_cell_and_an_op(trained: Trained) -> None:
    rules = {"layers.1.attention::Softmax": "save", "layers.*.feed_forward::matmul": "swap", "*::*": "recompute"}
    with simulated_accelerator():
        hp.configure(SMALL)
        with hp.apply_rules(trained.model, rules, step=trained.step) as applied:
            trained.check()
            decided = applied.decided()
    assert decided["layers.1.attention::Softmax"] == 1
    assert decided["layers.*.feed_forward::matmul"] == 3 * DEPTH


def test_the_memory_of_a_step_falls_under_a_preset(trained: Trained) -> None:
    peaks = {}
    batch = mindspore.Tensor(np.random.RandomState(1).randint(0, VOCABULARY, (64, LENGTH)).astype(np.int32))
    with simulated_accelerator() as simulation:
        hp.configure(SMALL)
        for name in (None, "boundary"):
            applied = None if name is None else hp.apply_rules(trained.model, name)
            simulation.reset_peak()
            trained.function(batch)
            peaks[name] = simulation.peak_bytes
            if applied is not None:
                applied.remove()
    assert peaks["boundary"] < 0.5 * peaks[None]


def test_names_that_nothing_has_are_refused_with_near_misses(trained: Trained) -> None:
    with pytest.raises(
        PlanError, match=r"no module in the model's blocks is called 'layer\.\*'.*near misses: layers\.3"
    ):
        hp.apply_rules(trained.model, {"layer.*::matmul": "save"})
    with pytest.raises(PlanError, match=r"'\*::MatMulExtt' matched nothing in this step;.*near misses: MatMulExt"):
        hp.apply_rules(trained.model, {"*::MatMulExtt": "save"}, step=trained.step)
    trained.check()


def test_without_a_step_the_first_forward_refuses_and_takes_the_rules_off(trained: Trained) -> None:
    hp.apply_rules(trained.model, {"*::MatMulExtt": "save"})
    with pytest.raises(PlanError, match=r"matched nothing.*The rules were taken off the model\."):
        trained.step()
    mindspore.ops.ones((1,))
    fresh = Trained()
    fresh.check()


def test_a_step_without_a_backward_and_a_model_without_blocks_are_refused(trained: Trained) -> None:
    with pytest.raises(PlanError, match=r"list_ops: the step ran none of the model's blocks .*_no_grad"):
        hp.list_ops(trained.model, lambda: trained.model(tokens()))
    with pytest.raises(PlanError, match=r"apply_rules: Dense has no repeated blocks"):
        hp.apply_rules(nn.Dense(4, 4), "auto")
    with pytest.raises(TypeError, match=r"apply_rules: expected a mindspore\.nn\.Cell, got int"):
        hp.apply_rules(3, "auto")


def test_a_wrapped_or_jitted_block_is_refused() -> None:
    with pytest.raises(PlanError, match=r"layers\.0 is wrapped already"):
        hp.apply_rules(Llama(hp.checkpoint_wrapper), "auto")
    model = Llama(lambda layer: layer)
    model.layers[1].construct = mindspore.jit(model.layers[1].construct)
    with pytest.raises(PlanError, match=r"layers\.1: cannot follow a plan or rules, because layers\.1 is compiled"):
        hp.apply_rules(model, "boundary")


def test_blocks_of_a_sequential_cell_are_found_and_put_back() -> None:
    class Part(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mint.nn.Linear(8, 8)

        def construct(self, x: Any) -> Any:
            return mint.nn.functional.silu(self.inner(x))

    model = nn.SequentialCell(Part(), Part(), Part())
    before = list(model.cell_list)
    function = mindspore.value_and_grad(lambda x: model(x).sum(), None, model.trainable_params())
    plain = function(ops.ones((4, 8)))
    with hp.apply_rules(model, {"*::*": "recompute"}) as applied:
        wrapped = function(ops.ones((4, 8)))
        assert applied.decided()["*::*"] == 6
    assert list(model.cell_list) == before
    for one, other in zip(plain[1], wrapped[1]):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


def test_a_trial_step_that_changes_weights_is_refused_and_they_are_put_back(trained: Trained) -> None:
    optimizer = nn.SGD(trained.model.trainable_params(), 0.1)

    def step() -> None:
        _, gradients = trained.function(tokens())
        optimizer(gradients)

    with pytest.raises(PlanError, match=r"list_ops: the step left a trace: parameters were changed .*were put back"):
        hp.list_ops(trained.model, step)
    trained.check()
