"""Saved and swapped ops give their values to the tape: the plain step's bytes, and no more ops than needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch import native, storages
from hyper_parallel.core.activation_checkpoint.policy import ByOpName
from hyper_parallel.testing import simulated_accelerator

from .models import RECORDED, WIDTH, mlp
from .test_values import are_equal, in_parts, once, plain, retained, steps, twice_differentiated

SWAP_ALL = ByOpName({}, otherwise=CheckpointPolicy.MUST_SWAP)
SAVE_ALL = ByOpName({}, otherwise=CheckpointPolicy.MUST_SAVE)
MIXED = ByOpName(
    {
        "mm": CheckpointPolicy.MUST_SWAP,
        "addmm": CheckpointPolicy.MUST_SWAP,
        "mul": CheckpointPolicy.MUST_SAVE,
        "native_dropout": CheckpointPolicy.MUST_SAVE,
        "sigmoid": CheckpointPolicy.MUST_SWAP,
    }
)
POLICIES: dict[str, dict[str, Any]] = {
    "a list": {"policy_fn": ["addmm", "sigmoid"]},
    "all saved": {"policy_fn": SAVE_ALL},
    "all swapped": {"policy_fn": SWAP_ALL},
    "all swapped with inputs": {"policy_fn": SWAP_ALL, "swap_inputs": True},
    "mixed with inputs": {"policy_fn": MIXED, "swap_inputs": True},
    "inputs": {"swap_inputs": True},
}


def with_policy(name: str) -> Callable[..., torch.Tensor]:
    def run(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        output: torch.Tensor = hp.checkpoint(function, *args, **POLICIES[name])
        return output

    return run


@pytest.mark.parametrize("timing", ["lazy", "random"])
@pytest.mark.parametrize("backward", [once, retained, twice_differentiated, in_parts], ids=lambda one: one.__name__)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_model_gives_the_plain_bytes(policy: str, backward: Callable[..., None], timing: str) -> None:
    for name, make in RECORDED.items():
        if name in ("own kernel", "lstm", "gru") and backward is twice_differentiated:
            continue  # the plain step has no second derivative
        wanted = steps(make, plain, backward)
        with simulated_accelerator(timing, seed=1):
            assert are_equal(steps(make, with_policy(policy), backward), wanted), name
    stats = hp.stats()
    assert stats.regions_from_tape > 0
    assert dict(stats.regions_from_python) == {}


def test_ops_before_a_saved_one_do_not_run_again() -> None:
    recorder = native.load()
    assert recorder is not None
    x = torch.randn(4, WIDTH, requires_grad=True)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = x + 1
        return x.sigmoid().exp()

    for policy, replayed in ((None, 7), (["sigmoid"], 1), (["sigmoid", "exp"], 0)):
        hp.checkpoint(chain, x, policy_fn=policy).sum().backward()  # on probation
        before = recorder.counters()["replayed_ops"]
        hp.checkpoint(chain, x, policy_fn=policy).sum().backward()
        assert recorder.counters()["replayed_ops"] - before == replayed, policy


def test_swapped_bytes_leave_the_device_and_come_back() -> None:
    model = nn.Sequential(*(mlp() for _ in range(4)))
    x = torch.randn(256, WIDTH, requires_grad=True)
    for layer in (0, 1, 2, 3):
        model[layer] = hp.checkpoint_wrapper(model[layer], policy_fn=SWAP_ALL)
    with simulated_accelerator(window_bytes=0) as simulation:
        model(x).sum().backward()
        kept = hp.stats()
        assert kept.swapped_out_bytes > 0
        assert simulation.swapped_bytes > 0
    assert hp.stats().regions_from_tape == 4


def test_a_swapped_output_that_the_region_changes_is_the_one_that_was_saved() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.exp()
        y.add_(z.detach())
        return y * z

    x = torch.randn(64, WIDTH)
    found = []
    for run in (plain, with_policy("all swapped"), with_policy("mixed with inputs")):
        for timing in ("lazy", "random", "eager"):
            leaf = x.clone().requires_grad_()
            with simulated_accelerator(timing, seed=2):
                for _ in range(2):
                    run(region, leaf).sum().backward()
            found.append(leaf.grad)
    assert all(torch.equal(grad, found[0]) for grad in found if grad is not None)


@pytest.mark.parametrize("policy", [None, SAVE_ALL, SWAP_ALL], ids=["recomputed", "saved", "swapped"])
@pytest.mark.parametrize("tail_bytes", [0, 10**6], ids=["leaves", "stays"])
def test_an_output_that_is_changed_after_the_region_is_made_again(policy: ByOpName | None, tail_bytes: int) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).sigmoid()

    x = torch.randn(64, WIDTH, requires_grad=True)
    (wanted,) = torch.autograd.grad(region(x).sum(), x)
    with simulated_accelerator(tail_bytes=tail_bytes):
        for _ in range(2):
            output = hp.checkpoint(region, x, policy_fn=policy)
            loss = output.sum()
            output.detach().zero_()
            assert torch.equal(torch.autograd.grad(loss, x)[0], wanted)


def test_a_swapped_output_that_is_copied_at_once_is_copied_after_its_op() -> None:
    """Its copy does not wait for a batch. The simulated device, a dispatch mode, sees the op's end after the recorder does."""
    x = torch.randn(256, WIDTH, requires_grad=True)
    (wanted,) = torch.autograd.grad(x.sin().exp().cos().sum(), x)
    with simulated_accelerator(window_bytes=0):
        for _ in range(2):
            output = hp.checkpoint(lambda x: x.sin().exp().cos(), x, policy_fn=SWAP_ALL)
            assert torch.equal(torch.autograd.grad(output.sum(), x)[0], wanted)
    assert hp.stats().swapped_out_bytes > 0


def test_the_engines_own_ops_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    # The simulated accelerator is a dispatch mode, and under a mode the engine hides its ops. On a device there is none.
    monkeypatch.setattr(storages, "_has_modes", lambda: 0)
    wanted = steps(mlp, plain, once)
    with simulated_accelerator("random"):
        assert are_equal(steps(mlp, with_policy("all swapped with inputs"), once), wanted)
        stats = hp.stats()
    assert stats.swapped_in_bytes > 0
    assert dict(stats.regions_from_python) == {}


def test_values_are_loaded_in_the_order_in_which_backward_asks_for_them() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = x.sigmoid()  # saves its output: backward asks for the last one first, and no op runs again
        return x

    x = torch.randn(64, 64, requires_grad=True)
    with simulated_accelerator(prefetch_bytes=2 * x.nbytes, tail_bytes=0, window_bytes=0):
        for _ in range(2):
            hp.SwapManager().reset()
            hp.checkpoint(region, x, policy_fn=SWAP_ALL).sum().backward()
            stats = hp.stats()
    assert stats.misses == 1
    assert stats.prefetch_hits + stats.late_loads == 5


def test_a_policy_function_runs_python_again_by_name() -> None:
    x = torch.randn(4, WIDTH, requires_grad=True)
    hp.checkpoint(mlp(), x, policy_fn=lambda ctx, op, *args, **kwargs: True).sum().backward()
    assert dict(hp.stats().regions_from_python) == {"a policy that is a function of an op's arguments": 1}


def test_rules_and_presets_run_from_tapes() -> None:
    model = nn.Sequential(*(mlp() for _ in range(4)))
    x = torch.randn(64, WIDTH, requires_grad=True)
    plain_output = model(x).sum()
    (wanted,) = torch.autograd.grad(plain_output, x)
    with simulated_accelerator(), hp.apply_rules(model, {"*::addmm": "swap", "*::sigmoid": "save"}, blocks="*"):
        for _ in range(2):
            (found,) = torch.autograd.grad(model(x).sum(), x)
            assert torch.equal(found, wanted)
    stats = hp.stats()
    assert stats.regions_from_tape == 8
    assert stats.swapped_out_bytes > 0
    assert dict(stats.regions_from_python) == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_tensors_that_are_exchanged_right_after_a_swapped_op_give_the_plain_bytes(policy: str) -> None:
    """``torch.utils.swap_tensors`` refuses a tensor to which anybody else refers."""

    def region(x: torch.Tensor) -> torch.Tensor:
        one = x.sin().detach()
        other = one * 2
        torch.utils.swap_tensors(one, other)
        return one.exp() * other.cos() * x

    x = torch.randn(64, 64, requires_grad=True)
    (wanted,) = torch.autograd.grad(region(x).sum(), x)
    for _ in range(2):
        with simulated_accelerator("lazy"):
            (found,) = torch.autograd.grad(with_policy(policy)(region, x).sum(), x)
        assert torch.equal(found, wanted)
    assert dict(hp.stats().regions_from_python) == {}


def test_a_module_whose_parameters_are_exchanged_on_conversion_is_converted_right_after_a_swapped_op() -> None:
    def region(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        output: torch.Tensor = module.to(torch.float64)(x.exp().double())
        return output.sin()

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        x = torch.randn(8, WIDTH, requires_grad=True)
        found = []
        for run in (plain, with_policy("all swapped"), with_policy("all swapped")):
            torch.manual_seed(0)
            with simulated_accelerator("lazy"):
                found.append(torch.autograd.grad(run(region, x, nn.Linear(WIDTH, WIDTH)).sum(), x)[0])
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])
