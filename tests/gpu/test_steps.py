"""Blocks of a real size: fused attention, dropout, mixed precision, schedules. Bitwise against the plain run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch import AsyncSaveOnCpu

from .parts import SWAPPING, WRAPS, assert_same, assert_swapped, batch, gradients, loss_of, stack, step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compute_lags")]

each_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
each_swapping = pytest.mark.parametrize("wrap", SWAPPING.values(), ids=SWAPPING)
WINDOWS = {"no_window": 0, "one_tensor": 2**20, "all": 2**30}


@each_wrap
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_many_steps(wrap: Callable[[Any], Any], dtype: torch.dtype) -> None:
    plain, model = stack(dtype=dtype), stack(wrap, dtype=dtype)
    wanted = [step(plain, seed=seed, dtype=dtype) for seed in range(4)]
    for seed in range(4):
        assert_same(step(model, seed=seed, dtype=dtype), wanted[seed])


@each_swapping
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("tail", [0, 2**20], ids=["no_tail", "tail"])
def test_windows_and_tails(wrap: Callable[[Any], Any], window: int, tail: int) -> None:
    wanted = step(stack())
    model = stack(wrap)
    with hp.configure(min_bytes=0, tail_bytes=tail, window_bytes=window, prefetch_bytes=window):
        for _ in range(2):
            assert_same(step(model), wanted)
    if tail == 0:
        assert hp.stats().swapped_out_bytes > 0  # a tail may hold everything that this small step saves


@each_swapping
def test_default_settings_with_automatic_prefetch(wrap: Callable[[Any], Any]) -> None:
    wanted = step(stack())
    model = stack(wrap)
    with hp.configure(hp.SwapConfig(min_bytes=0, tail_bytes=0)):
        for _ in range(4):
            assert_same(step(model), wanted)
    assert hp.stats().swapped_out_bytes > 0


def test_hooks_around_the_whole_forward() -> None:
    wanted = step(stack())
    model = stack()

    class Under(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with AsyncSaveOnCpu():
                return self.model(x)

    got = {name.removeprefix("model."): tensor for name, tensor in step(Under()).items()}
    assert_same(got, wanted)
    assert_swapped()


@each_swapping
def test_autocast(wrap: Callable[[Any], Any]) -> None:
    def run(model: Any) -> dict[str, torch.Tensor]:
        x = batch(1)
        torch.manual_seed(1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(model(x))
        loss.backward()
        return gradients(model, x)

    wanted = run(stack())
    assert_same(run(stack(wrap)), wanted)
    assert_swapped()


@each_swapping
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_forwards_then_backwards(wrap: Callable[[Any], Any], order: tuple[int, ...]) -> None:
    def run(model: Any) -> dict[str, torch.Tensor]:
        inputs = [batch(seed) for seed in range(3)]
        torch.manual_seed(1)
        losses = [loss_of(model(x)) for x in inputs]
        for index in order:
            losses[index].backward()
        return gradients(model, *inputs)

    wanted = run(stack())
    assert_same(run(stack(wrap)), wanted)
    assert_swapped()


@each_wrap
def test_retained_graph_and_gradients_of_a_part(wrap: Callable[[Any], Any]) -> None:
    def run(model: Any) -> dict[str, torch.Tensor]:
        x = batch(1)
        torch.manual_seed(1)
        middle = model.blocks[1](model.blocks[0](x))
        loss = loss_of(model.blocks[3](model.blocks[2](middle)))
        (part,) = torch.autograd.grad(loss, middle, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model, x) | {"part": part}

    wanted = run(stack())
    assert_same(run(stack(wrap)), wanted)


class _Smooth(torch.nn.Module):
    """Fused attention has no second derivative, so the penalty is on a block without it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(256, 512)
        self.down = torch.nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@each_wrap
def test_gradient_penalty(wrap: Callable[[Any], Any]) -> None:
    def run(wrap: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(wrap(_Smooth()) for _ in range(3))).to("cuda")
        x = batch(2)
        (slope,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        slope.square().sum().backward()
        return gradients(model, x)

    wanted = run(lambda block: block)
    assert_same(run(wrap), wanted)


@each_wrap
def test_forward_without_backward_and_an_exception_then_a_step(wrap: Callable[[Any], Any]) -> None:
    wanted = step(stack())
    model = stack(wrap)
    unused = model(batch(8))

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("told to")

    x = batch(9)
    middle = model.blocks[1](model.blocks[0](x))
    middle.register_hook(fail)
    with pytest.raises(ValueError, match="told to"):
        loss_of(model.blocks[3](model.blocks[2](middle))).backward()
    model.zero_grad(set_to_none=True)
    assert_same(step(model), wanted)
    del unused


# ------------------------------------------------------------------------------------------- fused attention and dropout


def _asked(answers: dict[str, CheckpointPolicy], seen: set[str]) -> Callable[..., CheckpointPolicy]:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op).split(".")[1]
        seen.add(name)
        return answers.get(name, CheckpointPolicy.MUST_RECOMPUTE)

    return policy


@pytest.mark.parametrize(
    ("backend", "op"),
    [
        (SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention"),
        (SDPBackend.EFFICIENT_ATTENTION, "_scaled_dot_product_efficient_attention"),
    ],
    ids=["flash", "efficient"],
)
@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_SAVE])
def test_kept_attention_dropout_then_recomputed_dropout(backend: SDPBackend, op: str, answer: CheckpointPolicy) -> None:
    """The replay skips the attention's random numbers, and the dropouts behind it must not notice."""
    seen: set[str] = set()
    policy = _asked({op: answer}, seen)
    with sdpa_kernel(backend):
        wanted = step(stack(dtype=torch.bfloat16), dtype=torch.bfloat16)
        model = stack(lambda block: hp.checkpoint_wrapper(block, policy_fn=policy), dtype=torch.bfloat16)
        assert_same(step(model, dtype=torch.bfloat16), wanted)
    assert op in seen, f"the attention ran as something else; ops were {sorted(seen)}"
    stats = hp.stats()
    assert (stats.swapped_out_bytes > 0) == (answer is CheckpointPolicy.MUST_SWAP), f"{stats}"
    assert (stats.saved_bytes > 0) == (answer is CheckpointPolicy.MUST_SAVE), f"{stats}"


def test_random_state_after_a_step_is_the_plain_one() -> None:
    def run(model: Any) -> torch.Tensor:
        step(model)
        return torch.rand(4, device="cuda")

    wanted = run(stack())
    for name, wrap in WRAPS.items():
        assert torch.equal(run(stack(wrap)), wanted), f"{name} moved the random stream"
