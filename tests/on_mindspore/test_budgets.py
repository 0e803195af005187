"""Budgets on MindSpore, on the simulated device: peaks under budget, gradients bitwise those of the plain step, no trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import mint, nn, ops

import hyper_parallel as hp
from hyper_parallel.errors import BudgetTooSmallError, PlanError, PlanWarning
from hyper_parallel.planner.simple_plans import simple_plan, simple_plans
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.simulation.simulation import Simulation
from hyper_parallel.testing import simulated_accelerator
from tests.on_mindspore import llama, mixture

ROWS = 64


class Case:
    """A model and its step."""

    def __init__(self, model: Any, batch: Any) -> None:
        self.model = model
        self.batch = batch
        self.function = mindspore.value_and_grad(model, None, model.trainable_params())
        self.plain = _bytes(self.step())

    def step(self) -> Any:
        return self.function(self.batch)

    def peak_bytes(self, simulation: Simulation) -> int:
        """Of one step, after one that pins memory; its gradients must be those of the plain step."""
        self.step()
        simulation.reset_peak()
        assert _bytes(self.step()) == self.plain
        return simulation.peak_bytes


def _bytes(output: Any) -> list[bytes]:
    loss, gradients = output
    return [tensor.asnumpy().tobytes() for tensor in (loss, *gradients)]


def small_llama() -> Case:
    tokens = np.random.RandomState(1).randint(0, llama.VOCABULARY, (ROWS, llama.LENGTH)).astype(np.int32)
    return Case(llama.Llama(lambda layer: layer), mindspore.Tensor(tokens))


def small_mixture() -> Case:
    return Case(mixture.Mixture(), mixture.batch())


CASES: dict[str, Callable[[], Case]] = {"llama": small_llama, "mixture": small_mixture}


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    hp.configure(hp.SwapConfig(min_bytes=1))
    with simulated_accelerator() as simulated:
        yield simulated


@pytest.mark.parametrize("name", sorted(CASES))
def test_three_budgets_are_kept_and_predicted(simulation: Simulation, name: str) -> None:
    case = CASES[name]()
    plain = case.peak_bytes(simulation)
    profile = hp.profile_memory(case.model, case.step, steps=1)
    assert profile.measured.peak_bytes == plain
    for share in (0.8, 0.6, 0.45):
        budget = int(share * plain)
        with hp.fit_memory(case.model, case.step, budget, profile=profile, steps=1) as fitted:
            peak = case.peak_bytes(simulation)
        assert peak <= budget
        assert abs(fitted.plan.predicted_peak_bytes - peak) <= 0.05 * peak
    assert case.peak_bytes(simulation) == plain


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_plain_step_is_predicted_from_its_parts(simulation: Simulation, name: str) -> None:
    case = CASES[name]()
    plain = case.peak_bytes(simulation)
    profile = hp.profile_memory(case.model, case.step, steps=1)
    plan = hp.plan_memory(profile, 2 * plain)
    assert abs(plan.predicted_peak_bytes - plain) <= 0.02 * plain
    assert sum(kind.gradient_bytes for kind in profile.kinds) > 0


class Encoder(nn.Cell):
    """Three dense encoder layers of older primitives, whose linears are given views."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.CellList([EncoderLayer(width, heads) for _ in range(3)])

    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return mint.mean(mint.square(x))


class EncoderLayer(nn.Cell):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.other_norm = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.qkv, self.out = nn.Dense(width, 3 * width), nn.Dense(width, width)
        self.up, self.down = nn.Dense(width, 4 * width), nn.Dense(4 * width, width)

    def construct(self, x: Any) -> Any:
        rows, length, width = x.shape
        q, k, v = (
            mint.transpose(part.reshape(rows, length, self.heads, width // self.heads), 1, 2)
            for part in mint.chunk(self.qkv(self.norm(x)), 3, dim=-1)
        )
        mixed = mint.matmul(ops.softmax(mint.matmul(q, mint.transpose(k, -1, -2)) * 0.2, -1), v)
        x = x + self.out(mint.transpose(mixed, 1, 2).reshape(rows, length, width))
        return x + self.down(ops.gelu(self.up(self.other_norm(x))))


def small_encoder() -> Case:
    numbers = np.random.RandomState(7).standard_normal((8, 16, 32)).astype(np.float32)
    return Case(Encoder(32, 4), mindspore.Tensor(numbers))


@pytest.mark.parametrize("name", ["encoder", "llama", "mixture"])
def test_plans_that_nothing_was_measured_of_are_predicted(simulation: Simulation, name: str) -> None:
    case = small_encoder() if name == "encoder" else CASES[name]()
    plain = case.peak_bytes(simulation)
    profile = hp.profile_memory(case.model, case.step, steps=1)
    plans = [simple_plan(profile, plain, way) for way in simple_plans(profile) if way.is_replayed]
    plans.append(hp.plan_memory(profile, int(0.8 * plain), effort=0.05))
    for plan in plans:
        with hp.apply_plan(case.model, plan):
            peak = case.peak_bytes(simulation)
        # Which plan is found depends on times that are measured. Most come out within 2 %; one of an encoder was 9 % off.
        assert abs(plan.predicted_peak_bytes - peak) <= 0.15 * peak, plan.blocks[0].reason


def test_profile_and_plan_files_make_the_same_model_smaller(simulation: Simulation, tmp_path: Path) -> None:
    case = small_llama()
    plain = case.peak_bytes(simulation)
    profile = hp.profile_memory(case.model, case.step, steps=1)
    profile.save(tmp_path / "profile.json")
    assert hp.Profile.load(tmp_path / "profile.json") == profile
    assert profile.versions.framework == "mindspore"
    plan = hp.plan_memory(profile, int(0.8 * plain))
    plan.save(tmp_path / "plan.json")
    with hp.apply_plan(case.model, hp.Plan.load(tmp_path / "plan.json")) as applied:
        assert case.peak_bytes(simulation) <= 1.1 * int(0.8 * plain), "it is no fitted plan, so it may miss by a little"
        assert applied.num_regions > 0
    other = mixture.Mixture()
    with pytest.raises(PlanError, match=r"Mixture"):
        hp.apply_plan(other, plan)


def test_a_longer_batch_is_warned_of(simulation: Simulation) -> None:
    case = small_llama()
    plain = case.peak_bytes(simulation)
    profile = hp.profile_memory(case.model, case.step, steps=1)
    with hp.fit_memory(case.model, case.step, int(0.8 * plain), profile=profile, steps=1):
        longer = mindspore.Tensor(np.zeros((2 * ROWS, llama.LENGTH), np.int32))
        with pytest.warns(PlanWarning, match=r"this batch is longer than the one that its plan was fitted on"):
            case.function(longer)


class Noisy(nn.Cell):
    """A block that draws and that has state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Dense(8, 8), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(p=0.3)
        self.register_buffer("calls", mindspore.Tensor(np.zeros(1, np.float32)))

    def construct(self, x: Any) -> Any:
        self.calls.copy_(self.calls + 1)
        np.random.rand()
        return x + self.drop(mint.nn.functional.silu(self.norm(self.inner(x))))


class Stack(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Noisy() for _ in range(3)])

    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_trial_steps_leave_no_trace(simulation: Simulation) -> None:
    mindspore.set_seed(3)
    model = Stack()
    model.set_train()
    function = mindspore.value_and_grad(model, None, model.trainable_params())
    batch = ops.ones((16, 8))
    kept = model.trainable_params()[0]
    kept.grad = gradient = ops.ones((8, 8))

    def state() -> Any:
        parameters = [parameter.asnumpy().tobytes() for parameter in model.get_parameters()]
        buffers = [layer.calls.asnumpy().tobytes() for layer in model.layers]
        return parameters, buffers, compat.op_seeds(), random.getstate(), np.random.get_state()[1].tobytes()

    before = state()
    profile = hp.profile_memory(model, lambda: function(batch), steps=1)
    assert state() == before
    hp.list_ops(model, lambda: function(batch))
    assert state() == before
    with hp.fit_memory(model, lambda: function(batch), 2 * profile.measured.peak_bytes, steps=1):
        assert state() == before
    assert kept.grad is gradient
    assert [type(layer) for layer in model.layers] == [Noisy] * 3


def test_a_budget_that_nothing_keeps_names_the_smallest_peak(simulation: Simulation) -> None:
    case = small_llama()
    profile = hp.profile_memory(case.model, case.step, steps=1)
    with pytest.raises(BudgetTooSmallError, match=r"smallest"):
        hp.plan_memory(profile, 1000)


def test_without_a_device_there_is_nothing_to_plan() -> None:
    case = small_llama()
    with pytest.raises(
        PlanError, match=r"profile_memory: the model is on CPU, where activations are in host memory already"
    ):
        hp.profile_memory(case.model, case.step)
