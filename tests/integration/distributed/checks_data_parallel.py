"""DistributedDataParallel and FSDP2."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from .launch import World
from .parts import WRAPS, Wrap, assert_same, batch, gradients, local, loss_of, stack, swapping, wrap_blocks


def _ddp_step(wrap: Wrap | None, world: World, **settings: Any) -> dict[str, torch.Tensor]:
    model = stack()
    if wrap is not None:
        wrap_blocks(model, wrap)
    parallel = DistributedDataParallel(model, **settings)
    torch.manual_seed(10 + world.rank)
    for _ in range(2):  # DDP lays its buckets out anew after the first step
        loss_of(parallel(batch(world.rank))).backward()
    return gradients(model)


def check_ddp(world: World) -> None:
    wanted = _ddp_step(None, world, bucket_cap_mb=0.001)
    for name, wrap in WRAPS.items():
        with swapping(name):
            got = _ddp_step(wrap, world, bucket_cap_mb=0.001)
        assert_same(got, wanted, name)


def check_ddp_with_unused_layer(world: World) -> None:
    def step(wrap: Wrap | None) -> dict[str, torch.Tensor]:
        model = stack()
        if wrap is not None:
            wrap_blocks(model, wrap)
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        torch.manual_seed(10 + world.rank)
        loss_of(parallel(batch(world.rank), skipped=1)).backward()
        return gradients(model)

    wanted = step(None)
    for name, wrap in WRAPS.items():
        with swapping(name):
            got = step(wrap)
        assert_same(got, wanted, name)


def check_ddp_accumulation(world: World) -> None:
    def step(wrap: Wrap | None) -> dict[str, torch.Tensor]:
        model = stack()
        if wrap is not None:
            wrap_blocks(model, wrap)
        parallel = DistributedDataParallel(model)
        torch.manual_seed(10 + world.rank)
        for part in range(3):
            with parallel.no_sync() if part < 2 else contextlib.nullcontext():
                loss_of(parallel(batch(world.rank, part))).backward()
        return gradients(model)

    wanted = step(None)
    for name, wrap in WRAPS.items():
        with swapping(name):
            got = step(wrap)
        assert_same(got, wanted, name)


def check_ddp_wraps_a_swapped_model(world: World) -> None:
    """The wrapper may also stand around the whole model, or around DDP itself."""
    wanted = _ddp_step(None, world)
    for where in ("inside", "outside"):
        with swapping(where):
            model = stack()
            if where == "inside":
                parallel: Any = DistributedDataParallel(WRAPS["swap"](model))
            else:
                parallel = WRAPS["swap"](DistributedDataParallel(model))
            torch.manual_seed(10 + world.rank)
            for _ in range(2):
                loss_of(parallel(batch(world.rank))).backward()
            got = gradients(model)
        assert_same(got, wanted, where)


Moment = Literal["before", "between", "after"]  # wrapped before the blocks are sharded, before the root is, or last


def _sharded(wrap: Wrap | None, wrapped: Moment, **settings: Any) -> Any:
    model = stack()
    mesh = init_device_mesh("cpu", (2,))
    wrap = wrap if wrap is not None else lambda block: block
    if wrapped == "before":
        wrap_blocks(model, wrap)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    if wrapped == "between":
        wrap_blocks(model, wrap)
    fully_shard(model, mesh=mesh, **settings)
    if wrapped == "after":
        wrap_blocks(model, wrap)
    return model


def _train(model: Any, world: World) -> dict[str, torch.Tensor]:
    """Two optimizer steps, then the gradients of a third and the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(10 + world.rank)
    for part in range(2):
        loss_of(model(batch(world.rank, part))).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model(batch(world.rank, 2))).backward()
    weights = {f"weight {name}": local(parameter) for name, parameter in model.named_parameters()}
    return weights | gradients(model)


def _check_fsdp(world: World, wrapped: Moment, **settings: Any) -> None:
    wanted = _train(_sharded(None, wrapped, **settings), world)
    for name, wrap in WRAPS.items():
        model = _sharded(wrap, wrapped, **settings)
        assert list(model.state_dict()) == [key.removeprefix("weight ") for key in wanted if key.startswith("weight ")]
        with swapping(name):
            got = _train(model, world)
        assert_same(got, wanted, name)


def check_fsdp_wrapped_before(world: World) -> None:
    _check_fsdp(world, "before")


def check_fsdp_wrapped_between(world: World) -> None:
    _check_fsdp(world, "between")


def check_fsdp_wrapped_after(world: World) -> None:
    _check_fsdp(world, "after")


def check_fsdp_kept_unsharded_after_forward(world: World) -> None:
    _check_fsdp(world, "before", reshard_after_forward=False)


def check_fsdp_mixed_precision(world: World) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _check_fsdp(world, "before", mp_policy=policy)


def check_fsdp_two_forwards_before_two_backwards(world: World) -> None:
    def step(wrap: Wrap | None, is_reversed: bool) -> dict[str, torch.Tensor]:
        model = _sharded(wrap, "before")
        torch.manual_seed(10 + world.rank)
        losses = [loss_of(model(batch(world.rank, part))) for part in range(2)]
        for loss in reversed(losses) if is_reversed else losses:
            loss.backward()
        return gradients(model)

    for is_reversed in (False, True):
        wanted = step(None, is_reversed)
        for name, wrap in WRAPS.items():
            with swapping(name):
                got = step(wrap, is_reversed)
            assert_same(got, wanted, f"{name}, reversed {is_reversed}")
