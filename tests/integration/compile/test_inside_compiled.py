"""A region of ours inside a compiled model: the graph breaks there, and ``fullgraph=True`` says why and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy, SwapConfig
from hyper_parallel.backends.torch import AsyncSaveOnCpu
from hyper_parallel.core.activation_checkpoint.policy import ByOpName

from .parts import CountingBackend, assert_same, stack, step

SWAP_ADDMM = ByOpName({"addmm": CheckpointPolicy.MUST_SWAP})
WRAPS = {
    "swap": hp.swap_wrapper,
    "checkpoint": hp.checkpoint_wrapper,
    "checkpoint_swap_inputs": lambda block: hp.checkpoint_wrapper(block, swap_inputs=True),
    "selective": lambda block: hp.checkpoint_wrapper(block, policy_fn=SWAP_ADDMM),
}
each_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def _disk(path: Path) -> SwapConfig:
    return SwapConfig(
        min_bytes=0, tail_bytes=0, window_bytes=4096, prefetch_bytes=4096, tiers=("disk",), disk_path=str(path)
    )


@each_wrap
def test_the_graph_breaks_and_the_rest_is_compiled(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    eager = stack()
    wanted = step(eager, eager.parameters())
    counting = CountingBackend("aot_eager")
    model = stack(wrap)
    compiled = torch.compile(model, backend=counting)
    with hp.configure(_disk(tmp_path)):
        for _ in range(2):
            assert_same(step(compiled, model.parameters()), wanted)
    assert counting.compiled >= 2  # what stands before the blocks and what stands after them
    assert (hp.stats().swapped_out_bytes > 0) == (wrap is not hp.checkpoint_wrapper)


@each_wrap
def test_fullgraph_says_what_to_do(wrap: Callable[[Any], Any]) -> None:
    compiled = torch.compile(stack(wrap), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Compile the module inside the wrapper instead"):
        compiled(torch.randn(24, 16, requires_grad=True))


@pytest.mark.parametrize("door", [hp.swap, hp.checkpoint], ids=["swap", "checkpoint"])
def test_the_functions_inside_a_compiled_function(door: Callable[..., Any], tmp_path: Path) -> None:
    eager = stack()
    wanted = step(eager, eager.parameters())
    model = stack()

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model.before(x)
        for block in model.blocks:
            x = door(block, x)
        return model.after(x)

    counting = CountingBackend("aot_eager")
    with hp.configure(_disk(tmp_path)):
        assert_same(step(torch.compile(forward, backend=counting), model.parameters()), wanted)
    assert counting.compiled >= 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Compile the module inside the wrapper instead"):
        torch.compile(forward, backend="aot_eager", fullgraph=True)(torch.randn(24, 16, requires_grad=True))


def test_hooks_around_a_compiled_model(tmp_path: Path) -> None:
    plain = stack()
    wanted = step(torch.compile(plain, backend="aot_eager", fullgraph=True), plain.parameters())
    model = stack()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def under_hooks(x: torch.Tensor) -> torch.Tensor:
        with AsyncSaveOnCpu():
            return compiled(x)

    with hp.configure(_disk(tmp_path)):
        assert_same(step(under_hooks, model.parameters()), wanted)
    assert hp.stats().swapped_out_bytes > 0


def test_marked_tensors_in_a_compiled_model(tmp_path: Path) -> None:
    """``swap_tensor_wrapper`` inside a compiled forward: right values, with a graph break or without."""
    eager = stack()
    wanted = step(eager, eager.parameters())
    model = stack()

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = hp.swap_tensor_wrapper(model.before(x), tag="entry")
        for block in model.blocks:
            x = block(x)
        return model.after(x)

    with hp.configure(_disk(tmp_path)):
        assert_same(step(torch.compile(forward, backend="aot_eager"), model.parameters()), wanted)
