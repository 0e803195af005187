"""A compiled block inside a region of ours: the region is put into the block's graph, and hooks around it swap.

The simulated accelerator watches every op through a dispatch mode, and torch runs compiled code eagerly under such a
mode. So these tests swap CPU tensors to the disk tier, which needs no mode: the compiled code really runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy, SwapConfig
from hyper_parallel.backends.torch.planner.plan_regions import PlannedRegion
from hyper_parallel.backends.torch.wrappers import CheckpointWrapper
from hyper_parallel.config import current_config
from hyper_parallel.core.activation_checkpoint.policy import ByOpName
from hyper_parallel.fates import Fate
from hyper_parallel.planner.plan import OpDecision, RegionPlan
from hyper_parallel.platform.torch import compat

from .parts import BLOCKS, Block, CountingBackend, GraphsBackend, assert_same, graph_breaks, graphs_traced, stack, step

INPUT_BYTES = 24 * 16 * 4
UP_BYTES = 4 * INPUT_BYTES  # the output of the first addmm, which backward needs; that of the second it does not
SWAP_ADDMM = ByOpName({"addmm": CheckpointPolicy.MUST_SWAP})


@pytest.fixture(autouse=True)
def swap_to_disk(tmp_path: Path) -> Iterator[None]:
    config = SwapConfig(
        min_bytes=0, tail_bytes=0, window_bytes=4096, prefetch_bytes=4096, tiers=("disk",), disk_path=str(tmp_path)
    )
    with hp.configure(config):
        yield


def _plain(dropout: float = 0.0) -> list[torch.Tensor]:
    model = stack(dropout=dropout)
    return step(model, model.parameters())


def compiled_module(block: nn.Module, wrap: Callable[..., Any], backend: Any) -> Any:
    return wrap(torch.compile(block, backend=backend, fullgraph=True))


def compiled_in_place(block: nn.Module, wrap: Callable[..., Any], backend: Any) -> Any:
    block.compile(backend=backend, fullgraph=True)
    return wrap(block)


def compiled_after_wrapping(block: nn.Module, wrap: Callable[..., Any], backend: Any) -> Any:
    wrapped = wrap(block)
    wrapped.compile(backend=backend, fullgraph=True)
    return wrapped


def compiled_forward(block: nn.Module, wrap: Callable[..., Any], backend: Any) -> Any:
    block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    return wrap(block)


WAYS = [compiled_module, compiled_in_place, compiled_after_wrapping, compiled_forward]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_swapped_as_a_whole(backend: str, dropout: float) -> None:
    plain = stack(lambda block: torch.compile(block, backend=backend), dropout)
    wanted = step(plain, plain.parameters())
    counting = CountingBackend(backend)
    model = stack(lambda block: hp.swap_wrapper(torch.compile(block, backend=counting)), dropout)
    for _ in range(2):
        assert_same(step(model, model.parameters()), wanted)
    assert counting.runs == 2 * BLOCKS
    assert hp.stats().swapped_out_bytes > 2 * BLOCKS * INPUT_BYTES


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize(
    ("settings", "again", "swapped"),
    [
        ({}, {"addmm": 1, "native_layer_norm": 1}, 0),
        ({"swap_inputs": True}, {"addmm": 1, "native_layer_norm": 1}, INPUT_BYTES),
        ({"policy_fn": ["addmm"]}, {"addmm": 0, "native_layer_norm": 1}, 0),
        ({"policy_fn": SWAP_ADDMM}, {"addmm": 0, "native_layer_norm": 1}, UP_BYTES),
        ({"policy_fn": SWAP_ADDMM, "swap_inputs": True}, {"addmm": 0, "native_layer_norm": 1}, INPUT_BYTES + UP_BYTES),
    ],
    ids=["all", "inputs", "list", "swap", "swap and inputs"],
)
def test_the_region_is_in_the_graph(compiled: Any, settings: Any, again: dict[str, int], swapped: int) -> None:
    """Three blocks share one graph; what it runs again and what is swapped around it are known to the byte."""
    wanted = _plain()
    graphs = GraphsBackend()
    model = stack(lambda block: compiled(block, lambda b: hp.checkpoint_wrapper(b, **settings), graphs))
    for number in (1, 2):
        assert_same(step(model, model.parameters()), wanted)
        assert hp.stats().swapped_out_bytes == number * BLOCKS * swapped
    assert graphs_traced() == 1
    assert not graph_breaks()
    assert graphs.recomputed() == again
    assert sorted(name.replace("_orig_mod.", "") for name in model.state_dict()) == sorted(stack().state_dict())


def test_dropout_in_the_graph() -> None:
    wanted = _plain(dropout=0.2)
    for settings in ({}, {"policy_fn": SWAP_ADDMM, "swap_inputs": True}):
        model = stack(
            lambda block, s=settings: hp.checkpoint_wrapper(torch.compile(block, backend="aot_eager"), **s), 0.2
        )
        assert_same(step(model, model.parameters()), wanted)
    assert hp.stats().swapped_out_bytes > BLOCKS * UP_BYTES


def test_swapping_changes_nothing_under_inductor() -> None:
    """Bitwise the same graph without swapping, with dropout; also for a second shape, which is traced anew."""
    torch.manual_seed(0)
    block = Block(0.2)
    results = []
    for policy in (ByOpName({"addmm": CheckpointPolicy.MUST_SAVE}), SWAP_ADDMM):
        torch.compiler.reset()
        wrapped = hp.checkpoint_wrapper(torch.compile(block, dynamic=True), policy_fn=policy)
        results.append(step(lambda x, f=wrapped: f(x).square().sum(), block.parameters()))
        results[-1] += step(lambda x, f=wrapped: f(x[:9]).square().sum(), block.parameters())
    assert_same(results[1], results[0])
    assert hp.stats().swapped_out_bytes == UP_BYTES + UP_BYTES // 24 * 9


def test_other_shapes_keep_the_fates() -> None:
    graphs = GraphsBackend()
    block = Block()
    wrapped = hp.checkpoint_wrapper(torch.compile(block, backend=graphs), policy_fn=SWAP_ADDMM)
    for rows in (24, 8, 40):
        before = hp.stats().swapped_out_bytes
        x = torch.ones(rows, 16, requires_grad=True)
        got = torch.autograd.grad(wrapped(x).sum(), [x, *block.parameters()])
        assert_same(list(got), list(torch.autograd.grad(block(x).sum(), [x, *block.parameters()])))
        assert hp.stats().swapped_out_bytes - before == UP_BYTES // 24 * rows
    assert graphs_traced() == 2  # the second is made for any number of rows


def test_many_modes_at_least_trace() -> None:
    torch.manual_seed(0)
    block = Block()
    wrapped = hp.checkpoint_wrapper(
        torch.compile(block, mode="max-autotune-no-cudagraphs", fullgraph=True), policy_fn=SWAP_ADDMM
    )
    with torch._inductor.config.patch(max_autotune_gemm=False):  # timing kernels takes minutes and shows nothing here
        got = step(lambda x: wrapped(x).square().sum(), block.parameters())
    wanted = step(lambda x: block(x).square().sum(), block.parameters())
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert hp.stats().swapped_out_bytes == UP_BYTES
    assert not graph_breaks()


def test_torchs_own_enum_is_refused_around_a_compiled_block() -> None:
    wrapped = hp.checkpoint_wrapper(
        torch.compile(Block(), backend="aot_eager"),
        policy_fn=lambda ctx, op, *args, **kwargs: TorchPolicy.MUST_SAVE,
    )
    with pytest.raises(hp.HyperParallelError, match="torch's own CheckpointPolicy is another enum"):
        wrapped(torch.randn(24, 16, requires_grad=True))
    assert not compat._WATCHED  # torch's partitioner is as it was


def test_a_failing_call_leaves_nothing_behind() -> None:
    wrapped = hp.checkpoint_wrapper(torch.compile(Block(), backend="aot_eager"), policy_fn=SWAP_ADDMM)
    with pytest.raises(Exception, match=r"shape|size"):
        wrapped(torch.randn(24, 15, requires_grad=True))
    assert not compat._WATCHED
    x = torch.ones(24, 16, requires_grad=True)
    wrapped(x).sum().backward()
    assert hp.stats().swapped_out_bytes == UP_BYTES


def test_where_dynamo_runs_nothing_the_region_is_an_eager_one() -> None:
    wanted = _plain(dropout=0.2)
    model = stack(
        lambda block: hp.checkpoint_wrapper(torch.compile(block, backend="aot_eager"), policy_fn=["addmm"]), 0.2
    )
    with torch.compiler.set_stance("force_eager"):
        assert_same(step(model, model.parameters()), wanted)
    assert hp.stats().saved_bytes > 0  # counted by the eager region
    with torch.no_grad():
        model(torch.ones(24, 16))


def test_hooks_around_a_region_get_what_it_does_not_swap() -> None:
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.untyped_storage().nbytes())
        return tensor.clone()

    wanted = _plain()
    model = stack(lambda block: hp.checkpoint_wrapper(torch.compile(block, backend="aot_eager"), policy_fn=SWAP_ADDMM))

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model.before(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for block in model.blocks:
                x = block(x)
        return model.after(x)

    assert_same(step(forward, model.parameters()), wanted)
    assert seen.count(INPUT_BYTES) >= BLOCKS
    assert hp.stats().swapped_out_bytes == BLOCKS * UP_BYTES


def test_inside_a_checkpoint_of_torch() -> None:
    wanted = _plain(dropout=0.2)
    model = stack(
        lambda block: hp.checkpoint_wrapper(torch.compile(block, backend="aot_eager"), policy_fn=SWAP_ADDMM), 0.2
    )

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model.before(x)
        for block in model.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return model.after(x)

    assert_same(step(forward, model.parameters()), wanted)


def test_a_value_changed_in_place_after_the_block_is_found() -> None:
    wrapped = hp.checkpoint_wrapper(torch.compile(Block(), backend="aot_eager"), swap_inputs=True)
    x = torch.randn(24, 16, requires_grad=True) * 2
    out = wrapped(x)
    x.add_(1)
    with pytest.raises(hp.HyperParallelError, match="changed in place"):
        out.sum().backward()


def test_a_retained_graph_of_a_compiled_block() -> None:
    """A compiled backward may reuse the buffers it was given; the second backward must find them again."""

    def twice(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        loss = model(torch.randn(24, 16, requires_grad=True))
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    wanted = twice(stack(lambda block: torch.compile(block, backend="aot_eager")))
    for wrap in (hp.swap_wrapper, lambda block: hp.checkpoint_wrapper(block, policy_fn=SWAP_ADDMM)):
        before = hp.stats().swapped_out_bytes
        assert_same(twice(stack(lambda block, w=wrap: w(torch.compile(block, backend="aot_eager")))), wanted)
        assert hp.stats().swapped_out_bytes > before


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_swaps_out_of_cuda_graphs_are_refused_by_name(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no CUDA device here, so a model is said to be on one. On a CPU these modes make no CUDA graphs."""
    monkeypatch.setattr(compat, "_is_on_cuda", lambda module: True)
    block = torch.compile(Block(), mode=mode)
    x = torch.ones(24, 16, requires_grad=True)
    for wrapped in (
        hp.swap_wrapper(block),
        hp.checkpoint_wrapper(block, swap_inputs=True),
        hp.checkpoint_wrapper(block, policy_fn=SWAP_ADDMM),
    ):
        with pytest.raises(hp.HyperParallelError, match=r"Block: cannot swap .* it runs as a CUDA graph"):
            wrapped(x)
    assert not compat.runs_cuda_graphs(torch.compile(Block(), mode="max-autotune-no-cudagraphs"))
    assert not compat.runs_cuda_graphs(torch.compile(Block(), backend="aot_eager"))
    assert not compat.runs_cuda_graphs(Block())


def test_hooks_on_a_compiled_module_run_around_the_region() -> None:
    """``fully_shard(torch.compile(block))`` lives from such hooks."""
    seen: list[str] = []
    plain = Block()
    block = torch.compile(plain, backend="aot_eager", fullgraph=True)
    block.register_forward_pre_hook(lambda module, args: seen.append("before") or (2 * args[0],))
    block.register_forward_hook(lambda module, args, output: seen.append("after") or 3 * output)
    wrapped = hp.checkpoint_wrapper(block, policy_fn=SWAP_ADDMM)
    x = torch.ones(24, 16, requires_grad=True)
    output = wrapped(x)
    assert seen == ["before", "after"]
    got = torch.autograd.grad(output.sum(), [x, *plain.parameters()])
    assert_same(list(got), list(torch.autograd.grad(3 * plain(2 * x).sum(), [x, *plain.parameters()])))
    assert hp.stats().swapped_out_bytes == UP_BYTES
    assert block.forward is block.__dict__["forward"]


@pytest.mark.parametrize("fate", [Fate.SAVE, Fate.SWAP])
def test_a_plans_region_under_inductor_is_torchs_own_checkpoint_in_the_graph(fate: Fate) -> None:
    torch.manual_seed(0)
    block = Block()

    def torchs_own(x: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(torch_contexts, [torch.ops.aten.addmm.default])
        return torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    ops = tuple(
        OpDecision(name="addmm", overload="default", module="", occurrence=at, fate=fate, reason="") for at in range(2)
    )
    region = PlannedRegion(RegionPlan(module="", input_fate=Fate.SAVE, ops=ops), current_config())
    planned = CheckpointWrapper(torch.compile(block, fullgraph=True), region)
    compiled = torch.compile(torchs_own, fullgraph=True)
    wanted = step(lambda x: compiled(x).square().sum(), block.parameters())
    assert_same(step(lambda x: planned(x).square().sum(), block.parameters()), wanted)
    assert hp.stats().swapped_out_bytes == (UP_BYTES if fate is Fate.SWAP else 0)
