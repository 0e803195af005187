"""Graph mode, ``@jit``, two threads, keywords of torch: served, or refused in words that name what to do."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import nn, ops

import hyper_parallel as hp
from hyper_parallel.core.overlap import HookCoordinator
from hyper_parallel.errors import CaptureError, UnsupportedMemberError
from hyper_parallel.platform.mindspore import compat


class Net(nn.Cell):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.inner = wrap(nn.SequentialCell(nn.Dense(8, 8), nn.ReLU()))

    def construct(self, x: Any) -> Any:
        return self.inner(x).sum()


WRAPPERS = {"checkpoint": hp.checkpoint_wrapper, "swap": hp.swap_wrapper}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # a failed compilation leaves files
    yield
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    compat.end_failed_gradient()


def batch() -> Any:
    return ops.ones((2, 8))


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_graph_mode_around_a_wrapped_cell_names_pynative(name: str) -> None:
    net = Net(WRAPPERS[name])
    x = batch()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    with pytest.raises(
        CaptureError, match=r"a wrapped cell: cannot run in graph mode or inside @jit;.*PyNative mode only"
    ):
        mindspore.value_and_grad(net, None, net.trainable_params())(x)


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_jit_around_a_wrapped_cell_names_pynative(name: str) -> None:
    net = Net(WRAPPERS[name])

    @mindspore.jit
    def step(x: Any) -> Any:
        return net(x)

    with pytest.raises(
        CaptureError, match=r"a wrapped cell: cannot run in graph mode or inside @jit;.*PyNative mode only"
    ):
        step(batch())


def test_jit_around_the_functions_names_pynative() -> None:
    net = nn.Dense(8, 8)

    @mindspore.jit
    def checkpointed(x: Any) -> Any:
        return hp.checkpoint(net, x)

    @mindspore.jit
    def swapped(x: Any) -> Any:
        return ops.relu(hp.swap(net, x))

    for function in (checkpointed, swapped):
        with pytest.raises(
            RuntimeError, match=r"hyper_parallel: checkpoint, swap .* cannot run in graph mode or inside @jit"
        ):
            function(batch())


@pytest.mark.parametrize("name", ["checkpoint", "swap"])
def test_the_functions_in_graph_mode_name_pynative(name: str) -> None:
    net, x = nn.Dense(8, 8), batch()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    with pytest.raises(CaptureError, match=rf"{name}: cannot run in graph mode;.*PyNative mode only"):
        getattr(hp, name)(net, x)


def test_the_functions_keep_their_signatures() -> None:
    assert list(inspect.signature(hp.checkpoint).parameters)[:4] == ["function", "args", "swap_inputs", "policy_fn"]
    assert list(inspect.signature(hp.swap).parameters) == ["function", "args", "policy_fn", "swap_config", "kwargs"]


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_a_jitted_cell_inside_a_wrapper_gives_the_same_gradients(name: str) -> None:
    plain = Net(lambda cell: cell)
    weights = [parameter.asnumpy().copy() for parameter in plain.trainable_params()]
    loss, gradients = mindspore.value_and_grad(plain, None, plain.trainable_params())(batch())
    inner = nn.SequentialCell(nn.Dense(8, 8), nn.ReLU())
    inner.construct = mindspore.jit(inner.construct)
    net = Net(lambda cell: WRAPPERS[name](inner))
    for parameter, weight in zip(net.trainable_params(), weights):
        parameter.set_data(mindspore.Tensor(weight))
    again, others = mindspore.value_and_grad(net, None, net.trainable_params())(batch())
    assert loss.asnumpy() == again.asnumpy()
    for one, other in zip(gradients, others):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


# ---------------------------------------------------------------------- two threads


def test_a_coordinator_of_two_threads_is_refused_and_nobody_waits() -> None:
    platform = hp.get_platform()
    coordinator = HookCoordinator(timeout_s=60)
    coordinator.enable()
    thread = threading.Thread(
        target=lambda: platform.differentiable_sync_hook(batch(), "B", coordinator), name="first half"
    )
    thread.start()
    while coordinator._waiting is None:
        thread.join(0.01)
    with pytest.raises(
        UnsupportedMemberError, match=r"'first half' and 'MainThread' share a coordinator.*not safe in two"
    ):
        platform.differentiable_sync_hook(batch(), "A", coordinator)
    thread.join(60)
    assert not thread.is_alive()
    assert not coordinator.is_enabled()


def test_a_coordinator_of_a_thread_that_ended_serves_the_next() -> None:
    platform, coordinator = hp.get_platform(), HookCoordinator()
    thread = threading.Thread(target=lambda: platform.differentiable_sync_hook(batch(), "A", coordinator))
    thread.start()
    thread.join(60)
    platform.differentiable_sync_hook(batch(), "A", coordinator)


# ---------------------------------------------------------------------- keywords of torch's checkpoint


def test_the_defaults_of_torchs_own_keywords_change_nothing() -> None:
    net = nn.Dense(8, 8)

    def gradients(**keywords: Any) -> Any:
        return mindspore.grad(lambda x: hp.checkpoint(net, x, **keywords).sum(), None, net.trainable_params())(batch())

    for one, other in zip(gradients(), gradients(debug=False, determinism_check="default", preserve_rng_state=True)):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


@pytest.mark.parametrize("keywords", [{"debug": True}, {"determinism_check": "none"}, {"use_reentrant": True}])
def test_keywords_that_mindspore_cannot_honour_are_refused_by_name(keywords: dict[str, Any]) -> None:
    (name,) = keywords
    with pytest.raises(ValueError, match=name):
        hp.checkpoint(nn.Dense(8, 8), batch(), **keywords)
