"""What the engine promises, on MindSpore: lives, sharing, changes in place, policies, marks, random ops, files, chains."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import mint, nn, ops

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.mindspore import (
    AsyncSaveOnCpu,
    create_selective_checkpoint_contexts,
    framework_checkpoint,
)
from hyper_parallel.backends.mindspore.devices import backend_for
from hyper_parallel.backends.mindspore.graph import is_in_backward
from hyper_parallel.backends.mindspore.saved_tensors import MindSporePacker
from hyper_parallel.core.activation_checkpoint.packed import KeptValue, SwappedValue
from hyper_parallel.core.activation_checkpoint.policy import ActivationPolicy
from hyper_parallel.core.activation_checkpoint.swap import Storage, SwapTensor
from hyper_parallel.errors import (
    ActivationError,
    InPlaceChangeError,
    PolicyError,
    ReplayMismatchError,
    SwapStateError,
    SwapStateWarning,
)
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.testing import SimulationError, simulated_accelerator

from .models import Block, Chain
from .scenario import batch

SMALL: dict[str, Any] = {"window_bytes": 0, "prefetch_bytes": 300}


def same(one: Any, two: Any) -> None:
    assert one.asnumpy().tobytes() == two.asnumpy().tobytes()


# ---------------------------------------------------------------------- lives


@pytest.mark.parametrize("wrap", [hp.swap_wrapper, lambda cell: hp.checkpoint_wrapper(cell, policy_fn=["Exp"])])
def test_a_graph_that_is_never_used_leaves_nothing_behind(wrap: Any) -> None:
    """Exp and tanh save their own output: a handle that held its history would be held by what it holds."""
    with simulated_accelerator(**SMALL) as sim:
        cell = wrap(lambda x: mint.tanh(mint.exp(x)) * x)
        cell.set_grad(True)
        out = cell(batch())
        assert sim.live_bytes > 0
        del out
        compat.end_failed_gradient()
        gc.collect()
        assert (sim.live_bytes, hp.stats().live_records) == (0, 0)


def test_device_bytes_are_gone_after_forward_and_the_callers_batch_is_not() -> None:
    x = batch(64)
    seen: list[int] = []
    with simulated_accelerator(**SMALL) as sim:

        def forward(x: Any) -> Any:
            for _ in range(4):
                x = mint.exp(x * 0.1)
            return x

        def loss(x: Any) -> Any:
            out = hp.swap(forward, x)
            seen.append(sim.live_bytes)
            return out.sum()

        gradient = mindspore.grad(loss)(x)
    assert seen == [x.nbytes]  # the output that the caller holds, of four that were saved
    same(gradient, mindspore.grad(lambda x: forward(x).sum())(x))
    same(x, batch(64))


def test_bytes_saved_several_times_are_copied_once_while_they_are_here() -> None:
    def forward(x: Any) -> Any:
        h = mint.exp(x)
        return h * h[1:3].sum() + h.T.sum() * h

    with simulated_accelerator(window_bytes=4096) as sim:
        gradient = mindspore.grad(lambda x: hp.swap(forward, x).sum())(batch())
        stats = hp.stats()
    assert stats.shared_copies >= 2
    assert sim.swapped_bytes == stats.swapped_out_bytes
    same(gradient, mindspore.grad(lambda x: forward(x).sum())(batch()))


def test_weights_and_their_views_stay() -> None:
    """On the CPU most ops copy a view before they save it, so the hook is asked by hand for the view itself."""
    linear = mint.nn.Linear(8, 8, bias=False)
    with simulated_accelerator(window_bytes=10**6):
        found = mindspore.grad(lambda x: hp.swap(linear, x).sum())(batch())
        assert hp.stats().kept_count == {"parameter": 1}
        packer = MindSporePacker(parameters=linear.get_parameters())
        with mindspore._no_grad():
            view = linear.weight.view(64)
        assert view.param_info is None
        assert isinstance(packer.pack(view), KeptValue)
        assert hp.stats().kept_count == {"parameter": 2}
        assert isinstance(MindSporePacker().pack(mint.exp(batch())), SwappedValue)
    same(found, mindspore.grad(lambda x: linear(x).sum())(batch()))


def test_small_values_and_values_of_the_host_stay_and_are_counted() -> None:
    with simulated_accelerator(min_bytes=10**6):
        mindspore.grad(lambda x: hp.swap(mint.exp, x).sum())(batch())
        assert hp.stats().kept_count["below_min_bytes"] >= 1
    hp.SwapManager().reset()
    with hp.configure(hp.SwapConfig(min_bytes=0)):
        mindspore.grad(lambda x: hp.swap(mint.exp, x).sum())(batch())
    assert hp.stats().kept_count["already_on_host"] >= 1


def test_a_missing_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge of the simulation is awake: an engine that does not order its reads is found out."""
    from hyper_parallel.core.activation_checkpoint.adapter import StreamCompletion

    monkeypatch.setattr(StreamCompletion, "order", lambda self, stream: None)

    def step() -> None:
        with simulated_accelerator(**SMALL):
            mindspore.grad(lambda x: hp.swap(lambda x: mint.exp(mint.exp(x)), x).sum())(batch())

    with pytest.raises(SimulationError, match=r"simulated accelerator: .*(nothing orders|may still be using)"):
        step()


def test_far_memory_that_is_written_under_a_copy_back_is_caught() -> None:
    """Both sides of a copy are judged: the bytes of the host as well as those of the device."""
    with simulated_accelerator(**SMALL):
        device = backend_for("CPU", hp.SwapConfig())
        host, one, two = device.allocate_host(64, pinned=True), device.allocate(32), device.allocate(32)
        loads, offloads = device.new_stream(), device.new_stream()
        device.wait_event(loads, device.record_event(device.current_stream()))
        device.wait_event(offloads, device.record_event(device.current_stream()))
        device.copy(one, host[:32], loads)
        device.copy(host[32:], two, offloads)  # the other half
        with pytest.raises(SimulationError, match=r"copy out on .* writes bytes that copy back on .* reads"):
            device.copy(host[16:48], two, offloads)
        device.synchronize_event(device.record_event(loads))
        device.synchronize_event(device.record_event(offloads))
        device.wait_event(device.current_stream(), device.record_event(loads))
        device.wait_event(device.current_stream(), device.record_event(offloads))


def test_files_keep_values_of_the_host(tmp_path: Any) -> None:
    model = Chain([hp.swap_wrapper(Block()) for _ in range(3)])
    plain = mindspore.grad(lambda x: model(x).square().sum())(batch())
    with hp.configure(
        hp.SwapConfig(min_bytes=0, tail_bytes=0, window_bytes=0, tiers=("disk",), disk_path=str(tmp_path))
    ):
        found = mindspore.grad(lambda x: model(x).square().sum())(batch())
    same(found, plain)
    assert hp.stats().swapped_in_bytes > 0


# ---------------------------------------------------------------------- changes in place


@pytest.mark.parametrize("settings", [{"window_bytes": 0}, {"window_bytes": 10**6}, {"tail_bytes": 10**6}])
def test_a_change_after_a_save_raises_as_the_plain_step_does(settings: dict[str, Any]) -> None:
    def forward(x: Any) -> Any:
        h = x * 2
        out = h * h
        h.copy_(x)
        return out.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mindspore.grad(forward)(batch())
    compat.end_failed_gradient()

    def step() -> None:
        with simulated_accelerator(**settings):
            mindspore.grad(lambda x: hp.swap(forward, x))(batch())

    with pytest.raises(
        InPlaceChangeError, match=r"swap of .*forward: a saved tensor \(4, 8\) Float32 was changed in place"
    ):
        step()


def test_a_small_value_that_stays_is_checked_too() -> None:
    def forward(x: Any) -> Any:
        h = x * 2
        out = h * h
        h.copy_(x)
        return out.sum()

    with pytest.raises(InPlaceChangeError, match=r"was changed in place after it was saved"):
        mindspore.grad(lambda x: hp.swap(forward, x))(batch())


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP])
@pytest.mark.parametrize("tail_bytes", [0, 10**6])
def test_a_change_of_a_kept_output_after_the_region_is_exact(policy: CheckpointPolicy, tail_bytes: int) -> None:
    linear = mint.nn.Linear(8, 8)

    def region(x: Any) -> tuple[Any, Any]:
        h = linear(mint.exp(x))
        return h, mint.sin(h * 2)

    def keeps_the_linear_layer(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op.name == "Dense" else CheckpointPolicy.MUST_RECOMPUTE

    def step(run: Any) -> Any:
        def loss(x: Any) -> Any:
            y, z = run(x)
            y.copy_(y * 3)
            return (y + z).sum()

        return mindspore.grad(loss)(batch())

    plain = step(region)
    with simulated_accelerator(**SMALL, tail_bytes=tail_bytes):
        same(step(lambda x: hp.checkpoint(region, x, policy_fn=keeps_the_linear_layer)), plain)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP])
@pytest.mark.parametrize("timing", ["lazy", "eager"])
def test_a_change_inside_a_region_is_applied_once_to_the_filed_value(policy: CheckpointPolicy, timing: str) -> None:
    linear = mint.nn.Linear(8, 8)

    def forward(x: Any) -> Any:
        h = linear(x)
        h.copy_(h + x)
        return mint.tanh(h)

    plain = mindspore.grad(lambda x: forward(x).sum())(batch())
    with simulated_accelerator(timing, **SMALL):
        region = lambda x: hp.checkpoint(forward, x, policy_fn=lambda *_, **__: policy)  # noqa: E731
        same(mindspore.grad(lambda x: region(x).sum())(batch()), plain)


# ---------------------------------------------------------------------- policies


@pytest.mark.parametrize("answer", ["save", 1, None, object()])
def test_an_unknown_answer_of_an_op_policy_names_the_op(answer: Any) -> None:
    with pytest.raises(PolicyError, match=r"checkpoint of .*: the policy answered .* for op Exp; known answers are"):
        mindspore.grad(lambda x: hp.checkpoint(mint.exp, x, policy_fn=lambda *_, **__: answer).sum())(batch())


@pytest.mark.parametrize("answer", list(ActivationPolicy))
def test_a_tensor_policy_may_answer_with_an_activation_policy(answer: ActivationPolicy) -> None:
    plain = mindspore.grad(lambda x: mint.exp(x).sum())(batch())
    with simulated_accelerator(window_bytes=4096):
        found = mindspore.grad(lambda x: hp.swap(lambda x: mint.exp(x), x, policy_fn=lambda tensor: answer).sum())(
            batch()
        )
        stats = hp.stats()
    same(found, plain)
    assert (stats.swapped_out_bytes > 0) is (answer is ActivationPolicy.SWAP)
    assert ("policy" in stats.kept_bytes) is (answer is ActivationPolicy.SAVE)


def test_a_second_forward_under_one_pair_of_contexts_is_refused() -> None:
    pair = create_selective_checkpoint_contexts(["Exp"])
    forward = lambda x: framework_checkpoint(lambda x: mint.exp(x), x, context_fn=lambda: pair).sum()  # noqa: E731
    mindspore.grad(forward)(batch())
    with pytest.raises(PolicyError, match="cannot run a second forward under this pair of contexts"):
        mindspore.grad(forward)(batch())


def test_an_unknown_answer_of_a_tensor_policy_names_the_tensor() -> None:
    with pytest.raises(PolicyError, match=r"swap of .*: the tensor policy answered 3 for a tensor \(4, 8\) Float32"):
        mindspore.grad(lambda x: hp.swap(lambda x: mint.exp(x), x, policy_fn=lambda tensor: 3).sum())(batch())
    with pytest.raises(PolicyError, match=r"the tensor policy must be a function of one tensor, got 'all'"):
        hp.swap(mint.exp, batch(), policy_fn="all")
    for door in (hp.swap, hp.checkpoint):
        with pytest.raises(TypeError, match=r"expected a cell or a callable, got 3"):
            door(3)


def test_bools_and_lists_of_names_and_primitives_are_policies() -> None:
    linear = nn.Dense(8, 8)
    forward = lambda x: mint.exp(linear(x))  # noqa: E731
    plain = mindspore.grad(lambda x: forward(x).sum())(batch())
    for policy in (["MatMul"], [ops.MatMul(), "Exp"], lambda ctx, op, *args, **kwargs: op.name == "MatMul"):
        hp.SwapManager().reset()
        found = mindspore.grad(lambda x, policy=policy: hp.checkpoint(forward, x, policy_fn=policy).sum())(batch())
        same(found, plain)
        assert hp.stats().saved_bytes >= batch().nbytes
    with pytest.raises(PolicyError, match=r"the list of ops to save holds 3; give ops"):
        mindspore.grad(lambda x: hp.checkpoint(forward, x, policy_fn=[3]).sum())(batch())


def test_a_policy_is_asked_once_per_op_and_sees_its_arguments() -> None:
    asked: list[Any] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append((op.name, ctx.is_recompute, [tuple(a.shape) for a in args if isinstance(a, mindspore.Tensor)]))
        return CheckpointPolicy.MUST_RECOMPUTE

    norm = nn.LayerNorm((8,))
    mindspore.grad(lambda x: hp.checkpoint(lambda x: mint.exp(norm(x)).T, x, policy_fn=policy).sum())(batch())
    assert asked == [("LayerNorm", False, [(4, 8), (8,), (8,)]), ("Exp", False, [(4, 8)])]
    assert hp.stats().replayed_ops["view"] == 1


def test_a_replay_that_runs_other_ops_names_both_sides() -> None:
    def forward(x: Any) -> Any:
        for _ in range(2 if is_in_backward() else 1):
            x = mint.exp(x)
        return x

    with pytest.raises(ReplayMismatchError, match=r"the replay ran Exp number 2 .*, but forward ran it 1 times"):
        mindspore.grad(lambda x: hp.checkpoint(forward, x, policy_fn=["Exp"]).sum())(batch())


# ---------------------------------------------------------------------- random ops


@pytest.mark.parametrize("answer", list(CheckpointPolicy))
def test_random_ops_are_kept_whatever_the_policy_says(answer: CheckpointPolicy) -> None:
    def gradient(region: Any) -> Any:
        mindspore.set_seed(3)
        drop = nn.Dropout(p=0.5).set_train()  # each counts its own draws

        def forward(x: Any) -> Any:
            return drop(mint.exp(x)) * ops.randn(4, 8) * x

        return mindspore.grad(lambda x: region(forward, x).sum())(batch())

    plain = gradient(lambda forward, x: forward(x))
    with simulated_accelerator(**SMALL):
        found = gradient(lambda forward, x: hp.checkpoint(forward, x, policy_fn=lambda *_, **__: answer))
    same(found, plain)
    recomputes = answer in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    assert hp.stats().overruled.get("random_op_kept", 0) == (2 if recomputes else 0)


def test_a_replay_does_not_move_the_random_stream() -> None:
    numbers = []
    for wrap in (lambda f: f, lambda f: lambda x: hp.checkpoint(f, x)):
        mindspore.set_seed(3)
        mindspore.grad(lambda x, wrap=wrap: wrap(lambda x: x * ops.randn(4, 8))(x).sum())(batch())
        numbers.append(ops.randn(3).asnumpy().tolist())
    assert numbers[0] == numbers[1]


def test_drawing_in_place_is_refused() -> None:
    from hyper_parallel.backends.mindspore.selective import create_selective_checkpoint_contexts

    class Draw:
        name = "InplaceNormal"

    forward, _ = create_selective_checkpoint_contexts([], where="checkpoint of f")
    with pytest.raises(
        ActivationError, match=r"checkpoint of f: cannot recompute InplaceNormal; because it draws random"
    ):
        forward.__ms_dispatch__(Draw(), (batch(),))


# ---------------------------------------------------------------------- marks, groups and the explicit interface


@pytest.mark.parametrize("is_inside", [True, False])
def test_marked_tensors_leave_and_carry_their_tag(is_inside: bool) -> None:
    def forward(x: Any) -> Any:
        h = hp.swap_tensor_wrapper({"h": [mint.exp(x)]}, "hidden")["h"][0]
        return (mint.tanh(h) * h).sum()

    plain = mindspore.grad(forward)(batch())
    hp.SwapManager().reset()
    keep = lambda tensor: CheckpointPolicy.MUST_SAVE  # noqa: E731
    run = (lambda x: hp.swap(forward, x, policy_fn=keep)) if is_inside else forward
    with simulated_accelerator(**SMALL):
        for _ in range(2):
            same(mindspore.grad(run)(batch()), plain)
        stats = hp.stats()
    assert stats.bytes_by_tag["hidden"] >= batch().nbytes
    mindspore.grad(lambda x: mint.exp(x).sum())(batch())  # the hooks at the bottom leave when nothing is marked
    assert not compat.has_saved_tensors_hooks()
    with pytest.raises(TypeError, match=r"swap_tensor_wrapper: the tag must be a string or None, got 3"):
        hp.swap_tensor_wrapper(batch(), 3)


def test_a_swap_tensor_lives_through_its_states() -> None:
    with simulated_accelerator() as sim:
        value = mint.exp(batch())
        expected = value.asnumpy().copy()
        tensor = SwapTensor(value.T, "turned")
        assert (tensor.state, tensor.storage_size, tensor.is_slice_tensor) == ("device", value.nbytes, False)
        del value
        tensor.async_offload()
        assert tensor.state == "d2h"
        tensor.wait_offload()
        tensor.wait_offload()
        assert (tensor.state, sim.live_bytes) == ("host", 0)
        np.testing.assert_array_equal(tensor.val_cpu.view(np.float32).reshape(4, 8), expected)
        with pytest.raises(SwapStateError, match=r"SwapTensor 'turned': cannot give its value while 'host'"):
            tensor.get_val()
        with pytest.warns(SwapStateWarning, match=r"async_offload\(\) was called while 'host'"):
            tensor.async_offload()
        tensor.resize_device_storage()
        tensor.async_load()
        assert tensor.state == "h2d"
        tensor.wait_load()
        assert (tensor.state, tensor.get_val().stride()) == ("device", [1, 8])
        np.testing.assert_array_equal(tensor.get_val().asnumpy(), expected.T)
    assert SwapTensor(3, "number").state == "non_tensor"
    assert SwapTensor(batch(), "on the host").state == "non_tensor"


def test_a_swap_tensor_that_was_changed_is_not_offloaded() -> None:
    with simulated_accelerator():
        value = mint.exp(batch())
        tensor = SwapTensor(value, "changed")
        value.copy_(value * 2)
        with pytest.raises(
            InPlaceChangeError, match=r"SwapTensor 'changed': cannot be offloaded, because it was changed"
        ):
            tensor.async_offload()


def test_storages_and_groups_move_together_and_shared_bytes_once() -> None:
    manager = hp.SwapManager()
    with simulated_accelerator() as sim:
        value, output = mint.exp(batch()), mint.tanh(batch())
        storage = Storage()
        storage.swap_storage["Exp"] = [SwapTensor(value, "a"), (SwapTensor(value.T, "b"),), SwapTensor(output, "out")]
        manager.add_storage("layer", storage)
        manager.protect_output_tensors("layer", {"out": output})
        with pytest.raises(
            RuntimeError, match=r"SwapGroup 'layer': wait_offload\(\) was called before launch_offload\(\)"
        ):
            manager.wait_offload("layer")
        manager.launch_offload("layer")
        manager.wait_offload("layer")
        expected = value.asnumpy().copy()
        assert sim.swapped_bytes == value.nbytes
        assert [tensor.state for tensor in storage.iter_swap_tensors()] == ["host", "device", "device"]
        manager.launch_load("layer")
        manager.wait_load("layer")
        first, second, third = storage.iter_swap_tensors()
        np.testing.assert_array_equal(first.get_val().asnumpy(), expected)
        np.testing.assert_array_equal(second.get_val().asnumpy(), expected.T)
        assert third.get_val() is output
    with pytest.raises(RuntimeError, match=r"SwapManager: unknown group 'other'; known groups: 'layer'"):
        manager.launch_offload("other")


def test_a_declared_chain_is_seen_in_the_events() -> None:
    layers = [hp.swap_wrapper(lambda x, k=k: mint.exp(mint.tanh(x) * (0.1 * k))) for k in (1, 2, 3)]
    manager = hp.SwapManager()
    for first, second in itertools.pairwise(layers):
        assert manager.set_forward_prefetch_layer(first, second) is manager.set_forward_prefetch_layer(first, second)

    def forward(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x.sum()

    with simulated_accelerator(tail_bytes=10**6, window_bytes=10**6) as sim:
        found = mindspore.grad(forward)(batch())
        stats = hp.stats()
    forward_events = [what for what, _ in sim.events[: sim.events.index(("use", batch().nbytes))]]
    # After layer 1 its inner value leaves; after layer 2 it is gone, and that of layer 2 leaves; the last stays.
    assert forward_events.count("offload") >= 2
    assert forward_events[:2] == ["offload", "drop"] or forward_events[:3] == ["offload", "offload", "drop"]
    assert stats.kept_count["last_group"] >= 1
    assert stats.misses == 0
    same(found, mindspore.grad(forward)(batch()))


def test_the_framework_context_serves_alone() -> None:
    with simulated_accelerator(**SMALL) as sim:

        def forward(x: Any) -> Any:
            with AsyncSaveOnCpu():
                return mint.exp(mint.exp(x)).sum()

        found = mindspore.grad(forward)(batch())
    assert sim.swapped_bytes > 0
    same(found, mindspore.grad(lambda x: mint.exp(mint.exp(x)).sum())(batch()))
