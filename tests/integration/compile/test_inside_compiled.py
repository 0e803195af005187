"""A region of ours inside a compiled function: its fates are in the traced graph, and the graph does not break."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy, SwapConfig
from hyper_parallel.backends.torch import AsyncSaveOnCpu
from hyper_parallel.core.activation_checkpoint.policy import ByOpName
from hyper_parallel.errors import CompileWarning

from .parts import BLOCKS, Block, GraphsBackend, assert_same, graph_breaks, graphs_traced, stack, step

SWAP_ADDMM = ByOpName({"addmm": CheckpointPolicy.MUST_SWAP})


def _save_addmm(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_addmm = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_addmm else CheckpointPolicy.MUST_RECOMPUTE


# What the backward graph runs again: of the two addmm of a block the first, since nobody needs the output of the second; of the
# last block both, since the work after the blocks needs its output.
ALL = {"addmm": BLOCKS + 1, "native_layer_norm": BLOCKS}
WITHOUT_ADDMM = {"addmm": 0, "native_layer_norm": BLOCKS}
RECOMPUTING = {
    "all": (hp.checkpoint_wrapper, ALL),
    "list": (lambda block: hp.checkpoint_wrapper(block, policy_fn=["addmm"]), WITHOUT_ADDMM),
    "function": (lambda block: hp.checkpoint_wrapper(block, policy_fn=_save_addmm), WITHOUT_ADDMM),
}
SWAPPING = {
    "swap": (hp.swap_wrapper, {"addmm": 0, "native_layer_norm": 0}),
    "inputs": (lambda block: hp.checkpoint_wrapper(block, swap_inputs=True), ALL),
    "policy": (lambda block: hp.checkpoint_wrapper(block, policy_fn=SWAP_ADDMM), WITHOUT_ADDMM),
}


def _disk(path: Path) -> SwapConfig:
    return SwapConfig(
        min_bytes=0, tail_bytes=0, window_bytes=4096, prefetch_bytes=4096, tiers=("disk",), disk_path=str(path)
    )


def _plain(dropout: float = 0.0) -> list[torch.Tensor]:
    model = stack(dropout=dropout)
    return step(model, model.parameters())


@pytest.mark.parametrize(("wrap", "recomputed"), RECOMPUTING.values(), ids=RECOMPUTING)
def test_a_whole_model_is_one_graph_with_the_fates_in_it(wrap: Any, recomputed: dict[str, int]) -> None:
    wanted = _plain()
    graphs = GraphsBackend()
    model = stack(wrap)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for _ in range(2):
        assert_same(step(compiled, model.parameters()), wanted)
    assert graphs_traced() == 1
    assert graphs.recomputed() == recomputed
    assert graphs.count(graphs.forward, "addmm") == 2 * BLOCKS + 2


@pytest.mark.parametrize(("wrap", "recomputed"), SWAPPING.values(), ids=SWAPPING)
def test_swaps_inside_one_graph_are_saves_with_one_warning(
    wrap: Any, recomputed: dict[str, int], tmp_path: Path
) -> None:
    wanted = _plain()
    graphs = GraphsBackend()
    model = stack(wrap)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with hp.configure(_disk(tmp_path)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_same(step(compiled, model.parameters()), wanted)
    said = [str(one.message) for one in caught if issubclass(one.category, CompileWarning)]
    assert len(said) == 1
    assert "stays on the device" in said[0]
    assert "checkpoint_wrapper(torch.compile(block), ...)" in said[0]
    assert graphs.recomputed() == recomputed
    assert hp.stats().swapped_out_bytes == 0


def test_a_policy_is_asked_once_for_each_op_and_not_when_the_code_runs() -> None:
    asked: list[str] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append(op._schema.name.partition("::")[2])
        return False

    model = stack(lambda block: hp.checkpoint_wrapper(block, policy_fn=policy))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        step(compiled, model.parameters())
    assert asked == ["native_layer_norm", "addmm", "gelu", "addmm", "clone", "add"] * BLOCKS  # and no view


def test_equal_policies_share_compiled_code_and_others_do_not() -> None:
    """Dynamo compares functions by their code alone; two policies of one ``def`` must still not be mixed up."""

    def saving(name: str) -> Callable[..., bool]:
        return lambda ctx, op, *args, **kwargs: op._schema.name == f"aten::{name}"

    graphs = GraphsBackend()
    policies = iter([["addmm"], ["addmm"], saving("addmm"), saving("gelu")])
    blocks = [
        torch.compile(hp.checkpoint_wrapper(Block(), policy_fn=policy), backend=graphs, fullgraph=True)
        for policy in policies
    ]
    for block in blocks:
        block(torch.randn(24, 16, requires_grad=True)).sum().backward()
    assert [graphs.count([graph], "addmm") for graph in graphs.backward] == [0, 0, 1]


@pytest.mark.parametrize(("saved", "dropout"), [((), 0.2), (("addmm",), 0.0)], ids=["all", "addmm saved"])
def test_under_inductor_it_is_torchs_own_checkpoint_in_the_graph(saved: tuple[str, ...], dropout: float) -> None:
    torch.manual_seed(0)
    block = Block(dropout)
    ops = [torch.ops.aten.addmm.default] if saved else []
    contexts = functools.partial(torch_contexts, ops)
    wrapped = hp.checkpoint_wrapper(block, policy_fn=list(saved) or None)

    def torchs_own(x: torch.Tensor) -> torch.Tensor:
        return torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts).square().sum()

    def ours(x: torch.Tensor) -> torch.Tensor:
        return wrapped(x).square().sum()

    wanted = step(torch.compile(torchs_own, fullgraph=True), block.parameters())
    assert_same(step(torch.compile(ours, fullgraph=True), block.parameters()), wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dropout_is_drawn_again_as_it_was(backend: str) -> None:
    """Torch's checkpoint in a graph keeps no random state under ``backend="eager"``, and would draw another mask."""
    wanted = _plain(dropout=0.3)
    model = stack(lambda block: hp.checkpoint_wrapper(block, policy_fn=["addmm"]), dropout=0.3)
    assert_same(step(torch.compile(model, backend=backend, fullgraph=True), model.parameters()), wanted)


def test_autocast_inside() -> None:
    def loss(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x).float()

        return forward

    plain = stack()
    wanted = step(torch.compile(loss(plain), backend="aot_eager", fullgraph=True), plain.parameters())
    model = stack(lambda block: hp.checkpoint_wrapper(block, policy_fn=["addmm"]))
    assert_same(step(torch.compile(loss(model), backend="aot_eager", fullgraph=True), model.parameters()), wanted)


def test_other_shapes_keep_the_fates() -> None:
    graphs = GraphsBackend()
    model = stack(lambda block: hp.checkpoint_wrapper(block, policy_fn=["addmm"]))
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for rows in (24, 8, 40):
        for function in (compiled, model):
            model.zero_grad()
            x = torch.ones(rows, 16, requires_grad=True)
            function(x).backward()
            if function is compiled:
                wanted = [x.grad, *(parameter.grad for parameter in model.parameters())]
        assert_same([x.grad, *(parameter.grad for parameter in model.parameters())], wanted)
    assert 2 <= graphs_traced() <= 3
    for graph in graphs.backward:
        assert graphs.count([graph], "addmm") == 0
        assert graphs.count([graph], "native_layer_norm") == BLOCKS


def test_eager_use_afterwards_names_copies_and_no_grad() -> None:
    wanted = _plain()
    model = stack(lambda block: hp.checkpoint_wrapper(block, policy_fn=["addmm"]))
    assert list(model.state_dict()) == list(stack().state_dict())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(step(compiled, model.parameters()), wanted)
    before = hp.stats()
    assert_same(step(model, model.parameters()), wanted)
    assert hp.stats().saved_bytes > before.saved_bytes == 0  # the eager regions count, a graph does not
    with torch.no_grad():
        assert torch.equal(compiled(torch.ones(24, 16)), stack()(torch.ones(24, 16)))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.blocks[0]._in_graph.region is model.blocks[0]._in_graph.region
        assert_same(step(torch.compile(other, backend="aot_eager", fullgraph=True), other.parameters()), wanted)


def test_keywords_tuples_and_settings_names_reach_the_module() -> None:
    class Takes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, x: Any, pair: Any, *, debug: Any = None, context_fn: int = 1) -> Any:
            return {"out": (self.linear(x) * pair[0] + pair[1]) * debug * context_fn, "pair": pair}

    torch.manual_seed(0)
    module = Takes()
    x, one, two, debug = (torch.randn(4, 16, requires_grad=True) for _ in range(4))

    def gradients(function: Any) -> list[torch.Tensor]:
        out = function(x, (one, two), debug=debug, context_fn=3)
        return list(torch.autograd.grad(out["out"].sum(), [x, one, two, debug, *module.parameters()]))

    wanted = gradients(module)
    assert_same(gradients(torch.compile(hp.checkpoint_wrapper(module), backend="aot_eager", fullgraph=True)), wanted)


def test_torchs_checkpoint_through_the_platform_is_traced_too() -> None:
    from hyper_parallel.platform.platform import get_torch_platform

    wanted = _plain()
    graphs = GraphsBackend()
    model = stack(get_torch_platform().ckpt_wrapper)
    assert_same(step(torch.compile(model, backend=graphs, fullgraph=True), model.parameters()), wanted)
    assert graphs.recomputed() == ALL


def test_a_break_inside_a_block_runs_the_region_op_by_op() -> None:
    """Dynamo cannot trace the region then. It runs as an uncompiled one, with the same fates and the same numbers."""

    class Breaking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    torch.manual_seed(0)
    block = Breaking(0.3)
    wrapped = hp.checkpoint_wrapper(block, policy_fn=["addmm"])
    results = []
    for function in (block, torch.compile(wrapped, backend="aot_eager")):
        results.append(step(lambda x, f=function: f(x).square().sum(), block.parameters()))
    assert_same(results[1], results[0])
    assert graph_breaks()


@pytest.mark.parametrize("function", [hp.swap, hp.checkpoint], ids=["swap", "checkpoint"])
def test_the_functions_inside_a_compiled_function(function: Callable[..., Any], tmp_path: Path) -> None:
    """``hp.checkpoint`` and ``hp.swap`` themselves break the graph, and ``fullgraph=True`` says what to use."""
    wanted = _plain()
    model = stack()

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model.before(x)
        for block in model.blocks:
            x = function(block, x)
        return model.after(x)

    with hp.configure(_disk(tmp_path)):
        assert_same(step(torch.compile(forward, backend="aot_eager"), model.parameters()), wanted)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Use checkpoint_wrapper\(layer\) instead"):
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
    wanted = _plain()
    model = stack()

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = hp.swap_tensor_wrapper(model.before(x), tag="entry")
        for block in model.blocks:
            x = block(x)
        return model.after(x)

    with hp.configure(_disk(tmp_path)):
        assert_same(step(torch.compile(forward, backend="aot_eager"), model.parameters()), wanted)
