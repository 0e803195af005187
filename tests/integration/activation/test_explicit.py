"""The explicit interface: SwapTensor, Storage, SwapGroup, SwapManager; every method in every state."""

from __future__ import annotations

import contextvars
import itertools
import threading
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.activation_checkpoint.swap import (
    STATE_D2H,
    STATE_DEVICE,
    STATE_H2D,
    STATE_HOST,
    STATE_NON_TENSOR,
    Storage,
    SwapGroup,
    SwapManager,
    SwapTensor,
)
from hyper_parallel.errors import HyperParallelError, InPlaceChangeError, SwapStateError, SwapStateWarning
from hyper_parallel.testing import simulated_accelerator

from .helpers import count_of, storage_ref
from .models import Block
from .scenario import batch

CALLS = ("async_offload", "wait_offload", "resize_device_storage", "async_load", "wait_load")


def in_state(state: str) -> tuple[SwapTensor, torch.Tensor]:
    """A swap tensor that was driven to ``state``, and the value it must give back."""
    value = torch.rand(5, 3)
    tensor = SwapTensor(value, "layer.op")
    for call in CALLS:
        if tensor.state == state:
            break
        getattr(tensor, call)()
    assert tensor.state == state
    return tensor, value


def test_the_states_are_plain_strings() -> None:
    assert (STATE_DEVICE, STATE_D2H, STATE_HOST, STATE_H2D, STATE_NON_TENSOR) == (
        "device", "d2h", "host", "h2d", "non_tensor",
    )  # fmt: skip
    for name in ("STATE_DEVICE", "STATE_D2H", "STATE_HOST", "STATE_H2D", "STATE_NON_TENSOR"):
        assert getattr(SwapTensor, name) == globals()[name]


def test_the_life_of_a_tensor() -> None:
    with simulated_accelerator() as sim:
        value = torch.rand(5, 3)
        expected, source = value.clone(), storage_ref(value)
        tensor = SwapTensor(value, "layer.op")
        assert (tensor.state, tensor.funcname, tensor.ver, tensor.storage_size) == ("device", "layer.op", 0, 60)
        assert tensor.val is value
        assert tensor.val_cpu is None
        assert not tensor.is_slice_tensor
        tensor.async_offload()
        assert tensor.state == "d2h"
        tensor.wait_offload()
        assert tensor.state == "host"
        del value
        assert source.expired(), "our device reference is gone"
        assert tensor.val is None
        assert torch.equal(tensor.val_cpu.view(torch.float32).view(5, 3), expected)
        live = sim.live_bytes
        tensor.resize_device_storage()
        assert sim.live_bytes == live + 60
        tensor.resize_device_storage()
        assert sim.live_bytes == live + 60, "the buffer is made once"
        tensor.async_load()
        assert tensor.state == "h2d"
        tensor.wait_load()
        assert tensor.state == "device"
        assert torch.equal(tensor.get_val(), expected)
        assert sim.live_bytes == live + 60
        tensor.async_offload()
        tensor.wait_offload()
        tensor.async_load()
        tensor.wait_load()
        assert torch.equal(tensor.get_val(), expected)


RIGHT = {
    "device": "async_offload",
    "d2h": "wait_offload",
    "host": "async_load",
    "h2d": "wait_load",
}
ALREADY_DONE = {("device", "wait_load"), ("host", "wait_offload"), ("host", "resize_device_storage")}


@pytest.mark.parametrize("state", list(RIGHT))
@pytest.mark.parametrize("call", CALLS)
def test_every_call_in_every_state(state: str, call: str) -> None:
    with simulated_accelerator():
        tensor, value = in_state(state)
        if RIGHT[state] == call:
            getattr(tensor, call)()
            assert tensor.state != state
        elif (state, call) in ALREADY_DONE:
            getattr(tensor, call)()
            assert tensor.state == state
        else:
            with pytest.warns(SwapStateWarning, match=rf"SwapTensor 'layer.op': {call}\(\) was called while '{state}'"):
                getattr(tensor, call)()
            assert tensor.state == state
        for step in CALLS:
            if tensor.state == "device":
                break
            if RIGHT[tensor.state] == step:
                getattr(tensor, step)()
        assert torch.equal(tensor.get_val(), value)


@pytest.mark.parametrize("state", ["d2h", "host", "h2d"])
def test_the_value_is_given_on_the_device_only(state: str) -> None:
    with simulated_accelerator():
        tensor, _ = in_state(state)
        with pytest.raises(SwapStateError, match=f"SwapTensor 'layer.op': cannot give its value while '{state}'"):
            tensor.get_val()


@pytest.mark.parametrize("value", [3, None, "text", [1, 2]])
def test_what_is_no_tensor_never_moves(value: Any) -> None:
    with simulated_accelerator() as sim:
        tensor = SwapTensor(value, "op")
        assert tensor.state == "non_tensor"
        for call in CALLS:
            getattr(tensor, call)()
        assert tensor.state == "non_tensor"
        assert tensor.get_val() is value
        assert tensor.dedup_key() is None
        tensor.protect_if_aliases([value])
        tensor.mark_duplicate_swap()
        assert sim.events == []


def test_a_host_tensor_never_moves() -> None:
    value = torch.rand(3)
    tensor = SwapTensor(value, "op")  # no device here: the host is where it is
    assert tensor.state == "non_tensor"
    tensor.async_offload()
    assert tensor.get_val() is value


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.t(),
        lambda base: base[1:3],
        lambda base: base[:, ::2],
        lambda base: base[0].expand(7, 6),
        lambda base: base.as_strided((3, 4), (1, 2), 5),
        lambda base: base.view(torch.int32),
        lambda base: base[2, 3],
        lambda base: base.to(torch.bfloat16)[1],
        lambda base: base > 0.5,
    ],
)
def test_views_come_back_exactly(make: Any) -> None:
    with simulated_accelerator():
        base = torch.rand(4, 6)
        value = make(base)
        expected = value.clone()
        geometry = value.size(), value.stride(), value.storage_offset(), value.dtype
        storage_bytes = value.untyped_storage().nbytes()
        tensor = SwapTensor(value, "op")
        assert tensor.storage_size == storage_bytes
        assert tensor.is_slice_tensor == (value.nbytes != storage_bytes)
        for call in CALLS:
            getattr(tensor, call)()
        got = tensor.get_val()
        assert (got.size(), got.stride(), got.storage_offset(), got.dtype) == geometry
        assert torch.equal(got, expected)
        assert torch.equal(base, base.clone()), "the caller's own tensor is untouched"


def test_a_tensor_changed_since_is_refused() -> None:
    with simulated_accelerator():
        value = torch.rand(3)
        tensor = SwapTensor(value, "layer.op")
        value.add_(1)
        with pytest.raises(
            InPlaceChangeError, match=r"SwapTensor 'layer\.op': cannot be offloaded, because it was changed in place"
        ):
            tensor.async_offload()
        assert tensor.state == "device"
        resized = torch.rand(3)
        tensor = SwapTensor(resized, "layer.other")
        resized.untyped_storage().resize_(400)
        with pytest.raises(InPlaceChangeError, match=r"layer\.other"):
            tensor.async_offload()


def test_a_protected_tensor_does_not_move() -> None:
    with simulated_accelerator() as sim:
        value = torch.rand(4, 3)
        tensor = SwapTensor(value, "op")
        tensor.protect_if_aliases([torch.rand(3)])
        tensor.protect_if_aliases({"out": (value[1:],)})
        for call in CALLS:
            getattr(tensor, call)()
        assert tensor.state == "device"
        assert tensor.get_val() is value
        assert sim.events == []


def test_a_duplicate_does_not_move() -> None:
    with simulated_accelerator() as sim:
        value = torch.rand(4, 3)
        one, two, other = SwapTensor(value, "a"), SwapTensor(value[1:], "b"), SwapTensor(torch.rand(4, 3), "c")
        assert one.dedup_key() == two.dedup_key() != other.dedup_key()
        two.mark_duplicate_swap()
        for call in CALLS:
            getattr(two, call)()
        assert two.state == "device"
        assert torch.equal(two.get_val(), value[1:])
        assert sim.events == []


# ---------------------------------------------------------------------- Storage


def filled() -> tuple[Storage, list[torch.Tensor]]:
    values = [torch.rand(4), torch.rand(3, 2), torch.rand(5)]
    storage = Storage()
    storage.swap_storage["mm"] = [SwapTensor(values[0], "mm"), (SwapTensor(values[1], "mm"), 3)]
    storage.swap_storage["sin"] = [{"deep": [SwapTensor(values[2], "sin")]}]
    storage.save_storage["add"] = [torch.rand(2)]
    return storage, values


def test_a_storage_walks_through_whatever_ops_returned() -> None:
    with simulated_accelerator():
        storage, values = filled()
        assert [tensor.get_val() is value for tensor, value in zip(storage.iter_swap_tensors(), values)] == [True] * 3
        assert Storage().swap_storage == Storage().save_storage == {}


def test_the_life_of_a_storage() -> None:
    with simulated_accelerator() as sim:
        storage, values = filled()
        expected = [value.clone() for value in values]
        states = lambda: {tensor.state for tensor in storage.iter_swap_tensors()}  # noqa: E731
        storage.launch_offload()
        assert states() == {"d2h"}
        storage.launch_offload()
        storage.wait_offload()
        storage.wait_offload()
        assert states() == {"host"}
        live = sim.live_bytes
        storage.resize_device_storage()
        assert sim.live_bytes == live + sum(value.nbytes for value in expected)
        storage.launch_load()
        assert states() == {"h2d"}
        storage.wait_load()
        storage.wait_load()
        assert states() == {"device"}
        for tensor, value in zip(storage.iter_swap_tensors(), expected):
            assert torch.equal(tensor.get_val(), value)
        assert count_of(sim.events, "offload") == count_of(sim.events, "load") == 3


def test_a_storage_marks_what_was_seen() -> None:
    with simulated_accelerator() as sim:
        storage, values = filled()
        storage.swap_storage["again"] = [SwapTensor(values[0].view(2, 2), "again")]
        seen: set[object] = set()
        assert storage.mark_duplicate_swaps(seen) == 1
        assert len(seen) == 3
        other = Storage()
        other.swap_storage["x"] = [SwapTensor(values[1], "x")]
        assert other.mark_duplicate_swaps(seen) == 1
        other.launch_offload()
        assert sim.events == []


def test_a_storage_protects_outputs() -> None:
    with simulated_accelerator() as sim:
        storage, values = filled()
        storage.protect_output_tensors([values[0].view(2, 2), {"y": values[2]}])
        storage.launch_offload()
        assert [size for what, size in sim.events if what == "offload"] == [values[1].nbytes]


# ---------------------------------------------------------------------- SwapGroup


def test_the_life_of_a_group() -> None:
    with simulated_accelerator() as sim:
        storage, values = filled()
        expected = [value.clone() for value in values]
        tensors = list(storage.iter_swap_tensors())
        group = SwapGroup("layer 0")
        assert (group.group_name, group.is_last_group) == ("layer 0", False)
        group.add(storage)
        lane = sim.timeline.new_lane()
        group.launch_offload(lane)
        assert lane.queued > 0, "copies go on the given stream"
        group.wait_offload()
        assert {tensor.state for tensor in tensors} == {"host"}
        group.launch_load(lane)
        group.wait_load()
        for tensor, value in zip(tensors, expected):
            assert torch.equal(tensor.get_val(), value)
        with pytest.raises(
            SwapStateError, match=r"SwapGroup 'layer 0': wait_load\(\) was called before launch_load\(\)"
        ):
            group.wait_load()


@pytest.mark.parametrize(("call", "before"), [("wait_offload", "launch_offload"), ("wait_load", "launch_load")])
def test_waiting_before_launching_is_an_error(call: str, before: str) -> None:
    with simulated_accelerator():
        group = SwapGroup("layer 0")
        with pytest.raises(RuntimeError, match=rf"{call}\(\) was called before {before}\(\)") as caught:
            getattr(group, call)()
        assert isinstance(caught.value, HyperParallelError)


def test_a_group_moves_shared_bytes_once_and_every_view_comes_back() -> None:
    with simulated_accelerator() as sim:
        value = torch.rand(6, 4)
        expected = value.clone()
        group = SwapGroup("g")
        tensors = []
        for view in (value, value[2:], value.t()):
            storage = Storage()
            tensors.append(SwapTensor(view, "op"))
            storage.swap_storage["op"] = [tensors[-1]]
            group.add(storage)
        source = storage_ref(value)
        del value, view
        group.launch_offload()
        group.wait_offload()
        assert count_of(sim.events, "offload") == 1
        assert source.expired(), "no duplicate holds the device bytes"
        group.launch_load()
        group.wait_load()
        assert count_of(sim.events, "load") == 1
        for tensor, wanted in zip(tensors, (expected, expected[2:], expected.t())):
            assert torch.equal(tensor.get_val(), wanted)


def test_waiting_for_loads_releases_the_storages_even_on_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_accelerator():
        storage, _ = filled()
        group = SwapGroup("g")
        group.add(storage)
        group.launch_offload()
        group.wait_offload()
        group.launch_load()

        def fail(self: Storage) -> None:
            raise OSError("the link is down")

        monkeypatch.setattr(Storage, "wait_load", fail)
        with pytest.raises(OSError, match="the link is down"):
            group.wait_load()
        monkeypatch.undo()
        group.launch_load()
        group.wait_load()
        assert {tensor.state for tensor in storage.iter_swap_tensors()} == {"h2d"}, "the group has let go of them"


def test_a_group_protects_its_outputs() -> None:
    with simulated_accelerator() as sim:
        storage, values = filled()
        group = SwapGroup("g")
        group.add(storage)
        group.protect_output_tensors(values[:2])
        group.launch_offload()
        assert count_of(sim.events, "offload") == 1


# ---------------------------------------------------------------------- SwapManager


def test_there_is_one_manager() -> None:
    assert SwapManager() is SwapManager() is hp.SwapManager()


@pytest.mark.parametrize(
    "call", ["launch_offload", "wait_offload", "launch_load", "wait_load", "protect_output_tensors"]
)
def test_an_unknown_group_is_named_and_the_known_ones_are_listed(call: str) -> None:
    manager = SwapManager()
    manager.add_storage("layer 1", Storage())
    manager.add_storage("layer 0", Storage())
    arguments = ["layer 7", []] if call == "protect_output_tensors" else ["layer 7"]
    with pytest.raises(RuntimeError, match="unknown group 'layer 7'; known groups: 'layer 0', 'layer 1'"):
        getattr(manager, call)(*arguments)


def test_unknown_groups_where_they_are_no_error() -> None:
    manager = SwapManager()
    manager.release_group_storage("nobody")
    assert manager.is_last_group("nobody") is False
    assert manager.is_last_group() is False


def test_a_group_through_the_manager() -> None:
    manager = SwapManager()
    with simulated_accelerator() as sim:
        storage, values = filled()
        expected = [value.clone() for value in values]
        manager.add_storage("g", storage)
        manager.protect_output_tensors("g", values[2])
        lane = sim.timeline.new_lane()
        manager.launch_offload("g", lane)
        manager.wait_offload("g")
        manager.launch_load("g", lane)
        manager.wait_load("g")
        assert count_of(sim.events, "offload") == 2
        for tensor, value in zip(storage.iter_swap_tensors(), expected):
            assert torch.equal(tensor.get_val(), value)
        manager.release_group_storage("g")
        with pytest.raises(SwapStateError, match="before launch_offload"):
            manager.wait_offload("g")


def test_a_group_by_hand_is_what_was_packed_under_its_name() -> None:
    manager = SwapManager()
    with simulated_accelerator(tail_bytes=10**6, prefetch_bytes=0) as sim:
        x, layer = batch(), hp.swap_wrapper(Block())
        manager.set_current_group_name("mine")
        assert manager.get_current_group_name() == "mine"
        out = layer(x)
        manager.set_current_group_name("")
        other = layer(batch(seed=2))
        assert sim.events == []
        manager.launch_offload("mine")
        count = count_of(sim.events, "offload")
        assert count > 0
        manager.launch_offload("mine")
        assert count_of(sim.events, "offload") == count, "nothing is done twice"
        manager.wait_offload("mine")
        manager.wait_offload("mine")
        assert count_of(sim.events, "drop") == count
        manager.launch_load("mine")
        manager.launch_load("mine")
        assert count_of(sim.events, "load") == count
        manager.wait_load("mine")
        out.sum().backward()
        other.sum().backward()
        assert count_of(sim.events, "load") == count
        assert count_of(sim.events, "miss") == 0
    expected = batch()
    layer.zero_grad()
    layer(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_the_current_name_belongs_to_a_thread_and_context() -> None:
    manager = SwapManager()
    manager.set_current_group_name("here")
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(manager.get_current_group_name()))
    thread.start()
    thread.join()
    contextvars.Context().run(lambda: seen.append(manager.get_current_group_name()))
    contextvars.copy_context().run(manager.set_current_group_name, "there")
    assert seen == ["", ""]
    assert manager.get_current_group_name() == "here"
    manager.set_current_group_name("")
    assert manager.get_current_group_name() == ""


def test_the_last_group_is_the_end_of_a_declared_chain() -> None:
    manager = SwapManager()
    layers = [nn.Linear(2, 2) for _ in range(3)]
    chains = [manager.set_forward_prefetch_layer(first, second) for first, second in itertools.pairwise(layers)]
    is_last: list[bool] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: is_last.append(manager.is_last_group()))
        layer(torch.rand(1, 2))
    assert is_last == [False, False, True]
    chains[1].remove()
    del is_last[:]
    layers[1](torch.rand(1, 2))
    assert is_last == [True], "the chain ends earlier now"


def test_reset_forgets_everything() -> None:
    manager = SwapManager()
    with simulated_accelerator(window_bytes=0):
        first, second = hp.swap_wrapper(Block()), hp.swap_wrapper(Block())
        manager.set_forward_prefetch_layer(first, second)
        manager.add_storage("g", Storage())
        manager.set_current_group_name("g")
        second(first(batch())).sum().backward()
        manager.reset()
        assert manager.get_current_group_name() == ""
        stats = manager.stats()
        assert (stats.swapped_out_bytes, stats.live_records, stats.tiers) == (0, 0, ())
        assert not first._forward_hooks
        with pytest.raises(SwapStateError, match="known groups: none"):
            manager.launch_offload("g")
        second(first(batch())).sum().backward()
        assert manager.stats().swapped_out_bytes > 0


def test_a_graph_from_before_a_reset_still_runs_backward() -> None:
    with simulated_accelerator(window_bytes=0):
        x, layer = batch(), hp.swap_wrapper(Block())
        out = layer(x)
        SwapManager().reset()
        out.sum().backward()
    expected = batch()
    layer(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)
