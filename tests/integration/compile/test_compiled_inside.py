"""A compiled block inside a region of ours.

The simulated accelerator watches every op through a dispatch mode, and torch runs compiled code eagerly under such a
mode. So these tests swap CPU tensors to the disk tier, which needs no mode: the compiled code really runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy, SwapConfig
from hyper_parallel.core.activation_checkpoint.policy import ByOpName

from .parts import BLOCKS, CountingBackend, assert_same, stack, step

BACKENDS = ["aot_eager", "inductor"]
INPUT_BYTES = 24 * 16 * 4


@pytest.fixture(autouse=True)
def swap_to_disk(tmp_path: Path) -> Iterator[None]:
    config = SwapConfig(
        min_bytes=0, tail_bytes=0, window_bytes=4096, prefetch_bytes=4096, tiers=("disk",), disk_path=str(tmp_path)
    )
    with hp.configure(config):
        yield


def _compiled_with(counting: CountingBackend, wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda block: wrap(torch.compile(block, backend=counting))


def _plain(backend: str, dropout: float = 0.0) -> list[torch.Tensor]:
    model = stack(lambda block: torch.compile(block, backend=backend), dropout)
    return step(model, model.parameters())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_swapped(backend: str, dropout: float) -> None:
    wanted = _plain(backend, dropout)
    counting = CountingBackend(backend)
    model = stack(_compiled_with(counting, hp.swap_wrapper), dropout)
    for _ in range(2):
        assert_same(step(model, model.parameters()), wanted)
    assert counting.runs == 2 * BLOCKS
    assert hp.stats().swapped_out_bytes > 2 * BLOCKS * INPUT_BYTES


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("swap_inputs", [False, True])
def test_checkpointed(backend: str, dropout: float, swap_inputs: bool) -> None:
    wanted = _plain(backend, dropout)
    counting = CountingBackend(backend)
    wrap = _compiled_with(counting, lambda block: hp.checkpoint_wrapper(block, swap_inputs=swap_inputs))
    model = stack(wrap, dropout)
    assert_same(step(model, model.parameters()), wanted)
    assert counting.runs == 2 * BLOCKS  # once in forward, once in the replay
    assert hp.stats().swapped_out_bytes == (BLOCKS * INPUT_BYTES if swap_inputs else 0)


def _torch_selective(block: Any) -> Any:
    def run(x: torch.Tensor) -> torch.Tensor:
        ops = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        return torch_checkpoint(block, x, use_reentrant=False, context_fn=lambda: torch_contexts(ops))

    module = torch.nn.Module()
    module.block = block
    module.forward = run
    return module


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP])
def test_under_a_selective_policy(backend: str, answer: CheckpointPolicy) -> None:
    """The same as torch's own selective checkpoint around the same compiled block, whatever it does with the block."""
    torchs_own, ours = CountingBackend(backend), CountingBackend(backend)
    oracle = stack(_compiled_with(torchs_own, _torch_selective))
    wanted = step(oracle, oracle.parameters())
    policy = ByOpName({"mm": answer, "addmm": answer})
    model = stack(_compiled_with(ours, lambda block: hp.checkpoint_wrapper(block, policy_fn=policy)))
    assert_same(step(model, model.parameters()), wanted)
    assert ours.runs == torchs_own.runs
    stats = hp.stats()
    if backend == "inductor":  # its code calls matmuls that write into an argument: always replayed, and counted
        assert stats.replayed_ops["in_place"] > 0
        assert stats.swapped_out_bytes == stats.saved_bytes == 0
    else:
        assert (stats.swapped_out_bytes > 0) == (answer is CheckpointPolicy.MUST_SWAP)
        assert (stats.saved_bytes > 0) == (answer is CheckpointPolicy.MUST_SAVE)


def test_torchs_own_enum_is_refused_around_a_compiled_block() -> None:
    wrap = _compiled_with(
        CountingBackend("aot_eager"),
        lambda block: hp.checkpoint_wrapper(block, policy_fn=lambda ctx, op, *args, **kwargs: TorchPolicy.MUST_SAVE),
    )
    with pytest.raises(hp.HyperParallelError, match="torch's own CheckpointPolicy is another enum"):
        stack(wrap)(torch.randn(24, 16))


def test_a_retained_graph_of_a_compiled_block() -> None:
    """A compiled backward may reuse the buffers it was given; the second backward must find them again."""

    def twice(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        loss = model(torch.randn(24, 16, requires_grad=True))
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    wanted = twice(stack(lambda block: torch.compile(block, backend="aot_eager")))
    got = twice(stack(lambda block: hp.swap_wrapper(torch.compile(block, backend="aot_eager"))))
    assert_same(got, wanted)
    assert hp.stats().swapped_out_bytes > 0
