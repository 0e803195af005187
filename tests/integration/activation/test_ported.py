"""Code written against the older interface, one snippet per class: it runs, and gives what it gave."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.activation_checkpoint import SwapManager
from hyper_parallel.core.activation_checkpoint.call_keywords import CHECKPOINT_SETTINGS
from hyper_parallel.core.activation_checkpoint.swap import Storage, SwapGroup, SwapTensor
from hyper_parallel.errors import ActivationError
from hyper_parallel.platform.torch.activation_checkpoint import activation_swap
from hyper_parallel.platform.torch.activation_checkpoint.activation_swap import (
    ActivationPolicy,
    ActivationWrapper,
    AsyncSaveOnCpu,
    FuncModule,
    SwapWrapper,
    base_check_fn,
    swap_wrapper,
)
from hyper_parallel.testing import simulated_accelerator

WIDTH = 8
MATRIX_BYTES = 4 * WIDTH * 4
SMALL = {"min_bytes": 0, "tail_bytes": 0}


class Half(nn.Module):
    """A module with names of its own that subclasses of the wrapper use too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.scale


class Scaled(ActivationWrapper):
    """A subclass that keeps a number, and counts what it sees without naming it in its constructor."""

    def __init__(self, module: Any, scale: float) -> None:
        super().__init__(module)
        self.scale = scale

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.last_input = args[0]
        return self._ckpt_wrapped_module(*args, **kwargs) * self.scale


class Adapter(ActivationWrapper):
    """A subclass with a child, a parameter and buffers."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.register_buffer("shift", torch.ones(WIDTH))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.proj(self._ckpt_wrapped_module(*args, **kwargs)) * self.gain + self.shift


def test_what_a_subclass_sets_stays_on_the_wrapper() -> None:
    module = Half()
    x = torch.ones(2, WIDTH)
    plain = module.proj(x)
    one = Scaled(module, 2)
    assert torch.equal(one(x), plain)  # 0.5 of the module, times 2
    two = Scaled(one, 3)
    assert torch.equal(two(x), plain * 3)
    assert (two.scale, one.scale, module.scale) == (3, 2, 0.5)
    assert not {"last_input"} & vars(module).keys()
    assert isinstance(two, Half)
    assert list(two.state_dict()) == list(module.state_dict())
    two.scale = 5  # the wrapper has the name, so it is the wrapper's for everybody
    assert (two.scale, one.scale, module.scale) == (5, 2, 0.5)


def test_what_other_code_assigns_to_a_wrapped_layer_reaches_the_module() -> None:
    for module in (Half(), Half()):
        wrapper = Adapter(hp.swap_wrapper(module))
        wrapper.scale = 4.0
        wrapper.gradient_checkpointing = True
        assert (module.scale, module.gradient_checkpointing) == (4.0, True)
    linear = nn.Linear(WIDTH, WIDTH)
    wrapper = Scaled(linear, 1)
    wrapper.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    assert linear.weight is wrapper.weight
    torch.nn.utils.parametrizations.weight_norm(wrapper)
    assert "parametrizations" in linear._modules
    wrapper(torch.ones(1, WIDTH)).sum().backward()
    wrapper.q_proj = nn.Linear(2, 2)
    assert "q_proj" in linear._modules


def test_what_a_subclass_registers_trains_moves_and_is_saved_beside_the_module() -> None:
    torch.manual_seed(0)
    module = Half()
    wrapper = Adapter(Adapter(module))
    theirs = ["proj.weight", "proj.bias"]
    assert list(module.state_dict()) == theirs
    own = {"gain", "shift", "wrapper_proj.weight", "wrapper_proj.bias"}
    outer = {"wrapper_gain", "wrapper_shift", "wrapper_wrapper_proj.weight", "wrapper_wrapper_proj.bias"}
    assert set(wrapper.state_dict()) == {*theirs, *own, *outer}
    assert wrapper.state_dict()["proj.weight"].data_ptr() == module.proj.weight.data_ptr()
    assert [name for name, _ in wrapper.named_modules()] == ["", "proj", "wrapper_proj", "wrapper_wrapper_proj"]
    x = torch.ones(2, WIDTH)
    wrapper(x).sum().backward()
    assert all(parameter.grad is not None for parameter in wrapper.parameters())
    assert len(list(wrapper.parameters())) == 8
    assert {parameter.dtype for parameter in wrapper.double().parameters()} == {torch.float64}
    assert not any(child.training for child in wrapper.eval().modules())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "other"'):
        wrapper.load_state_dict({**wrapper.state_dict(), "other": x})
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*\"wrapper_gain\""):
        wrapper.load_state_dict(module.state_dict())


def test_copies_and_pickles_of_a_subclass_have_what_it_set() -> None:
    torch.manual_seed(0)
    wrapper = hp.swap_wrapper(Adapter(Scaled(Half(), 3)))
    x = torch.ones(2, WIDTH)
    wanted = wrapper(x)
    stream = io.BytesIO()
    torch.save(wrapper, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper)), torch.load(stream, weights_only=False)):
        assert torch.equal(twin(x), wanted)
        assert list(twin.state_dict()) == list(wrapper.state_dict())
        twin.load_state_dict(wrapper.state_dict())
        with torch.no_grad():
            twin.gain.zero_()
        assert torch.equal(wrapper(x), wanted)
        assert not torch.equal(twin(x), wanted)
    values = {name: value.clone() for name, value in wrapper.named_parameters()}
    values["gain"] = torch.zeros(WIDTH)
    assert torch.equal(torch.func.functional_call(wrapper, values, (x,)), torch.ones(2, WIDTH))


def test_func_module_and_wrapper_attributes_have_their_older_names() -> None:
    assert activation_swap.__all__
    function = FuncModule(torch.sin)
    assert function._fn is torch.sin
    function._fn = torch.cos
    x = torch.ones(3)
    assert torch.equal(function(x), torch.cos(x))
    linear, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    wrapper = swap_wrapper(linear)
    assert wrapper._ckpt_wrapped_module is linear
    wrapper._ckpt_wrapped_module = other
    assert wrapper.weight is other.weight
    assert dict(wrapper.named_parameters())["weight"] is other.weight
    assert [base_check_fn(value) for value in (x, other.weight, 3, torch.empty(0))] == [True, False, False, False]


def test_the_policy_of_a_swap_wrapper_can_be_read_and_assigned() -> None:
    def keep(tensor: torch.Tensor) -> ActivationPolicy:
        return ActivationPolicy.SAVE

    wrapper = SwapWrapper(nn.Linear(WIDTH, WIDTH), policy_fn=keep)
    assert wrapper.policy_fn is keep
    with simulated_accelerator(**SMALL) as sim:
        wrapper(torch.ones(4, WIDTH)).sum().backward()
        assert sim.events == []
        wrapper.policy_fn = None
        wrapper(torch.ones(4, WIDTH)).sum().backward()
        assert [what for what, _ in sim.events][:1] == ["offload"]
        with AsyncSaveOnCpu(keep):
            torch.ones(4, WIDTH, requires_grad=True).exp().sum().backward()


def test_a_storage_is_filled_without_being_asked_for() -> None:
    with simulated_accelerator(**SMALL):
        storage = Storage()
        first, second = SwapTensor(torch.ones(4), "mm"), SwapTensor(torch.ones(4), "add")
        storage.swap_storage["mm"].append([first])
        storage.swap_storage["add"].append(second)
        storage.save_storage["view"].append(3)
        assert storage.iter_swap_tensors() == [first, second]
        group = SwapGroup("by hand")
        group.add(storage)
        group.launch_offload(None)
        assert (first.state, second.state) == ("d2h", "d2h")
        group.wait_offload()
        assert repr(first) == (
            "SwapTensor('mm', state='host', storage_size=16, is_shared=False, moves=True, has_device_bytes=False)"
        )
        group.launch_load(None)
        group.wait_load()
        assert torch.equal(first.get_val(), torch.ones(4))
    with simulated_accelerator(**SMALL):
        values = torch.ones(8)
        storage = Storage()
        storage.swap_storage[0].append([SwapTensor(values, "mm"), SwapTensor(values.view(2, 4), "view")])
        assert storage.mark_duplicate_swaps(set()) == 1
        assert ["is_shared=True" in repr(tensor) for tensor in storage.iter_swap_tensors()] == [False, True]
    assert repr(SwapTensor(3, "item")) == "SwapTensor('item', state='non_tensor')"


class ByHand(nn.Module):
    """A layer that puts the two values it saves into the group of the layer that runs, as ported code does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[SwapTensor] = []
        self.on_use: Any = lambda: None

    @property
    def state(self) -> str:
        (state,) = {value.state for value in self.kept}
        return state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return x.sin().cos() * 2

    def _pack(self, tensor: torch.Tensor) -> SwapTensor:
        storage, swapped = Storage(), SwapTensor(tensor, "by hand")
        storage.swap_storage["by hand"].append(swapped)
        SwapManager().add_storage(SwapManager().get_current_group_name() or "loose", storage)
        self.kept.append(swapped)
        return swapped

    def _unpack(self, swapped: SwapTensor) -> torch.Tensor:
        self.on_use()
        return swapped.get_val()


def _run(layers: list[ByHand], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _input() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()


def test_a_declared_chain_drives_storages_that_a_user_put_in_its_groups() -> None:
    layers = [ByHand() for _ in range(3)]
    plain = _input()
    _run(layers, plain).sum().backward()
    for layer in layers:
        layer.kept.clear()
    with simulated_accelerator(**SMALL) as sim:
        for first, second in itertools.pairwise(layers):
            SwapManager().set_forward_prefetch_layer(first, second)
        x = _input()
        loss = _run(layers, x).sum()
        assert [layer.state for layer in layers] == ["host", "host", "device"]
        uses: list[list[str]] = []
        for layer in layers:
            layer.on_use = lambda: uses.append([layer.state for layer in layers])
        loss.backward()
        # Two values per layer. Those of the layer are there, and those of the layer before are on their way.
        last, middle, first = ["host", "h2d", "device"], ["h2d", "device", "device"], ["device"] * 3
        assert uses == [last, last, middle, middle, first, first]
        assert torch.equal(x.grad, plain.grad)
        moved = [size for what, size in sim.events if what == "offload"]
        assert moved == [size for what, size in sim.events if what == "load"] == [MATRIX_BYTES] * 4


def test_a_declared_chain_drives_the_storages_of_each_forward_on_its_own() -> None:
    layers = [ByHand() for _ in range(3)]
    plain = [_input(), _input()]
    for x in plain:
        (_run(layers, x) ** 2).sum().backward()
    for order in (0, 1), (1, 0):
        with simulated_accelerator(**SMALL):
            for first, second in itertools.pairwise(layers):
                SwapManager().set_forward_prefetch_layer(first, second)
            inputs = [_input(), _input()]
            losses = [(_run(layers, x) ** 2).sum() for x in inputs]
            for index in order:
                losses[index].backward()
            assert all(torch.equal(x.grad, wanted.grad) for x, wanted in zip(inputs, plain))


def test_a_declared_layer_carries_the_name_and_the_neighbours_of_its_group() -> None:
    layers = [hp.swap_wrapper(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    chains = [SwapManager().set_forward_prefetch_layer(a, b) for a, b in itertools.pairwise(layers)]
    assert [layer._swap_group_name for layer in layers] == ["swap_group_0", "swap_group_1", "swap_group_2"]
    assert layers[1]._swap_group_order == {"prev": "swap_group_0", "next": "swap_group_2"}
    assert layers[2]._swap_group_order == {"prev": "swap_group_1", "next": None}
    for twin in (copy.deepcopy(layers[1]), pickle.loads(pickle.dumps(layers[1]))):
        assert not twin._swap_group_name
        assert not twin._swap_group_order
        other = nn.Linear(2, 2)
        SwapManager().set_forward_prefetch_layer(twin, other)
        assert twin._swap_group_name not in [layer._swap_group_name for layer in layers]
    chains[1].remove()
    assert layers[1]._swap_group_order == {"prev": "swap_group_0", "next": None}
    with simulated_accelerator(**SMALL):
        storage, value = Storage(), torch.ones(4)
        storage.swap_storage["mm"].append(SwapTensor(value, "mm"))
        manager, name = SwapManager(), layers[0]._swap_group_name
        manager.add_storage(name, storage)
        manager.launch_offload(name)
        manager.wait_offload(name)
        manager.launch_load(name)
        manager.wait_load(name)
        assert torch.equal(storage.iter_swap_tensors()[0].get_val(), value)
    SwapManager().reset()
    assert not hasattr(layers[0], "_swap_group_name")


def test_every_setting_of_torchs_checkpoint_is_known() -> None:
    names = inspect.signature(torch.utils.checkpoint.checkpoint).parameters
    assert set(names) - {"args", "kwargs"} <= CHECKPOINT_SETTINGS


WRAP = {
    "checkpoint": hp.checkpoint_wrapper,
    "policy": lambda module: hp.checkpoint_wrapper(module, policy_fn=["mm"]),
    "swap": hp.swap_wrapper,
}


def _model(wrap: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())), nn.Linear(WIDTH, 2))


@pytest.mark.parametrize("wrap", WRAP.values(), ids=WRAP)
def test_a_symbolic_trace_keeps_the_wrapper_as_one_node(wrap: Any) -> None:
    model, x = _model(wrap), torch.ones(3, WIDTH)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    assert type(traced.get_submodule("0")) is type(model[0])
    assert torch.equal(traced(x), model(x))
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(map(torch.equal, torch.autograd.grad(traced(x).sum(), list(model.parameters())), wanted))
    with pytest.raises(ActivationError, match=r"torch.fx: cannot trace a wrapped Sequential on its own"):
        torch.fx.symbolic_trace(model[0])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("wrap", WRAP.values(), ids=WRAP)
def test_a_wrapped_model_is_exported_as_the_module_it_wraps(wrap: Any, strict: bool) -> None:
    model, x = _model(wrap), torch.ones(3, WIDTH)
    exported = torch.export.export(model, (x,), strict=strict)
    assert torch.equal(exported.module()(x), model(x))
    assert list(exported.state_dict) == list(model.state_dict())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("wrap", WRAP.values(), ids=WRAP)
def test_scripting_a_wrapped_model_is_refused_by_name(wrap: Any) -> None:
    model = _model(wrap)
    with pytest.raises(ActivationError, match=r"torch.jit.script: cannot compile a wrapped Sequential"):
        torch.jit.script(model)
    assert type(model[0]).__name__ in ("CheckpointWrapper", "SwapWrapper")
