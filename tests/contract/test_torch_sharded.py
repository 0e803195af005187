"""Sharded, replicated and partial tensors of torch, in real worlds of two and four ranks over gloo."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from .marks import covers, on_ranks
from .worker import World


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.LayerNorm(7))


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 24).view(4, 6)


def reference_step(max_norm: float, norm_type: float) -> tuple[float, dict[str, torch.Tensor]]:
    """The whole batch on one process: the norm, and every clipped gradient."""
    model = build()
    model(inputs()).square().mean().backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return float(total), {name: parameter.grad for name, parameter in model.named_parameters()}


def mesh_of(world: World):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world.size,))


@covers("clip_grad_norm_")
@on_ranks(2, 4)
def test_a_sharded_model_has_the_norm_of_the_whole(world: World):
    if world.adapter.name != "torch":
        return
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        for foreach in (None, False):
            expected, gradients = reference_step(0.05, norm_type)
            model = build()
            mesh = mesh_of(world)
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
            rows = 4 // world.size
            model(inputs()[world.rank * rows : (world.rank + 1) * rows]).square().mean().backward()
            assert any(isinstance(p.grad, DTensor) for p in model.parameters())
            total = world.platform.clip_grad_norm_(model, 0.05, norm_type, foreach=foreach)
            assert not isinstance(total, DTensor)
            assert float(total) == pytest.approx(expected, rel=1e-6)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], rtol=2e-6, atol=1e-8)


@covers("clip_grad_norm_")
@on_ranks(2)
def test_plain_sharded_replicated_and_partial_gradients_in_one_call(world: World):
    if world.adapter.name != "torch":
        return
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of(world)
    torch.manual_seed(3)
    whole = {name: torch.randn(5, 3) for name in ("plain", "sharded", "uneven", "replicated", "partial")}
    part = whole["partial"] * 0.25 if world.rank == 0 else whole["partial"] * 0.75
    grads = {
        "plain": whole["plain"].clone(),
        "sharded": distribute_tensor(whole["sharded"], mesh, [Shard(1)]),
        "uneven": distribute_tensor(whole["uneven"], mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole["replicated"].clone(), mesh, [Replicate()]),
        "partial": DTensor.from_local(part, mesh, [Partial()]),
    }
    owners = []
    for name, grad in grads.items():
        data = torch.zeros(5, 3) if name == "plain" else distribute_tensor(torch.zeros(5, 3), mesh, [Replicate()])
        if name in ("sharded", "uneven"):
            data = torch.zeros_like(grad)
        owners.append(nn.Parameter(data))
        owners[-1].grad = grad
    expected = float(torch.cat([value.flatten() for value in whole.values()]).norm())
    total = world.platform.clip_grad_norm_(owners, expected / 2)
    assert float(total) == pytest.approx(expected, rel=1e-6)
    for owner, (name, value) in zip(owners, whole.items()):
        grad = owner.grad if name == "plain" else owner.grad.full_tensor()
        torch.testing.assert_close(grad, value / 2, rtol=1e-5, atol=1e-6)
    assert grads["partial"].placements == (Partial(),)


@covers("clip_grad_norm_")
@on_ranks(2)
def test_a_rank_without_a_gradient_or_without_rows_is_no_deadlock(world: World):
    if world.adapter.name != "torch":
        return
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(world)
    lonely = nn.Parameter(distribute_tensor(torch.zeros(1, 3), mesh, [Shard(0)]))
    lonely.grad = distribute_tensor(torch.tensor([[3.0, 0.0, 4.0]]), mesh, [Shard(0)])
    for norm_type, expected in ((2.0, 5.0), (float("inf"), 4.0)):
        assert float(world.platform.clip_grad_norm_(lonely, 1e9, norm_type)) == pytest.approx(expected, rel=1e-6)
    uneven = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]))
    if world.rank == 0:
        uneven.grad = distribute_tensor(torch.full((2, 2), 2.0), mesh, [Shard(0)], src_data_rank=None)
    assert float(world.platform.clip_grad_norm_(uneven, 1e9)) == pytest.approx(8**0.5, rel=1e-6)


@covers("set_layout_into_parameter", "get_param_local_shape", "get_param_local_data", "update_parameter_by_name")
@on_ranks(2)
def test_a_parameter_gets_a_layout_once(world: World):
    if world.adapter.name != "torch":
        return
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = mesh_of(world)
    model = build()
    old, full = model[0].weight, model[0].weight.detach().clone()
    old.grad = torch.ones_like(old)
    new = world.platform.set_layout_into_parameter(old, (mesh, [Shard(0)]))
    assert isinstance(new, DTensor)
    assert isinstance(new, nn.Parameter)
    assert new.requires_grad
    assert new.grad.placements == (Shard(0),)
    rows = (3, 2)[world.rank]
    for parameter in (new, old):
        assert tuple(world.platform.get_param_local_shape(parameter)) == (rows, 6)
        assert torch.equal(world.platform.get_param_local_data(parameter), full.tensor_split([3])[world.rank])
        with pytest.raises(ValueError, match=r"shape \(5, 6\) already has \(Shard\(dim=0\),\) over .*second layout"):
            world.platform.set_layout_into_parameter(parameter, (mesh, [Replicate()]))
    assert world.platform.update_parameter_by_name(model, ("0.weight", old), new)
    assert model[0].weight is new
    with pytest.raises(ValueError, match=r"a mesh of 1 dims needs 1 placements .*; got \[\]"):
        world.platform.set_layout_into_parameter(model[2].weight, (mesh, []))
    with pytest.raises(ValueError, match=r"a parameter cannot be Partial; use Shard or Replicate"):
        world.platform.set_layout_into_parameter(model[2].weight, (mesh, [Partial()]))


@covers("load_into_param", "update_param_data")
@on_ranks(2)
def test_sharded_parameters_are_filled_from_whole_local_and_sharded_data(world: World):
    if world.adapter.name != "torch":
        return
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(world)
    whole = torch.arange(10.0).view(5, 2)
    mine = whole.tensor_split([3])[world.rank]
    sources = {
        "whole": whole,
        "local": mine,
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
        "sharded": distribute_tensor(whole, mesh, [Shard(1)]),
    }
    for device in ("cpu", "meta"):
        for name, data in sources.items():
            parameter = nn.Parameter(distribute_tensor(torch.zeros(5, 2, device=device), mesh, [Shard(0)]))
            holder = nn.Module()
            holder.weight = parameter
            world.platform.load_into_param(parameter, data)
            assert holder.weight is parameter, name
            assert parameter.placements == (Shard(0),)
            assert torch.equal(parameter.to_local(), mine), (device, name)
    plain = nn.Parameter(torch.zeros(5, 2))
    world.platform.load_into_param(plain, sources["sharded"])
    assert torch.equal(plain, whole)
    with pytest.raises(ValueError, match=r"shape \(5, 2\), this rank's part .* has \(7,\), which is neither"):
        world.platform.load_into_param(parameter, torch.ones(7))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]))
    world.platform.update_param_data(parameter, mine)
    assert parameter.to_local().data_ptr() == mine.data_ptr()
    assert torch.equal(parameter.full_tensor(), whole)
    world.platform.update_param_data(parameter, distribute_tensor(whole + 1, mesh, [Shard(0)]))
    assert torch.equal(parameter.full_tensor(), whole + 1)
    with pytest.raises(
        ValueError, match=r"update_param_data: this rank holds .* was given \(7,\); give the local part"
    ):
        world.platform.update_param_data(parameter, torch.ones(7))
    with pytest.raises(ValueError, match=r"update_param_data: the parameter is .*redistribute the data first"):
        world.platform.update_param_data(parameter, sources["sharded"])
    with pytest.raises(ValueError, match=r"a plain parameter .* cannot use a DTensor; give data.full_tensor"):
        world.platform.update_param_data(plain, sources["sharded"])


@covers("get_model_state_dict", "save_checkpoint", "load_checkpoint")
@on_ranks(2)
def test_a_sharded_model_is_saved_whole(world: World):
    if world.adapter.name != "torch":
        return
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    plain = build()
    model = copy.deepcopy(plain)
    fully_shard(model, mesh=mesh_of(world))
    state = world.platform.get_model_state_dict(model)
    assert all(isinstance(value, DTensor) for value in state.values())
    full = world.platform.get_model_state_dict(model, options={"full_state_dict": True})
    assert list(full) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(full[name], value)
    offloaded = world.platform.get_model_state_dict(model, options={"full_state_dict": True, "cpu_offload": True})
    assert list(offloaded) == (list(full) if world.rank == 0 else [])
    path = world.fresh_path("sharded-model")
    world.platform.save_checkpoint(model, path)
    world.platform.barrier()
    for name, value in world.platform.load_checkpoint(path).items():
        assert torch.equal(value, plain.state_dict()[name])


@covers("get_model_state_dict")
@on_ranks(2)
def test_data_parallel_prefixes_never_show(world: World):
    if world.adapter.name != "torch":
        return
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(build())
    assert list(world.platform.get_model_state_dict(model)) == list(build().state_dict())


@covers("micro_batch", "tensor_to_numpy")
@on_ranks(2)
def test_sharded_inputs_keep_their_layout(world: World):
    if world.adapter.name != "torch":
        return
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(world)
    rows = torch.arange(24.0).view(8, 3)
    for placement in (Shard(0), Shard(1), Replicate()):
        data = distribute_tensor(rows, mesh, [placement])
        (first, second), _ = world.platform.micro_batch(2)((data, rows), {})
        for (piece, same_rows), expected in ((first, rows[:4]), (second, rows[4:])):
            assert piece.placements == (placement,)
            assert torch.equal(piece.full_tensor(), expected)
            assert torch.equal(same_rows, expected)
            assert world.platform.tensor_to_numpy(piece).tolist() == expected.tolist()
