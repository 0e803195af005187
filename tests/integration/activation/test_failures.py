"""Failures B1 to B16: the right result, or the right error, where other designs break."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from contextvars import copy_context
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch import ActivationPolicy
from hyper_parallel.errors import SwapImpossibleError, SwapStateError
from hyper_parallel.testing import simulated_accelerator

from .helpers import collector_off, count_of, same_gradients, step_gradients, storage_ref
from .kinds import swap_everything
from .models import WIDTH, Block, Bottle, Chain
from .scenario import batch

TIGHT: dict[str, Any] = {"window_bytes": 0, "prefetch_bytes": 0}
"""Bytes go as soon as they may and come back when they are asked for."""


def declared(model: Chain) -> Chain:
    for first, second in zip(model.layers[:-1], model.layers[1:]):
        hp.SwapManager().set_forward_prefetch_layer(first, second)
    return model


def wrapped_twin(model: Chain, wrapper: Any = hp.swap_wrapper) -> Chain:
    """The same weights, wrapped."""
    twin = copy.deepcopy(model)
    return Chain([wrapper(layer) for layer in twin.layers])


class Tabled(nn.Module):
    """Layers that all read one table."""

    def __init__(self, wrapper: Any, depth: int = 4, **keywords: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [wrapper(_Times(), **keywords) if wrapper is not None else _Times() for _ in range(depth)]
        )

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, table)
        return x


class _Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * table.mean(0).sin() + (table * x.mean()).sum()


def _twins(wrapper: Any, **keywords: Any) -> tuple[Tabled, Tabled]:
    plain, ours = Tabled(None), Tabled(wrapper, **keywords)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def test_b01_a_table_that_every_layer_reads_is_copied_once_and_stays_readable() -> None:
    plain, ours = _twins(hp.swap_wrapper)
    table = torch.rand(13, WIDTH)
    before = table.clone()
    expected = step_gradients(plain, batch(), table)
    with simulated_accelerator(**TIGHT) as sim:
        x = batch()
        out = ours(x, table)
        assert table.untyped_storage().nbytes() == 13 * WIDTH * 4
        assert torch.equal(table, before)
        out.pow(2).mean().backward()
        assert torch.equal(table, before)
        assert count_of(sim.events, "offload", table.nbytes) == 1
        assert hp.stats().shared_copies >= 3
        same_gradients(step_gradients(ours, batch(), table), expected)


def test_b02_an_input_of_several_checkpointed_layers_is_copied_once_and_stays_readable() -> None:
    plain, ours = _twins(hp.checkpoint_wrapper, swap_inputs=True)
    table = torch.rand(13, WIDTH)
    before = table.clone()
    with simulated_accelerator(**TIGHT) as sim:
        got = step_gradients(ours, batch(), table)
        assert count_of(sim.events, "offload", table.nbytes) == 1
    assert torch.equal(table, before)
    same_gradients(got, step_gradients(plain, batch(), table))


def test_b03_an_output_used_again_much_later_is_intact() -> None:
    plain = Bottle([Block() for _ in range(4)], [Block() for _ in range(4)])
    ours = copy.deepcopy(plain)
    ours.down = nn.ModuleList([hp.swap_wrapper(layer) for layer in ours.down])
    ours.up = nn.ModuleList([hp.swap_wrapper(layer) for layer in ours.up])
    with simulated_accelerator(**TIGHT) as sim:
        got = step_gradients(ours, batch())
        assert sim.swapped_bytes > 0
    same_gradients(got, step_gradients(plain, batch()))


def test_b04_backward_from_a_middle_layer_only() -> None:
    plain = Chain([Block() for _ in range(4)])
    ours = declared(wrapped_twin(plain))

    def middle_only(model: Chain) -> list[Any]:
        x = batch()
        middle = model.layers[1](model.layers[0](x))
        last = model.layers[3](model.layers[2](middle))
        middle.pow(2).sum().backward(retain_graph=True)
        first = x.grad.clone()
        (middle.sum() + last.sum()).backward()
        return [first, x.grad, middle.detach(), last.detach()]

    with simulated_accelerator(**TIGHT):
        got = middle_only(ours)
    same_gradients(got, middle_only(plain))


def test_b05_the_callers_batch_is_not_touched() -> None:
    model = wrapped_twin(Chain([Block() for _ in range(3)]), lambda m: hp.checkpoint_wrapper(m, swap_inputs=True))
    with simulated_accelerator(**TIGHT) as sim:
        x = batch(grad=False)
        before = x.clone()
        first = step_gradients(model, x)
        assert count_of(sim.events, "offload", x.nbytes) > 0
        assert x.untyped_storage().nbytes() == x.nbytes
        assert torch.equal(x, before)
        same_gradients(step_gradients(model, x), first)


class _Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return (q * k).sin() * v


def _keep_the_middle_chunk(tensor: torch.Tensor) -> Any:
    return ActivationPolicy.SAVE if tensor.storage_offset() == WIDTH else ActivationPolicy.SWAP


@pytest.mark.parametrize("kept_offset", [0, WIDTH, 2 * WIDTH])
def test_b06_a_storage_one_of_whose_views_must_stay_stays_whole(kept_offset: int) -> None:
    plain = _Chunked()

    def policy(tensor: torch.Tensor) -> Any:
        return ActivationPolicy.SAVE if tensor.storage_offset() == kept_offset else CheckpointPolicy.MUST_SWAP

    ours = hp.swap_wrapper(copy.deepcopy(plain), policy)
    with simulated_accelerator(tail_bytes=10**6) as sim:
        got = step_gradients(ours, batch())
        assert count_of(sim.events, "offload", 4 * 3 * WIDTH * 4) == 0
    with simulated_accelerator(**TIGHT):
        same_gradients(step_gradients(ours, batch()), got)
    same_gradients(got, step_gradients(plain, batch()))


def test_b07_an_expanded_tensor_travels_as_its_dense_base() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        mask = x.mean(0).exp().expand(64, WIDTH)
        return (x.mean() * mask).sum() + (mask * mask).sum()

    one, two = batch(), batch()
    function(one).backward()
    with simulated_accelerator(**TIGHT) as sim:
        hp.swap(function, two).backward()
        assert sim.swapped_bytes > 0
        assert max(size for what, size in sim.events if what == "offload") <= one.nbytes
    assert torch.equal(one.grad, two.grad)


def test_b08_sparse_and_nested_values_stay_and_are_counted() -> None:
    sparse = torch.eye(4).to_sparse()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(sparse, x.exp()).sum()

    one, two = batch(), batch()
    function(one).backward()
    with simulated_accelerator(**TIGHT):
        hp.swap(function, two).backward()
        assert hp.stats().kept_count["no_plain_storage"] >= 1
        nested = torch.nested.nested_tensor(
            [torch.rand(2, 3), torch.rand(1, 3)], requires_grad=True, layout=torch.jagged
        )
        hp.swap(lambda n: (n * n).sin().values().sum(), nested).backward()
        assert nested.grad is not None
    assert torch.equal(one.grad, two.grad)


def test_b08_must_swap_of_a_sparse_output_raises_naming_the_op_and_the_next_step_works() -> None:
    linear = nn.Linear(WIDTH, WIDTH)

    class ToSparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.makes_sparse = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = linear(x)
            return torch.sparse.sum(out.relu().to_sparse()) if self.makes_sparse else out

    layer = hp.checkpoint_wrapper(ToSparse(), policy_fn=swap_everything)
    with simulated_accelerator(**TIGHT):
        with pytest.raises(
            SwapImpossibleError, match=r"checkpoint of ToSparse: cannot swap the output of aten\._?to_sparse"
        ):
            layer(batch())
        layer.makes_sparse = False
        got = step_gradients(layer, batch())
    same_gradients(got[-2:], step_gradients(linear, batch())[-2:])


def test_b09_an_op_without_a_tensor_output_passes_through() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * x.sum().item() + float(x.detach().max())

    one, two = batch(), batch()
    function(one).sum().backward()
    with simulated_accelerator(**TIGHT):
        hp.checkpoint(function, two, policy_fn=swap_everything).sum().backward()
    assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("wrapper", [hp.swap_wrapper, lambda m: hp.checkpoint_wrapper(m, policy_fn=swap_everything)])
def test_b10_two_threads_at_once(wrapper: Any) -> None:
    """Each thread trains a model of its own; they meet after every forward, so that both graphs are alive."""
    plains = [Chain([Block() for _ in range(3)]) for _ in range(2)]
    ours = [wrapped_twin(model, wrapper) for model in plains]
    results: list[list[Any]] = [[], []]
    barrier = threading.Barrier(2, timeout=600)

    def train(index: int) -> None:
        for seed in range(5):
            x = batch(seed=seed)
            out = ours[index](x)
            barrier.wait()
            out.pow(2).mean().backward()
            results[index].append(x.grad)

    with simulated_accelerator(window_bytes=300, prefetch_bytes=300) as sim:
        threads = [threading.Thread(target=copy_context().run, args=(train, index)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sim.swapped_bytes > 0
    for index, plain in enumerate(plains):
        expected = []
        for seed in range(5):
            x = batch(seed=seed)
            plain(x).pow(2).mean().backward()
            expected.append(x.grad)
        same_gradients(results[index], expected)
        same_gradients([p.grad for p in ours[index].parameters()], [p.grad for p in plain.parameters()])


def test_b11_a_deepcopied_teacher_runs_between_forward_and_backward() -> None:
    plain = Chain([Block() for _ in range(3)])
    ours = declared(wrapped_twin(plain))

    def distil(student: Chain) -> list[Any]:
        teacher = copy.deepcopy(student)
        x = batch()
        out = student(x)
        theirs = teacher(batch(seed=2))
        (out.pow(2).sum()).backward()
        theirs.sum().backward()
        return [x.grad, *(p.grad for p in student.parameters()), *(p.grad for p in teacher.parameters())]

    with simulated_accelerator(**TIGHT):
        got = distil(ours)
        assert hp.stats().live_records == 0
    same_gradients(got, distil(plain))


def test_b12_no_group_name_is_left_behind() -> None:
    manager = hp.SwapManager()
    head = nn.Linear(WIDTH, WIDTH)
    with simulated_accelerator(**TIGHT) as sim:
        model = declared(Chain([hp.swap_wrapper(Block()) for _ in range(2)]))
        out = model(batch())
        assert manager.get_current_group_name() == ""
        before = count_of(sim.events, "offload")
        loss = hp.swap(lambda value: head(value.exp()).sum(), out)
        assert count_of(sim.events, "offload") > before, "what follows the last layer is not in the last layer's group"
        loss.backward()
        with pytest.raises(RuntimeError, match="size"):
            model(torch.rand(4, WIDTH + 1))
        assert manager.get_current_group_name() == ""


def test_b13_swap_works_without_a_chain_and_keeps_nothing() -> None:
    layer = hp.swap_wrapper(Block())
    with simulated_accelerator(**TIGHT) as sim:
        for _ in range(5):
            layer(batch()).sum().backward()
            assert hp.stats().live_records == 0
        assert sim.swapped_bytes > 0


def test_b14_a_deleted_model_leaves_no_group_and_no_hook() -> None:
    manager = hp.SwapManager()
    with simulated_accelerator(**TIGHT), collector_off():
        model = declared(Chain([hp.swap_wrapper(Block()) for _ in range(3)]))
        layer = model.layers[1]
        model(batch()).sum().backward()
        chain = manager.set_forward_prefetch_layer(model.layers[0], layer)
        assert manager.set_forward_prefetch_layer(model.layers[0], layer) is chain
        del model, chain
        layer_ref = storage_ref(layer.up.weight)
        del layer
        assert layer_ref.expired()
        with pytest.raises(SwapStateError, match="unknown group 'gone'; known groups: none"):
            manager.launch_offload("gone")


def test_b14_a_removed_chain_takes_its_hooks_along() -> None:
    first, second = Block(), Block()
    chain = hp.SwapManager().set_forward_prefetch_layer(first, second)
    assert first._forward_hooks
    assert second._forward_pre_hooks
    chain.remove()
    chain.remove()
    assert not first._forward_hooks
    assert not second._forward_pre_hooks


def test_b15_a_wrapped_and_chained_model_pickles() -> None:
    model = declared(Chain([hp.swap_wrapper(Block()), hp.checkpoint_wrapper(Block(), policy_fn=swap_everything)]))
    expected = model(batch())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(batch()), expected)
        with simulated_accelerator(**TIGHT):
            twin(batch()).sum().backward()


def test_b16_no_framework_is_imported_before_it_is_needed_and_none_is_patched() -> None:
    code = (
        "import sys, hyper_parallel, hyper_parallel.core.activation_checkpoint.swap;"
        "assert 'torch' not in sys.modules and 'mindspore' not in sys.modules;"
        "import torch; from torch.nn import modules; from torch.utils.hooks import BackwardHook;"
        "before = dict(vars(BackwardHook)), modules.module.BackwardHook, torch.nn.Module.__call__, torch.Tensor.backward;"
        "hyper_parallel.swap_wrapper(torch.nn.Linear(2, 2))(torch.rand(2, 2)).sum().backward();"
        "after = dict(vars(BackwardHook)), modules.module.BackwardHook, torch.nn.Module.__call__, torch.Tensor.backward;"
        "assert before == after; print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "fine", done.stderr


def test_b16_an_unknown_platform_name_is_an_error() -> None:
    code = "import hyper_parallel as hp; hp.swap(lambda: None)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=600, env={"HYPER_PARALLEL_PLATFORM": "toch", "PATH": ""},
    )  # fmt: skip
    assert done.returncode != 0
    assert "toch" in done.stderr
    assert "torch" in done.stderr
