"""Failures B17 to B30: schedules that are not one forward and then one backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

from .helpers import collector_off, count_of, live_records, same_gradients, step_gradients, storage_ref
from .kinds import swap_everything
from .models import WIDTH, Block, Chain
from .scenario import batch
from .test_failures import TIGHT, declared, wrapped_twin


@pytest.mark.parametrize("is_declared", [False, True])
def test_b17_a_micro_batch_brings_back_its_own_records_only(is_declared: bool) -> None:
    model = Chain([hp.swap_wrapper(Block()) for _ in range(3)])
    if is_declared:
        declared(model)
    with simulated_accelerator(window_bytes=0, prefetch_bytes=10**9) as sim:
        losses = [model(batch(seed=seed)).sum() for seed in range(3)]
        offloaded = count_of(sim.events, "offload")
        for index, loss in enumerate(losses):
            del sim.events[:]
            loss.backward()
            assert 0 < count_of(sim.events, "load") <= offloaded // 3, (
                f"micro-batch {index} brought back another's bytes"
            )
        assert hp.stats().live_records == 0


def test_b18_absent_layers_are_no_error() -> None:
    plain = Chain([Block() for _ in range(4)])
    ours = declared(wrapped_twin(plain))

    def run(model: Chain) -> list[Any]:
        grads = []
        for used in ((0, 1, 2, 3), (1, 3), (2,), (), (0, 3), (0, 1, 2, 3)):
            x = batch()
            out = x * 1
            for index in used:
                out = model.layers[index](out)
            out.sum().backward()
            grads.append(x.grad)
        return grads

    with simulated_accelerator(**TIGHT):
        got = run(ours)
    same_gradients(got, run(plain))


def test_b19_another_order_and_a_second_successor() -> None:
    plain = Chain([Block() for _ in range(3)])
    ours = declared(wrapped_twin(plain))
    hp.SwapManager().set_forward_prefetch_layer(ours.layers[0], ours.layers[2])
    hp.SwapManager().set_forward_prefetch_layer(ours.layers[2], ours.layers[0])

    def run(model: Chain) -> list[Any]:
        x = batch()
        a, b, c = model.layers
        (c(a(b(x))) + c(b(a(x)))).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    with simulated_accelerator(**TIGHT):
        got = run(ours)
    same_gradients(got, run(plain))


class _Stops(RuntimeError):
    pass


class _StopsAt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise _Stops("told to")
        out = x * 1
        if self.where == "backward":
            out.register_hook(self._stop)
        return out

    @staticmethod
    def _stop(gradient: torch.Tensor) -> None:
        raise _Stops("told to")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("is_declared", [False, True])
@pytest.mark.parametrize("is_selective", [False, True])
def test_b20_b21_after_an_exception_nothing_is_left_and_steps_are_right(
    where: str, is_declared: bool, is_selective: bool
) -> None:
    stops = _StopsAt()
    plain = Chain([Block(), stops, Block()])
    expected = step_gradients(plain, batch())

    def wrapper(module: nn.Module) -> Any:
        if is_selective:
            return hp.checkpoint_wrapper(module, policy_fn=swap_everything, swap_inputs=True)
        return hp.swap_wrapper(module)

    model = Chain([wrapper(copy.deepcopy(plain.layers[0])), wrapper(stops), wrapper(copy.deepcopy(plain.layers[2]))])
    if is_declared:
        declared(model)
    with simulated_accelerator(**TIGHT), collector_off():
        stops.where = where
        x = batch()
        before = x.detach().clone()
        with pytest.raises(_Stops, match="told to"):
            model(x).pow(2).mean().backward()
        assert torch.equal(x, before)
        assert hp.stats().live_records == 0
        stops.where = ""
        for _ in range(3):
            same_gradients(step_gradients(model, batch()), expected)
        assert hp.stats().live_records == 0


@pytest.mark.parametrize("is_declared", [False, True])
def test_b22_forward_without_backward_leaves_nothing(is_declared: bool) -> None:
    with simulated_accelerator(**TIGHT) as sim, collector_off():
        model = Chain([hp.swap_wrapper(Block()) for _ in range(3)])
        if is_declared:
            declared(model)
        x = batch()
        model(x)
        baseline = sim.live_bytes
        for _ in range(5):
            out = model(x)
            records, middle = live_records(), storage_ref(out)
            assert records
            del out
            assert middle.expired()
            assert not any(record() for record in records)
            assert sim.live_bytes <= baseline
        assert hp.stats().live_records == 0


def test_b23_a_graph_may_be_used_again_and_differentiated_twice() -> None:
    plain = Block()
    ours = hp.swap_wrapper(copy.deepcopy(plain))

    def run(model: Any) -> list[Any]:
        x = batch()
        loss = model(x).pow(3).sum()
        loss.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.pow(2).sum().backward()
        return [x.grad, slope.detach(), *(p.grad for p in model.parameters())]

    with simulated_accelerator(**TIGHT), collector_off():
        got = run(ours)
    same_gradients(got, run(plain))


def test_b24_what_backward_needs_first_never_leaves_and_takes_no_far_memory() -> None:
    layer = hp.swap_wrapper(lambda x: x.sin().exp().cos())
    x = torch.rand(64, 64, requires_grad=True)
    with simulated_accelerator(tail_bytes=x.nbytes, window_bytes=0) as sim:
        layer(x).sum().backward()
        stats = hp.stats()
        # sin saves x, exp saves its result, cos saves that result again: two storages, of which the tail holds one.
        assert [event for event in sim.events if event[0] == "offload"] == [("offload", x.nbytes)]
        assert stats.kept_bytes["needed_first"] == x.nbytes
        (tier,) = stats.tiers
        assert tier.peak_live_bytes == x.nbytes


def test_b25_the_window_bounds_what_is_in_flight() -> None:
    nbytes = 16 * 16 * 4

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = x.sin()
        return x

    for num_in_window in (0, 1, 3):
        x = torch.rand(16, 16, requires_grad=True)
        with simulated_accelerator(window_bytes=num_in_window * nbytes) as sim:
            out = hp.swap(chain, x)
            flying = most = 0
            for what, _ in sim.events:
                flying += {"offload": 1, "drop": -1}.get(what, 0)
                most = max(most, flying)
            assert most == num_in_window + 1
            assert flying == num_in_window
            out.sum().backward()


def test_b26_a_value_that_was_not_forecast_is_loaded_on_demand() -> None:
    plain = nn.ModuleList([Block() for _ in range(3)])
    ours = nn.ModuleList([hp.swap_wrapper(copy.deepcopy(layer)) for layer in plain])

    def run(layers: Any) -> list[Any]:
        x = batch()
        trunk = layers[0](x)
        unused = layers[1](trunk)
        layers[2](trunk).sum().backward(retain_graph=True)
        unused.sum().backward()
        return [x.grad]

    with simulated_accelerator(**TIGHT) as sim:
        got = run(ours)
        assert count_of(sim.events, "miss") == hp.stats().misses > 0
    same_gradients(got, run(plain))


def test_b27_outputs_are_not_wrapped() -> None:
    model = declared(Chain([hp.swap_wrapper(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]))
    with simulated_accelerator(**TIGHT):
        x = batch()
        out = model.layers[0](x)
        assert out.grad_fn.name() == "AddmmBackward0"
        out += x
        out[0].mul_(2)
        F.relu_(out)
        model.layers[1](out).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("keywords", [{}, {"swap_inputs": True}, {"policy_fn": swap_everything}])
def test_b28_a_first_layer_whose_input_needs_no_grad(keywords: Any) -> None:
    plain = Chain([Block() for _ in range(3)])
    ours = declared(wrapped_twin(plain, lambda m: hp.checkpoint_wrapper(m, **keywords)))
    x = batch(grad=False)
    with simulated_accelerator(**TIGHT):
        got = step_gradients(ours, x)
    same_gradients(got, step_gradients(plain, x))


def test_b30_a_replay_registers_nothing() -> None:
    blocks = Chain([Block() for _ in range(3)])
    plain = Chain([nn.Sequential(nn.Tanh(), block, nn.Tanh()) for block in blocks.layers])
    ours = wrapped_twin(blocks, lambda m: hp.checkpoint_wrapper(Chain([nn.Tanh(), hp.swap_wrapper(m), nn.Tanh()])))
    ours = Chain([hp.checkpoint_wrapper(ours)])
    with simulated_accelerator(**TIGHT) as sim, collector_off():
        x = batch()
        loss = ours(x).pow(2).mean()
        forward = len(sim.events)
        loss.backward()
        assert count_of(sim.events[forward:], "offload") == 0
        del loss
        assert hp.stats().live_records == 0
        got = [*(p.grad for p in ours.parameters()), x.grad]
    same_gradients(got, step_gradients(plain, batch())[:-1])
