"""Every bug that the fuzzer found, by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyper_parallel as hp
from hyper_parallel.backends.torch import marks
from hyper_parallel.testing import simulated_accelerator


@pytest.fixture(autouse=True)
def _on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")


@pytest.mark.parametrize(
    "first",
    [
        "import hyper_parallel",
        "import hyper_parallel.core.activation_checkpoint.swap",
        "import hyper_parallel.testing",
        "from hyper_parallel.core.activation_checkpoint.activation_checkpoint import swap",
    ],
)
def test_swap_is_the_function_whatever_was_imported_first(first: str) -> None:
    # The module of the same name, imported after the function, took its place in the package.
    code = (
        f"{first}\nimport hyper_parallel, hyper_parallel.core.activation_checkpoint as room\n"
        "import hyper_parallel.core.activation_checkpoint.swap\n"
        "assert callable(hyper_parallel.swap) and hyper_parallel.swap is room.swap, hyper_parallel.swap"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("look", ["detach", "_unsafe_view"])
def test_a_view_is_no_write(look: str) -> None:
    # The simulator took a detach, or an _unsafe_view, of a value that waits in the tail for a write to it.
    with simulated_accelerator(tail_bytes=64) as simulation:
        x = torch.randn(4, 4, requires_grad=True)

        def layer(x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            z = y.exp()
            seen = z.detach() if look == "detach" else torch.ops.aten._unsafe_view.default(z.detach(), [16])
            assert seen.numel() == 16
            for _ in range(4):
                z = z.sin()
            return z

        hp.swap(layer, x).sum().backward()
        assert not simulation.violations
        ours = x.grad
    plain = x.detach().clone().requires_grad_()
    layer(plain).sum().backward()
    assert torch.equal(ours, plain.grad)


@pytest.mark.parametrize("policy", ["PREFER_RECOMPUTE", "MUST_SAVE", "MUST_SWAP"])
@pytest.mark.parametrize("uses_before", [0, 1])
def test_a_weight_that_autocast_has_cached_is_no_op_of_the_region(policy: str, uses_before: int) -> None:
    # Forward found the weight's cast in autocast's cache, the replay cast it again: the op counts differed.
    answer = getattr(hp.CheckpointPolicy, policy)

    def step(door: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4, 4))
        x = torch.randn(3, 4, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            return F.linear(F.linear(x, weight).tanh(), weight)

        with torch.autocast("cpu", torch.bfloat16):
            y = x
            for _ in range(uses_before):
                y = F.linear(y, weight)
            y = door(region, y)
            y = door(region, y)
        y.float().sum().backward()
        return [weight.grad, x.grad]

    expected = step(lambda region, y: torch.utils.checkpoint.checkpoint(region, y, use_reentrant=False))
    with simulated_accelerator(window_bytes=0):
        got = step(lambda region, y: hp.checkpoint(region, y, policy_fn=lambda *args, **kwargs: answer))
    assert all(map(torch.equal, got, expected))


def test_an_output_of_a_region_may_be_changed_once_its_bytes_have_left() -> None:
    # The copy out was finished before the record knew how to ask whether its source was unchanged.
    def step(door: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight, bias = torch.nn.Parameter(torch.randn(4, 4)), torch.ones(4)
        x = torch.randn(3, 4, requires_grad=True)

        def block(x: torch.Tensor) -> torch.Tensor:
            y = F.linear(x, weight, bias)
            x.clone().tanh()  # saved after it, so that the replay runs past the linear
            return y

        y = door(block, x)
        y.sigmoid_()
        y.sum().backward()
        return [weight.grad, x.grad]

    expected = step(lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False))
    with simulated_accelerator(window_bytes=0):
        got = step(
            lambda block, x: hp.checkpoint(block, x, policy_fn=lambda *args, **kwargs: hp.CheckpointPolicy.MUST_SWAP)
        )
    assert all(map(torch.equal, got, expected))


def test_tensors_by_keyword_alone_are_shown_to_torch_by_position() -> None:
    """Torch's checkpoint keeps random states only of the devices it finds among the positional arguments, which it packs."""
    x = torch.ones(3, requires_grad=True)
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = hp.checkpoint(lambda *, value: value.sin(), value=x)
    assert x.data_ptr() in packed
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3).cos())


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("answer", ["MUST_SAVE", "MUST_SWAP"])
def test_a_gradient_inside_a_region_replays_it_while_its_forward_still_runs(answer: str, early_stop: bool) -> None:
    # The forward mode took the ops of that replay for its own (wrong gradient where every second op was kept), and the
    # replay met ops that forward had not come to (a mismatch).
    asked: list[Any] = []

    def every_second(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> hp.CheckpointPolicy:
        asked.append(op)
        return getattr(hp.CheckpointPolicy, answer) if len(asked) % 2 else hp.CheckpointPolicy.MUST_RECOMPUTE

    def region(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        again = slope.detach().requires_grad_()
        return slope * torch.autograd.grad(again.sin().exp().sum(), again)[0]

    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    (wanted,) = torch.autograd.grad(region(x * 2).sum(), x)
    with simulated_accelerator(window_bytes=0):
        y = hp.checkpoint(region, x * 2, policy_fn=every_second, early_stop=early_stop)
        (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got, wanted)


def test_a_mark_inside_torchs_reentrant_checkpoint_leaves_no_hooks_behind() -> None:
    # Taken off inside a backward, torch put the pair at the bottom back on afterwards, and nobody knew of it any more.
    def region(x: torch.Tensor) -> torch.Tensor:
        return hp.swap_tensor_wrapper(x * 1)

    x = torch.ones(3, 4, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(region, x, use_reentrant=True)
    hp.swap_tensor_wrapper(y.sin()).sum().backward()  # the marked value is gone before backward comes to the region
    hp.swap_tensor_wrapper(torch.ones(1))  # whoever marks next takes off what is not needed
    marks.forget_bottom_hooks()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.equal(x.grad, torch.ones(3, 4).cos())


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "python"])
def test_a_weight_that_changed_is_noticed_where_the_replay_ends_before_the_op_that_reads_it(
    native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Program 283 of a run in ``calls``: the watch looked at ops alone, and the last one of a replay may never run.
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", native)
    weights = [torch.nn.Parameter(torch.full((2, 2), 3.0))]

    def region(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[0])

    x = torch.ones(1, 2, requires_grad=True)
    with simulated_accelerator():
        y = hp.checkpoint(region, x, policy_fn=lambda *args, **kwargs: hp.CheckpointPolicy.PREFER_RECOMPUTE)
        with torch.no_grad():
            weights[0].mul_(0.5)
        with pytest.raises(hp.errors.InPlaceChangeError, match="which backward reads, was changed in place"):
            y.sum().backward()


def test_bytes_that_go_again_unread_are_not_held_against_their_checksum() -> None:
    # Under ``verify`` the end of backward compared a value that nobody had asked for; its source, an output of the region, was
    # changed in place while the copy ran.
    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        return y, y.exp()

    def swapped(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, z = hp.checkpoint(region, x, policy_fn=lambda *args, **kwargs: hp.CheckpointPolicy.MUST_SWAP)
        return y, z

    x = torch.linspace(-1, 1, 12, requires_grad=True)
    with simulated_accelerator(timing="lazy", min_bytes=0, tail_bytes=0, verify=True):
        y, z = swapped(x)
        z.mul_(2)
        (got,) = torch.autograd.grad(swapped(y)[0].sum(), y, retain_graph=True)  # brings the first region's values too
    assert torch.equal(got, y.detach().cos())
