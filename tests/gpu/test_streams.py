"""Streams and threads of the user's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.errors import CaptureError

from .parts import SWAPPING, assert_same, assert_swapped, batch, gradients, loss_of, stack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("compute_lags"),
    # torch's advice to users who move parameters between streams; the gradients below are compared bit by bit.
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream:UserWarning"),
    # A refused capture leaves a graph without nodes.
    pytest.mark.filterwarnings("ignore:.*CUDA Graph is empty:UserWarning"),
]

each_swapping = pytest.mark.parametrize("wrap", SWAPPING.values(), ids=SWAPPING)

LAG_CYCLES = 2_000_000
VALUES = 2**20  # of a tensor that is large enough to be reused at once


def _plain() -> dict[str, torch.Tensor]:
    model, x = stack(), batch(1)
    torch.manual_seed(1)
    loss_of(model(x)).backward()
    return gradients(model, x)


@each_swapping
def test_the_whole_step_on_a_side_stream(wrap: Callable[[Any], Any]) -> None:
    wanted = _plain()
    model, x = stack(wrap), batch(1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.manual_seed(1)
    with torch.cuda.stream(side):
        torch.cuda._sleep(LAG_CYCLES)
        loss_of(model(x)).backward()
    torch.cuda.current_stream().wait_stream(side)
    assert_same(gradients(model, x), wanted)
    assert_swapped()


@each_swapping
def test_forward_on_a_side_stream_backward_called_from_the_default(wrap: Callable[[Any], Any]) -> None:
    wanted = _plain()
    model, x = stack(wrap), batch(1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.manual_seed(1)
    with torch.cuda.stream(side):
        torch.cuda._sleep(LAG_CYCLES)
        loss = loss_of(model(x))
    torch.cuda.current_stream().wait_stream(side)
    loss.backward()
    assert_same(gradients(model, x), wanted)
    assert_swapped()


@each_swapping
def test_blocks_alternate_between_two_streams(wrap: Callable[[Any], Any]) -> None:
    """Each block runs on the other stream than the one before; the user orders them, as torch asks."""

    def run(model: Any, *, alternates: bool) -> dict[str, torch.Tensor]:
        x = batch(1)
        torch.manual_seed(1)
        streams = [torch.cuda.current_stream(), torch.cuda.Stream() if alternates else torch.cuda.current_stream()]
        value = x
        for index, block in enumerate(model.blocks):
            here = streams[index % 2]
            here.wait_stream(streams[(index + 1) % 2])
            with torch.cuda.stream(here):
                torch.cuda._sleep(LAG_CYCLES // 4)
                value.record_stream(here)
                value = block(value)
        streams[0].wait_stream(streams[1])
        value.record_stream(streams[0])
        loss_of(value).backward()
        torch.cuda.synchronize()
        return gradients(model, x)

    wanted = run(stack(), alternates=False)
    assert_same(run(stack(wrap), alternates=True), wanted)
    assert_swapped()


@each_swapping
def test_two_threads_with_a_model_and_a_stream_each(wrap: Callable[[Any], Any]) -> None:
    """No dropout: the device's random state belongs to all threads."""

    def run(model: Any, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        for x in inputs:
            loss_of(model(x)).backward()
        return gradients(model, *inputs)

    def inputs(thread: int) -> list[torch.Tensor]:
        return [batch(10 * thread + index) for index in range(4)]

    wanted = [run(stack(dropout=0.0), inputs(thread)) for thread in range(2)]
    models = [stack(wrap, dropout=0.0) for _ in range(2)]
    batches = [inputs(thread) for thread in range(2)]
    torch.cuda.synchronize()
    got: list[dict[str, torch.Tensor] | BaseException] = [{}, {}]

    def work(thread: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                got[thread] = run(models[thread], batches[thread])
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            got[thread] = error

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a thread hangs"
    for result, expected in zip(got, wanted):
        if isinstance(result, BaseException):
            raise result
        assert_same(result, expected)


def capture(model: Any, x: torch.Tensor) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        x.detach().clone()  # an empty capture would warn
        model(x)


def test_graph_capture_of_an_active_region_is_refused() -> None:
    for name, wrap in SWAPPING.items():
        model, x = stack(wrap, dropout=0.0), batch(1)
        loss_of(model(x)).backward()  # what libraries allocate at their first use is not the region's fault
        torch.cuda.synchronize()
        with pytest.raises(CaptureError, match="while a CUDA graph is captured"):
            capture(model, x)
        torch.cuda.synchronize()
        model.zero_grad(set_to_none=True)
        x.grad = None
        loss_of(model(x)).backward()
        assert x.grad is not None, f"{name}: no step after a refused capture"


def test_a_captured_graph_without_a_region_of_ours_still_works() -> None:
    model, x = stack(dropout=0.0), batch(1)
    with torch.no_grad():
        wanted = model(x)
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            model(x)
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, wanted)


class _Scaled(torch.autograd.Function):
    """``x * scale``; its backward is slow, or fills the memory that is free with NaN, before it reads what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, afterwards: str) -> torch.Tensor:
        ctx.save_for_backward(scale)
        ctx.afterwards = afterwards
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        if ctx.afterwards == "slow":
            torch.cuda._sleep(20 * LAG_CYCLES)
        elif ctx.afterwards == "fill":
            _fill_free_memory()
        return grad * scale, None, None


def _fill_free_memory() -> None:
    junk = [torch.full((VALUES,), float("nan"), device="cuda") for _ in range(6)]
    del junk


@pytest.mark.parametrize("window_bytes", [0, 8 * VALUES])
def test_a_buffer_that_one_stream_loads_and_another_reads_first(window_bytes: int) -> None:
    main, one, two = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()

    def step(x: torch.Tensor) -> torch.Tensor:
        one.wait_stream(main)
        two.wait_stream(main)
        with torch.cuda.stream(two):
            right = _Scaled.apply(x, x.detach() * 2, "fill")
        with torch.cuda.stream(one):
            left = _Scaled.apply(x, x.detach() * 3, "slow")
        with torch.cuda.stream(two):
            right = _Scaled.apply(right, right.detach() * 5, "")
        main.wait_stream(one)
        main.wait_stream(two)
        for made in (left, right):
            made.record_stream(main)
        return left + right

    _compare_swapped(step, window_bytes)


@pytest.mark.parametrize("window_bytes", [0, 8 * VALUES])
def test_a_source_that_one_stream_allocates_and_another_saves(window_bytes: int) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def step(x: torch.Tensor) -> torch.Tensor:
        scale = x.detach() * 3
        side.wait_stream(main)
        with torch.cuda.stream(side):
            made = _Scaled.apply(x, scale, "")
        main.wait_stream(side)
        del scale
        made.record_stream(main)
        out = _Scaled.apply(made, made.detach() * 5, "")
        _fill_free_memory()
        return out

    _compare_swapped(step, window_bytes)


def _compare_swapped(step: Callable[[torch.Tensor], torch.Tensor], window_bytes: int) -> None:
    x = torch.ones(VALUES, device="cuda", requires_grad=True)
    (wanted,) = torch.autograd.grad(step(x).sum(), x)
    torch.cuda.synchronize()
    config = hp.SwapConfig(min_bytes=0, tail_bytes=0, window_bytes=window_bytes, prefetch_bytes=2**30)
    out = hp.swap(step, x, swap_config=config)
    torch.cuda.synchronize()
    (got,) = torch.autograd.grad(out.sum(), x)
    torch.cuda.synchronize()
    assert_swapped()
    assert torch.equal(got, wanted)
