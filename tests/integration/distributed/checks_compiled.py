"""DistributedDataParallel and FSDP2 around blocks that are compiled one by one."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hyper_parallel as hp
from hyper_parallel.backends.torch.compiled_calls import COMPILATIONS
from hyper_parallel.testing import simulated_accelerator

from .launch import World
from .parts import SWAP_MATMULS, Wrap, assert_same, batch, gradients, loss_of, stack, swapping, wrap_blocks

COMPILED_WRAPS: dict[str, Wrap] = {
    "checkpoint_swap_inputs": lambda block: hp.checkpoint_wrapper(block, swap_inputs=True),
    "selective": lambda block: hp.checkpoint_wrapper(block, policy_fn=SWAP_MATMULS),
}


def _compiled(block: Any) -> Any:
    # What torch's own compiler warns of while it traces is not ours.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    return torch.compile(block, backend="aot_eager", fullgraph=True)


def _steps(parallel: Any, model: Any, world: World) -> dict[str, torch.Tensor]:
    torch.manual_seed(10 + world.rank)
    for _ in range(2):
        loss_of(parallel(batch(world.rank))).backward()
    return gradients(model)


def check_ddp_around_compiled_blocks(world: World) -> None:
    def step(wrap: Wrap | None) -> dict[str, torch.Tensor]:
        model = stack()
        wrap_blocks(model, _compiled)
        if wrap is not None:
            wrap_blocks(model, wrap)
        return _steps(DistributedDataParallel(model), model, world)

    wanted = step(None)
    for name, wrap in COMPILED_WRAPS.items():
        before = COMPILATIONS.count
        torch.compiler.reset()
        with swapping(name):
            got = step(wrap)
        assert_same(got, wanted, name)
        assert COMPILATIONS.count > before, name
    assert not counters["graph_break"]


def _sharded(wrap: Wrap | None, *, is_wrapped_first: bool) -> Any:
    """Blocks are compiled, then sharded, as others do it; wrapped in between or last."""
    model = stack()
    mesh = init_device_mesh("cpu", (2,))
    wrap_blocks(model, _compiled)
    if wrap is not None and is_wrapped_first:
        wrap_blocks(model, wrap)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if wrap is not None and not is_wrapped_first:
        wrap_blocks(model, wrap)
    return model


def check_fsdp_around_compiled_blocks(world: World) -> None:
    model = _sharded(None, is_wrapped_first=True)
    wanted = _steps(model, model, world)
    for is_wrapped_first in (True, False):
        for name, wrap in COMPILED_WRAPS.items():
            before = COMPILATIONS.count
            torch.compiler.reset()
            model = _sharded(wrap, is_wrapped_first=is_wrapped_first)
            with swapping(name):
                got = _steps(model, model, world)
            assert_same(got, wanted, f"{name}, wrapped first: {is_wrapped_first}")
            assert COMPILATIONS.count > before, name
    assert not counters["graph_break"]


def check_fsdp_and_a_plan_on_compiled_blocks(world: World) -> None:
    model = _sharded(None, is_wrapped_first=True)
    wanted = _steps(model, model, world)
    model = _sharded(None, is_wrapped_first=True)

    def step() -> None:
        loss_of(model(batch(world.rank))).backward()

    with simulated_accelerator(), hp.configure(min_bytes=0):
        profile = hp.profile_memory(model, step, steps=1)
        assert all(kind.graph is not None for kind in profile.kinds)
        budget = profile.base.total + 7 * (profile.measured.peak_bytes - profile.base.total) // 10
        plan = hp.plan_memory(profile, budget, effort=0.05)
        assert not plan.does_nothing
        with hp.apply_plan(model, plan):
            got = _steps(model, model, world)
    assert_same(got, wanted, "a plan")
