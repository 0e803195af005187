"""What a tape does and does not: one run of Python, only the needed ops, no memory held, hooks around respected."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import hyper_parallel as hp
from hyper_parallel.backends.torch import native
from hyper_parallel.testing import simulated_accelerator

from .models import WIDTH, mlp


def replayed_ops() -> int:
    recorder = native.load()
    assert recorder is not None
    count: int = recorder.counters()["replayed_ops"]
    return count


def test_the_users_python_runs_once() -> None:
    calls = []

    def region(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin().exp()

    for _ in range(3):
        hp.checkpoint(region, torch.randn(4, requires_grad=True)).sum().backward()
    assert len(calls) == 3


def test_only_the_ops_that_backward_needs_run_again() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        made = x.sin()  # saves x, which is held
        return made.cos().sum()  # saves made; the cosine's own output is saved by nothing

    x = torch.randn(4, requires_grad=True)
    hp.checkpoint(region, x).backward()  # proves the sequence
    before = replayed_ops()
    hp.checkpoint(region, x).backward()
    assert replayed_ops() - before == 1, "the sine alone"


def test_a_proven_sequence_is_not_proven_again_with_other_sizes() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    hp.checkpoint(region, torch.randn(4, requires_grad=True))
    before = replayed_ops()
    hp.checkpoint(region, torch.randn(2, 6, requires_grad=True))
    assert replayed_ops() == before


def test_forward_keeps_no_value_that_can_be_made_again() -> None:
    kept: list[weakref.ref[torch.UntypedStorage]] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        made = x.sin()
        kept.append(weakref.ref(made.untyped_storage()))
        return made.exp().cos()

    x = torch.randn(4, requires_grad=True)
    output = hp.checkpoint(region, x)
    assert [reference() for reference in kept] == [None]
    output.sum().backward()


def test_a_tape_that_is_never_run_is_freed_without_a_collection() -> None:
    model, x = mlp(), torch.randn(4, WIDTH, requires_grad=True) * 1
    reference = weakref.ref(x.untyped_storage())
    gc.collect()
    gc.disable()
    try:
        output = hp.checkpoint(model, x)
        del x, output
        assert reference() is None
    finally:
        gc.enable()


def test_remade_values_of_a_retained_graph_go_when_the_backward_ends() -> None:
    with simulated_accelerator() as device:
        model, x = mlp(), torch.randn(64, WIDTH, requires_grad=True)
        loss = hp.checkpoint(model, x).sum()
        after_forward = device.live_bytes
        loss.backward(retain_graph=True)
        model.zero_grad(set_to_none=True)
        x.grad = None
        gc.collect()
        assert device.live_bytes == after_forward
        loss.backward()


def test_outside_tensors_go_through_the_hooks_around_the_region() -> None:
    seen: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor.detach().clone()

    x = torch.randn(3, WIDTH, requires_grad=True)
    model = nn.Linear(WIDTH, 5, bias=False)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = hp.checkpoint(lambda x: model(x).exp(), x.sin())
    assert (3, WIDTH) in seen, "the region's input"
    assert (3, 5) not in seen, "what the region makes is nobody else's"
    (found,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(found, torch.autograd.grad(model(x.sin()).exp().sum(), x)[0])


def test_swapped_inputs_leave_and_come_back() -> None:
    def gradient(**option: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model, x = mlp(), torch.randn(32, WIDTH, requires_grad=True)
        y = x
        for _ in range(4):
            y = hp.checkpoint(model, y, **option)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = gradient()
    with simulated_accelerator() as device:
        assert torch.equal(gradient(swap_inputs=True), wanted)
        assert device.swapped_bytes > 0
    assert hp.stats().regions_from_tape == 8


@pytest.mark.parametrize("is_ours_outside", [True, False])
def test_regions_nest_with_torchs_checkpoint(is_ours_outside: bool) -> None:
    first, second = mlp(), mlp()

    def inner(x: torch.Tensor) -> torch.Tensor:
        if is_ours_outside:
            return torch_checkpoint(first, x.sin(), use_reentrant=False)  # type: ignore[no-any-return]
        return hp.checkpoint(first, x.sin())  # type: ignore[no-any-return]

    def outer(x: torch.Tensor) -> torch.Tensor:
        return second(inner(x).cos()).exp()  # type: ignore[no-any-return]

    x = torch.randn(4, WIDTH, requires_grad=True)
    (wanted,) = torch.autograd.grad(second(first(x.sin()).cos()).exp().sum(), x)
    run = hp.checkpoint if is_ours_outside else lambda f, x: torch_checkpoint(f, x, use_reentrant=False)
    for _ in range(2):
        (found,) = torch.autograd.grad(run(outer, x).sum(), x)
        assert torch.equal(found, wanted)


def test_a_region_in_torchs_checkpoint_in_a_region_with_a_policy_runs_python_in_every_replay() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        return hp.checkpoint(torch.sin, hp.checkpoint(torch.exp, x))  # type: ignore[no-any-return]

    def outer(x: torch.Tensor) -> torch.Tensor:
        return torch_checkpoint(middle, x, use_reentrant=False)  # type: ignore[no-any-return]

    x = torch.randn(4, requires_grad=True)
    (found,) = torch.autograd.grad(hp.checkpoint(outer, x, policy_fn=["mm"]).sum(), x)
    assert torch.equal(found, torch.autograd.grad(x.exp().sin().sum(), x)[0])
    assert "inside a region whose Python runs again" in hp.stats().regions_from_python


def test_an_error_in_forward_leaves_nothing_open() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        x.sin()
        raise ValueError("stop")

    x = torch.randn(4, requires_grad=True)
    with pytest.raises(ValueError, match="stop"):
        hp.checkpoint(region, x)
    recorder = native.load()
    assert recorder is not None
    assert recorder.depth() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_two_threads_record_regions_of_their_own() -> None:
    model = mlp()
    x = torch.randn(8, WIDTH)
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(model(leaf).sum(), leaf)
    found: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(20):
            leaf = x.clone().requires_grad_()
            found.extend(torch.autograd.grad(hp.checkpoint(model, leaf).sum(), leaf))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    assert all(torch.equal(one, wanted) for one in found)


def test_a_mode_of_somebody_else_runs_python_again_by_name() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(4, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False):
        hp.checkpoint(mlp(), x).sum().backward()
    assert set(hp.stats().regions_from_python) == {"the dispatch mode _FlopCounterMode"}


def test_without_the_recorder_everything_works_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "0")
    x = torch.randn(4, WIDTH, requires_grad=True)
    hp.checkpoint(mlp(), x).sum().backward()
    stats = hp.stats()
    assert stats.regions_from_tape == 0
    assert next(iter(stats.regions_from_python)).startswith("no native recorder: it is switched off")


def test_the_first_steps_line_says_how_many_regions_run_from_a_tape(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, WIDTH, requires_grad=True)
    with caplog.at_level("INFO", logger="hyper_parallel.summary"):
        hp.checkpoint(mlp(), hp.checkpoint(mlp(), x)).sum().backward()
    assert "recomputed 2 regions (1.50 KiB) from a tape" in caplog.text


def test_a_number_among_the_operands_is_recorded_under_a_mode_of_ours() -> None:
    x = torch.randn(4, requires_grad=True)
    with simulated_accelerator():
        (found,) = torch.autograd.grad(hp.checkpoint(lambda x: (x * 1).sin() * 3, x).sum(), x)
    assert torch.equal(found, torch.autograd.grad(((x * 1).sin() * 3).sum(), x)[0])
    assert hp.stats().regions_from_tape == 1


class Copied(torch.autograd.Function):
    """Returns memory that the dispatcher did not see come into being."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy().copy())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_an_error_in_forward_leaves_no_value_behind() -> None:
    """The copy is from outside, and its graph is the region's: the tape must not hold it."""
    kept: list[weakref.ref[torch.UntypedStorage]] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        copied: torch.Tensor = Copied.apply(x.sin())
        kept.append(weakref.ref(copied.untyped_storage()))
        (copied * 2).exp()
        raise ValueError("stop")

    x = torch.randn(4, requires_grad=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="stop"):
            hp.checkpoint(region, x)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def peak_of_backward(model: nn.Module, x: torch.Tensor, *, is_retained: bool) -> int:
    with simulated_accelerator() as simulation:
        for _ in range(2):  # on probation, and believed
            output = x
            for layer in model:
                output = hp.checkpoint(layer, output)
            loss = output.sum()
            simulation.reset_peak()
            before = simulation.live_bytes
            torch.autograd.grad(loss, x, retain_graph=is_retained)
        return simulation.peak_bytes - before


def test_the_backward_of_a_retained_graph_holds_the_values_of_one_region() -> None:
    model = nn.Sequential(*(nn.Sequential(*(nn.Sigmoid() for _ in range(4))) for _ in range(8)))
    x = torch.randn(64, WIDTH, requires_grad=True)
    freed, retained = (peak_of_backward(model, x, is_retained=is_retained) for is_retained in (False, True))
    values_of_a_region = 4 * x.nbytes
    assert retained <= freed + values_of_a_region


def test_hooks_around_a_region_that_keep_what_they_see_hold_no_graph() -> None:
    """A tensor that another thread made inside the region is outside for its tape, and has a history in the region."""
    living = []

    def region(x: torch.Tensor) -> torch.Tensor:
        y, made, lives_with_the_graph = x.sin(), [], mlp()
        assert y.grad_fn is not None
        y.grad_fn.metadata["held"] = lives_with_the_graph
        living.append(weakref.ref(lives_with_the_graph))
        thread = threading.Thread(target=lambda: made.append(y.exp()))
        thread.start()
        thread.join()
        return (made[0] * y.cos()).sin()

    x = torch.randn(64, WIDTH, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            hp.checkpoint(region, x)
        assert living[0]() is None
    finally:
        gc.enable()


def test_gradients_that_are_taken_inside_a_region_run_no_earlier_ops_again() -> None:
    """What the user's code still holds stands for itself."""

    def region(x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(x.sin().exp().cos().sum(), x)
            x = x - slope
        return x * x

    def ops_of_forward(steps: int) -> int:
        x = torch.randn(WIDTH, requires_grad=True)
        for _ in range(3):  # proves the sequence
            hp.checkpoint(region, x, steps)
        before = replayed_ops()
        hp.checkpoint(region, x, steps)
        return replayed_ops() - before

    assert ops_of_forward(16) == 2 * ops_of_forward(8)


def test_gradients_that_are_differentiated_again_inside_a_region_run_no_earlier_ops_again() -> None:
    """The graphs of earlier steps of the loop live, and their values could be made only from the region's beginning."""

    def region(x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            (slope,) = torch.autograd.grad(x.sin().exp().cos().sum(), x, create_graph=True)
            x = x - 0.1 * slope
        return x * x

    def ops_of_forward(steps: int) -> int:
        x = torch.linspace(-1, 1, WIDTH).requires_grad_()
        (wanted,) = torch.autograd.grad(region(x, steps).sum(), x)
        for _ in range(3):  # proves the sequence
            output = hp.checkpoint(region, x, steps)
            assert torch.equal(torch.autograd.grad(output.sum(), x)[0], wanted)
        before = replayed_ops()
        hp.checkpoint(region, x, steps)
        return replayed_ops() - before

    few, many = ops_of_forward(8), ops_of_forward(32)
    assert many <= 5 * few, f"{few} ops for 8 steps, {many} for 32"


def test_a_lazy_module_runs_from_a_tape_once_it_has_its_parameters() -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh())
    for _ in range(3):
        hp.checkpoint(model, torch.randn(4, WIDTH)).sum().backward()
    stats = hp.stats()
    assert stats.regions_from_tape == 2
    assert dict(stats.regions_from_python) == {"a parameter of type UninitializedParameter": 1}
