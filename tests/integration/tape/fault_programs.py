"""One small program for each named fault of the tape (``native/faults.h``).

Each program is right without its fault and fails with it: an assertion here, or an error of ours or of torch. Programs compare
with the plain step, and they look at what a user can see: gradients, buffers, random streams, memory, which ops run again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.policy import ByOpName
from hyper_parallel.errors import InPlaceChangeError
from hyper_parallel.testing import simulated_accelerator

from .models import RECORDED, WIDTH, ChangedUnseen, Effects, LargeBuffer, OwnKernel, mlp
from .source_programs import SOURCE_PROGRAMS
from .test_mechanism import (
    test_gradients_that_are_differentiated_again_inside_a_region_run_no_earlier_ops_again,
    test_gradients_that_are_taken_inside_a_region_run_no_earlier_ops_again,
    test_the_backward_of_a_retained_graph_holds_the_values_of_one_region,
)
from .test_policies import SWAP_ALL
from .test_settings import ATTENTION, PRECISION, each_op_runs_again_under
from .test_stuck_values import test_an_unpacked_weight_that_backward_does_not_read_is_not_held
from .test_values import (
    are_equal,
    once,
    ours,
    plain,
    steps,
    test_a_change_that_the_version_counter_does_not_show_is_read_as_the_plain_step_reads_it,
    test_a_weight_that_changed_before_backward_is_named,
    test_each_op_runs_again_under_the_settings_that_it_ran_under,
)

__all__ = ["ONLY_ELSEWHERE", "PROGRAMS"]

Program = Callable[[], None]


class Watch(TorchDispatchMode):
    """Notes the ops that run while it is active, and whether autograd recorded then."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append((op.overloadpacket.__name__, torch.is_grad_enabled()))
        return op(*args, **(kwargs or {}))


def gives_the_plain_bytes(make: Callable[[], nn.Module]) -> Program:
    def program() -> None:
        assert are_equal(steps(make, ours, once), steps(make, plain, once)), "other bytes than the plain step's"
        assert dict(hp.stats().regions_from_python) == {}, "the tape was not believed"

    return program


def gives_the_plain_gradient(region: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    def program() -> None:
        x = torch.linspace(-1, 2, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
        (wanted,) = torch.autograd.grad(region(x).sum(), x)
        for _ in range(2):
            (found,) = torch.autograd.grad(ours(region, x).sum(), x)
            assert torch.equal(found, wanted), "another gradient than the plain step's"
        assert dict(hp.stats().regions_from_python) == {}, "the tape was not believed"

    return program


def a_saved_value_that_the_region_changed_raises() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        return x.exp().add_(1)

    with pytest.raises(InPlaceChangeError, match="was changed in place after it was saved"):
        ours(region, torch.randn(4, requires_grad=True)).sum().backward()


def a_kept_result_that_changed_is_made_again() -> None:
    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, order = x.sort()
        return values.exp(), order

    x = torch.linspace(3, -1, 8).requires_grad_()
    (wanted,) = torch.autograd.grad(region(x * 2)[0][:3].sum(), x)
    output, order = hp.checkpoint(region, x * 2)
    order.zero_()
    assert torch.equal(torch.autograd.grad(output[:3].sum(), x)[0], wanted)


def a_large_buffer_is_not_copied() -> None:
    assert are_equal(steps(LargeBuffer, ours, once, count=1), steps(LargeBuffer, plain, once, count=1))
    (reason,) = hp.stats().regions_from_python or ("none",)
    assert "bytes that was made outside the region" in reason


def reads_filled_memory(x: torch.Tensor) -> torch.Tensor:
    """The sum reads the filled memory and saves nothing; the sine saves the sum."""
    filled = torch.empty_like(x)
    filled.detach().numpy()[:] = 3.0
    return (x + filled).sin()


def memory_that_numpy_filled_is_kept() -> None:
    """After forward, the freed memory is filled with other numbers: an ``empty`` that runs again finds those."""

    def gradient(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(8, WIDTH, requires_grad=True)
        output = run(reads_filled_memory, x)
        for _ in range(3):
            others = [torch.full((8, WIDTH), 5.0) for _ in range(64)]
            del others
        return torch.autograd.grad(output.sum(), x)[0]

    assert torch.equal(gradient(ours), gradient(plain))
    assert dict(hp.stats().regions_from_python) == {}


def memory_that_numpy_filled_and_an_op_saved_is_kept() -> None:
    """No op reads the filled memory before it is saved."""

    class Takes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            scale = torch.empty_like(x)
            scale.numpy()[:] = 3.0
            ctx.save_for_backward(scale)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0]  # type: ignore[no-any-return]

    x = torch.randn(8, WIDTH, requires_grad=True)
    output = ours(Takes.apply, x)
    for _ in range(3):
        others = [torch.full((8, WIDTH), 5.0) for _ in range(64)]
        del others
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], torch.full_like(x, 3.0))
    assert dict(hp.stats().regions_from_python) == {}


def a_choice_is_not_made_again() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        values, _ = (x * 2).topk(2)
        return values.exp()

    x = torch.randn(4, WIDTH, requires_grad=True)
    ours(region, x).sum().backward()
    loss = ours(region, x).sum()
    with Watch() as watch:
        loss.backward()
    assert "topk" not in [name for name, _ in watch.ops], "the choice was made a second time"


def an_op_of_another_library_runs_once() -> None:
    runs = []

    @torch.library.custom_op("tape_faults::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin()

    x = torch.randn(4, requires_grad=True)
    ours(lambda x: x * noted(x.detach()).exp(), x).sum().backward()
    assert len(runs) == 1, f"the op ran {len(runs)} times"


def what_cannot_be_remade_is_not_believed() -> None:
    assert are_equal(steps(ChangedUnseen, ours, once), steps(ChangedUnseen, plain, once))
    (reason, *_) = hp.stats().regions_from_python
    assert "came out different when it was made again" in reason


def the_generator_is_where_the_plain_step_leaves_it() -> None:
    def state(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(8, WIDTH, requires_grad=True)
        output = run(lambda x: x * torch.rand_like(x), x)
        torch.rand(4)  # others draw between forward and backward
        output.sum().backward()
        return torch.rand(4)

    assert torch.equal(state(ours), state(plain))


def a_long_chain_replays_in_little_memory() -> None:
    """Only the last value is wanted. Remaking it needs two values at a time."""

    def region(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x
            for _ in range(20):
                y = y + 1
        return x * y  # saves the end of the chain

    with simulated_accelerator() as device:
        x = torch.randn(1024, requires_grad=True)
        for _ in range(2):
            loss = ours(region, x).sum()
            device.reset_peak()
            before = device.live_bytes
            loss.backward()
            assert device.peak_bytes - before <= 6 * 4096, "values lived longer than until their last reader"
            x.grad = None


def every_op_runs_in_the_grad_mode_of_forward() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.cos()
        return x.sin().mul(scale).exp()

    x = torch.randn(4, requires_grad=True)
    ours(region, x).sum().backward()
    loss = ours(region, x).sum()
    with Watch() as watch:
        loss.backward()
    assert ("cos", False) in watch.ops
    assert ("sin", True) in watch.ops, "an op that autograd recorded ran again in another grad mode"


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def ops_run_under_the_default_dtype_of_forward() -> None:
    x, whole = torch.linspace(0.5, 1, 4, dtype=torch.float64).requires_grad_(), torch.arange(4)

    def region(x: torch.Tensor) -> torch.Tensor:
        return x * (whole / 3)

    with default_dtype(torch.float64):
        (wanted,) = torch.autograd.grad(region(x).sum(), x)
        loss = ours(region, x).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], wanted)
    assert torch.get_default_dtype() is torch.float32


def remade_values_of_a_retained_graph_go() -> None:
    """Also those that this backward makes and does not read."""

    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2).sigmoid().sigmoid(), (x * 3).tanh().tanh()

    with simulated_accelerator() as device:
        x = torch.randn(64, WIDTH, requires_grad=True)
        first, second = hp.checkpoint(region, x)
        after_forward = device.live_bytes
        first.sum().backward(retain_graph=True)
        x.grad = None
        gc.collect()
        assert device.live_bytes == after_forward, "remade values stayed after the backward"
        second.sum().backward()


def a_small_buffer_is_read_as_forward_read_it() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.shift).sigmoid()

    model, x = Shifted(), torch.linspace(-1, 1, WIDTH).requires_grad_()
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    loss = ours(model, x).sum()
    model.shift.add_(1)  # type: ignore[operator,union-attr]
    assert torch.equal(torch.autograd.grad(loss, x)[0], wanted)


def hooks_around_decide_about_inputs() -> None:
    seen: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor.detach().clone()

    x = torch.randn(3, WIDTH, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = ours(lambda x: x.tanh().exp(), x.sin())
    made = seen.count((3, WIDTH))
    assert made == 2, f"the sine's input and the region's input, and not {made} values, go through the hooks around"
    output.sum().backward()


def changes_a_kept_value(x: torch.Tensor) -> torch.Tensor:
    """The sorted values are kept. The region changes them, and backward needs what was read before and after."""
    values = (x.detach() * 2).sort().values
    before = x * values.exp()
    values.mul_(0.5)
    return before * values.cos()


class Table(Effects):
    """Reads a buffer, changes it, reads it again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = (self.inner(x) * self.steps.sum()).tanh()
        with torch.no_grad():
            self.steps += 1
        return before * (x * self.steps.sum()).sin()


def swapped_gradient(
    region: Callable[[torch.Tensor], torch.Tensor], policy: ByOpName, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of a region whose policy swaps, on a device whose copies happen when they are launched, and the plain one."""
    x = torch.linspace(-1, 2, 64 * WIDTH).reshape(64, WIDTH).requires_grad_()
    (wanted,) = torch.autograd.grad(region(x).sum(), x)
    with simulated_accelerator("eager", **settings):
        (found,) = torch.autograd.grad(hp.checkpoint(region, x, policy_fn=policy).sum(), x)
    return found, wanted


def a_swapped_value_that_the_region_changes_is_fetched_as_it_was() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        values = x.detach() * 2
        product = x * values.exp()
        values.mul_(0.5)
        return product * values.cos()

    found, wanted = swapped_gradient(region, ByOpName({"mul": CheckpointPolicy.MUST_SWAP}), tail_bytes=10**6)
    assert torch.equal(found, wanted), "another gradient than the plain step's"
    assert dict(hp.stats().regions_from_python) == {}, "the tape was not believed"


def a_swapped_output_that_changed_is_made_again() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).sigmoid()

    x = torch.linspace(-1, 2, 64 * WIDTH).reshape(64, WIDTH).requires_grad_()
    (wanted,) = torch.autograd.grad(region(x).sum(), x)
    with simulated_accelerator(tail_bytes=10**6):  # it has not left the device when it is changed
        output = hp.checkpoint(region, x, policy_fn=SWAP_ALL)
        loss = output.sum()
        output.detach().zero_()
        assert torch.equal(torch.autograd.grad(loss, x)[0], wanted)


def a_swapped_value_that_numpy_changes_is_not_believed() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        values = x.detach() * 2
        before = x + 1  # by now the values were given to the engine
        values.numpy()[:] = 0.25
        return before * values.exp()

    found, wanted = swapped_gradient(region, ByOpName({"mul": CheckpointPolicy.MUST_SWAP}))
    assert torch.equal(found, wanted), "another gradient than the plain step's"
    (reason,) = hp.stats().regions_from_python or ("none",)
    assert "came out different when it was made again" in reason


class FilledByNumpy(torch.autograd.Function):
    """Returns a value that numpy changed after an op of torch had read it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        values = x * 2
        values.add(1)
        values.numpy()[:] = 0.25
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def what_a_python_function_returns_is_kept_and_not_swapped() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = FilledByNumpy.apply(x)
        return (value * x).tanh()

    found, wanted = swapped_gradient(region, SWAP_ALL)
    assert torch.equal(found, wanted), "another gradient than the plain step's"
    assert dict(hp.stats().regions_from_python) == {}, "the tape was not believed"


class Conjugated(nn.Module):
    """Saves conjugate views of values that the region makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x.sin(), x.cos()) * 2
        w = torch.complex(x.exp(), x.tanh()) * 3
        product = z.conj() * w.conj()
        return product.real * product.imag


class Negated(nn.Module):
    """Saves negative views: the imaginary part of a conjugate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x.sin(), x.cos()) * 2
        part = z.conj().imag
        return part * part.detach() * x.exp()


PROGRAMS: dict[str, Program] = {
    "held_version": test_a_weight_that_changed_before_backward_is_named,
    "saved_version": a_saved_value_that_the_region_changed_raises,
    "kept_version": a_kept_result_that_changed_is_made_again,
    "generator_state": gives_the_plain_bytes(RECORDED["dropout"]),
    "generator_put_back": the_generator_is_where_the_plain_step_leaves_it,
    "copy_before_write": gives_the_plain_bytes(Table),
    "copy_limit": a_large_buffer_is_not_copied,
    "copy_of_kept": gives_the_plain_gradient(changes_a_kept_value),
    "copy_for_replay": gives_the_plain_gradient(changes_a_kept_value),
    "hidden_writes": gives_the_plain_bytes(RECORDED["batch norm"]),
    "unset_outputs": memory_that_numpy_filled_is_kept,
    "unset_saved": memory_that_numpy_filled_and_an_op_saved_is_kept,
    "python_functions": gives_the_plain_bytes(OwnKernel),
    "steering_outputs": a_choice_is_not_made_again,
    "other_libraries": an_op_of_another_library_runs_once,
    "probation": what_cannot_be_remade_is_not_believed,
    "probation_comparison": what_cannot_be_remade_is_not_believed,
    "last_use_early": gives_the_plain_bytes(mlp),
    "last_use_never": a_long_chain_replays_in_little_memory,
    "grad_mode": every_op_runs_in_the_grad_mode_of_forward,
    "settings": ops_run_under_the_default_dtype_of_forward,
    "settings_of_op": test_each_op_runs_again_under_the_settings_that_it_ran_under,
    "settings_of_precision": lambda: each_op_runs_again_under(PRECISION["float32 matmuls"]),
    "settings_of_attention": lambda: each_op_runs_again_under(ATTENTION["flash"]),
    "unseen_by_counter": test_a_change_that_the_version_counter_does_not_show_is_read_as_the_plain_step_reads_it,
    "living_values": test_gradients_that_are_taken_inside_a_region_run_no_earlier_ops_again,
    "costly_values": test_gradients_that_are_differentiated_again_inside_a_region_run_no_earlier_ops_again,
    "drop_served": test_the_backward_of_a_retained_graph_holds_the_values_of_one_region,
    "drop_made": remade_values_of_a_retained_graph_go,
    "small_buffers": a_small_buffer_is_read_as_forward_read_it,
    "hooks_around": hooks_around_decide_about_inputs,
    "conjugate_bit": gives_the_plain_gradient(Conjugated()),
    "negative_bit": gives_the_plain_gradient(Negated()),
    "swapped_write": a_swapped_value_that_the_region_changes_is_fetched_as_it_was,
    "swapped_changed": a_swapped_output_that_changed_is_made_again,
    "swapped_probation": a_swapped_value_that_numpy_changes_is_not_believed,
    "unread_values": test_an_unpacked_weight_that_backward_does_not_read_is_not_held,
    **SOURCE_PROGRAMS,
    "swapped_functions": what_a_python_function_returns_is_kept_and_not_swapped,
}
"""A fault's name, and the program that catches it."""

ONLY_ELSEWHERE = {
    "stream_event": "On a CPU every op is done when it returns, so no reader can come too early. A GPU test has to catch it.",
    "lock_of_unpack": "A race shows by chance only. The thread sanitizer reports it (test_sanitizers).",
}
"""Faults that no program here can see, and why."""
