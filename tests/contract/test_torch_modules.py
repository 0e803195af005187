"""What only torch has among modules and parameters."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from hyper_parallel.errors import CheckpointFileError, HyperParallelError
from hyper_parallel.platform.torch.platform import TorchPlatform

from .marks import covers

platform = TorchPlatform()


@covers("get_op_name")
@pytest.mark.parametrize(
    "op",
    [
        torch.ops.aten.add.Tensor,
        torch.ops.aten.add.Scalar,
        torch.ops.aten.add,
        torch.add,
        torch.Tensor.add,
        "aten::add.out",
    ],
    ids=[
        "overload",
        "other overload",
        "packet",
        "function",
        "method",
        "schema name",
    ],  # an address would differ by process
)
def test_every_overload_has_one_name(op):
    assert platform.get_op_name(op) == "add"
    assert platform.get_op_name(torch.ops.aten.add_.Tensor) == "add_"


@covers("tensor_type_cast")
def test_a_dtype_that_torch_cannot_compute_in_is_named():
    with pytest.raises(ValueError, match=r"tensor_type_cast: .*float32 to torch.uint4 on cpu.*Cast to a dtype"):
        platform.tensor_type_cast(torch.ones(2), "uint4")


@covers("set_tensor_requires_grad")
def test_a_non_leaf_is_left_as_it_is():
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * 2
    assert platform.set_tensor_requires_grad(product) is product
    assert product.grad_fn is not None


@covers("update_parameter_by_name")
def test_a_recurrent_module_uses_its_new_weight():
    torch.manual_seed(0)
    net = nn.Sequential(nn.LSTM(3, 3))
    new = nn.Parameter(torch.zeros(12, 3))
    assert platform.update_parameter_by_name(net, ("0.weight_ih_l0", net[0].weight_ih_l0), new)
    assert any(weight is new for weight in net[0]._flat_weights)
    first, second = net(torch.zeros(2, 1, 3))[0], net(torch.ones(2, 1, 3))[0]
    assert torch.equal(first, second)


@covers("get_model_state_dict")
def test_wrapper_prefixes_never_show_and_own_names_stay():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.other = checkpoint_wrapper(nn.Linear(2, 2))

    expected = ["module.weight", "module.bias", "other.weight", "other.bias"]
    model = Own()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, at the first import of its compiler
        compiled = torch.compile(model, backend="eager")
    assert list(platform.get_model_state_dict(model)) == expected
    assert list(platform.get_model_state_dict(nn.DataParallel(model))) == expected
    assert list(platform.get_model_state_dict(compiled)) == expected
    assert list(platform.get_model_state_dict(nn.Sequential(compiled))) == [f"0.{name}" for name in expected]


@covers("get_model_state_dict")
def test_torchs_own_options_work():
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    assert list(platform.get_model_state_dict(model, options=options)) == ["weight"]


@covers("save_checkpoint", "load_checkpoint")
def test_tied_weights_are_written_once_and_load_strictly(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    platform.save_checkpoint(model, tmp_path / "w")
    assert (tmp_path / "w").stat().st_size < 1.5 * 64 * 64 * 4
    loaded = platform.load_checkpoint(tmp_path / "w")
    assert loaded["0.weight"] is loaded["1.weight"]
    other = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    other[1].weight = other[0].weight
    other.load_state_dict(loaded, strict=True)
    assert torch.equal(other[1].weight, model[0].weight)


@covers("load_checkpoint")
def test_a_torch_file_that_is_no_state_dict_is_refused(tmp_path):
    torch.save({"model": {"w": torch.ones(1)}, "step": 3}, tmp_path / "w.pt")
    with pytest.raises(CheckpointFileError, match=r"a weight file is a dict of names to tensors and 'model' is a dict"):
        platform.load_checkpoint(tmp_path / "w.pt", "pt")
    with pytest.raises(CheckpointFileError, match=r"it is not a safetensors file; give ckpt_format .*'pt'"):
        platform.load_checkpoint(tmp_path / "w.pt")
    torch.save(nn.Linear(1, 1), tmp_path / "module.pt")
    with pytest.raises(CheckpointFileError, match=r"asks to run code or to build objects, which is never done"):
        platform.load_checkpoint(tmp_path / "module.pt", "pt")


@covers("save_checkpoint")
def test_what_has_no_bytes_to_write_is_refused(tmp_path):
    with pytest.raises(CheckpointFileError, match=r"cannot write 'weight'; .*meta device.*materialise it first"):
        platform.save_checkpoint(nn.Linear(2, 2, device="meta"), tmp_path / "w")
    with pytest.raises(CheckpointFileError, match=r"cannot write 's'; because safetensors holds no torch.sparse_coo"):
        platform.save_checkpoint({"s": torch.eye(2).to_sparse()}, tmp_path / "w")
    platform.save_checkpoint({"s": torch.eye(2).to_sparse()}, tmp_path / "w", "pt")
    assert torch.equal(platform.load_checkpoint(tmp_path / "w", "pt")["s"].to_dense(), torch.eye(2))


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 3)
        self.head.weight = nn.Parameter(torch.ones(3, 3))
        shared = nn.Parameter(torch.zeros(3))
        self.first, self.second = shared, shared


@covers("init_on_device")
@pytest.mark.parametrize("include_buffers", [False, True])
def test_parameters_are_born_there_and_buffers_when_asked(include_buffers):
    with platform.init_on_device("meta", include_buffers=include_buffers):
        model = WithBuffer()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta" if include_buffers else "cpu"}
    assert model.first is model.second
    assert {parameter.device.type for parameter in WithBuffer().parameters()} == {"cpu"}


@covers("init_on_device")
def test_the_innermost_context_decides_and_an_error_ends_it():
    def build_and_fail():
        with platform.init_on_device("meta"):
            with platform.init_on_device("cpu"):
                assert nn.Linear(1, 1).weight.device.type == "cpu"
            assert nn.Linear(1, 1).weight.device.type == "meta"
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        build_and_fail()
    assert nn.Linear(1, 1).weight.device.type == "cpu"


@covers("init_on_device")
def test_lazy_and_special_parameters_keep_their_kind():
    class Tagged(nn.Parameter):
        pass

    with platform.init_on_device("meta"):
        lazy, holder = nn.LazyLinear(4), nn.Module()
        tagged = Tagged(torch.ones(2), requires_grad=False)
        tagged.tag = "kept"
        holder.weight = tagged
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    lazy(torch.ones(1, 3, device="meta"))
    assert (lazy.weight.device.type, tuple(lazy.weight.shape)) == ("meta", (4, 3))
    assert type(holder.weight) is Tagged
    assert (holder.weight.tag, holder.weight.requires_grad, holder.weight.device.type) == ("kept", False, "meta")


@covers("init_on_device")
def test_threads_do_not_see_each_other_and_nothing_is_patched():
    """One thread builds inside a context while two others build outside and inside another one."""
    inside, others_built = threading.Event(), threading.Event()
    found: dict[str, str] = {}
    before = (nn.Module.register_parameter, nn.Module.__setattr__, nn.Parameter.__new__, torch.empty)

    def in_context():
        with platform.init_on_device("meta"):
            inside.set()
            assert others_built.wait(20)
            found["in context"] = nn.Linear(2, 2).weight.device.type

    def plain():
        found["plain"] = nn.Linear(2, 2).weight.device.type

    def other_context():
        with platform.init_on_device("cpu"):
            found["other context"] = nn.Linear(2, 2).weight.device.type

    first = threading.Thread(target=in_context)
    first.start()
    assert inside.wait(20)
    assert (nn.Module.register_parameter, nn.Module.__setattr__, nn.Parameter.__new__, torch.empty) == before
    for target in (plain, other_context):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    found["main"] = nn.Linear(2, 2).weight.device.type
    others_built.set()
    first.join()
    assert found == {"plain": "cpu", "other context": "cpu", "main": "cpu", "in context": "meta"}


@covers("init_on_device")
def test_many_threads_enter_and_build_at_once():
    """Each thread goes in and out of contexts while the others are registering parameters."""
    wrong: list[str] = []

    def work(device: str) -> None:
        try:
            for _ in range(50):
                with platform.init_on_device(device, include_buffers=True):
                    inside = nn.BatchNorm1d(2)
                outside = nn.BatchNorm1d(2)
                if (inside.weight.device.type, outside.weight.device.type) != (device, "cpu"):
                    wrong.append(f"{device}: {inside.weight.device} and {outside.weight.device}")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(device,)) for device in ("meta", "cpu") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(torch_module._global_parameter_registration_hooks) == 1


@covers("init_parameters")
def test_only_what_is_missing_is_initialised():
    with platform.init_on_device("meta", include_buffers=True):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    model[3].weight = model[0].weight
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    platform.load_into_param(model[0].bias, torch.full((4,), 9.0))
    platform.init_parameters(model, 1)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model[0].bias.tolist() == [9.0] * 4
    assert model[3].weight is model[0].weight
    assert model[0].weight.std() > 0
    assert model[1].running_var.tolist() == [1.0] * 4
    assert model[2].out_proj.bias.tolist() == [0.0] * 4
    held = {id(parameter) for group in optimiser.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters()}


@covers("init_parameters")
def test_what_nobody_knows_how_to_initialise_is_named_and_nothing_changes():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.empty(2, device="meta"))

    model = nn.ModuleDict({"known": nn.Linear(2, 2, device="meta"), "bare": Bare()})
    with pytest.raises(HyperParallelError, match=r"cannot give values to \['bare \(table\)'\]; .*reset_parameters\(\)"):
        platform.init_parameters(model, 0)
    assert model["known"].weight.is_meta
    with pytest.raises(HyperParallelError, match=r"cannot materialise \['weight', 'bias'\]; .*run one forward"):
        platform.init_parameters(nn.LazyLinear(3), 0)


@covers("load_into_param")
def test_a_meta_parameter_is_filled_in_place():
    layer = nn.Linear(2, 2, device="meta", dtype=torch.bfloat16)
    weight = layer.weight
    weight.tag = "kept"
    data = torch.arange(4.0).view(2, 2)
    platform.load_into_param(weight, data)
    assert layer.weight is weight
    assert (weight.tolist(), weight.dtype, weight.tag, weight.requires_grad) == (
        data.tolist(),
        torch.bfloat16,
        "kept",
        True,
    )
    data.zero_()
    assert weight[1, 1] == 3.0


@covers("clip_grad_norm_")
def test_narrow_and_mixed_gradients_have_an_exact_norm():
    torch.manual_seed(0)
    narrow, wide = (
        nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(10, dtype=torch.float64)),
    )
    sparse, empty, without = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3))
    narrow.grad, wide.grad = torch.randn(1000).bfloat16(), torch.randn(10, dtype=torch.float64)
    sparse.grad, empty.grad = torch.eye(4, 2).to_sparse(), torch.zeros(0)
    flat = torch.cat([narrow.grad.double(), wide.grad, torch.eye(4, 2).flatten().double()])
    for norm_type in (2.0, float("inf")):
        total = platform.clip_grad_norm_([narrow, wide, sparse, empty, without], 1e9, norm_type)
        assert float(total) == pytest.approx(float(flat.norm(norm_type)), rel=1e-6)
    platform.clip_grad_norm_([narrow, wide, sparse, empty, without], float(flat.norm()) / 2)
    assert torch.allclose(sparse.grad.to_dense(), torch.eye(4, 2) / 2, rtol=1e-5)
    assert torch.allclose(wide.grad, flat[1000:1010] / 2, rtol=1e-5)
    assert float(platform.clip_grad_norm_([without], 1.0)) == 0.0


@covers("set_layout_into_parameter")
def test_a_layout_is_a_mesh_and_placements():
    with pytest.raises(TypeError, match=r"a layout on torch is \(DeviceMesh, placements\), such as .* got 'layout'"):
        platform.set_layout_into_parameter(nn.Parameter(torch.ones(2)), "layout")
