"""Streams, gradient handles, autograd modes, and the activation members."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import hyper_parallel as hp
import hyper_parallel.platform.platform as platform_module
from hyper_parallel.core.activation_checkpoint.swap import Storage, SwapManager, SwapTensor
from hyper_parallel.errors import UnsupportedMemberError
from hyper_parallel.platform.platform import Platform
from hyper_parallel.testing import simulated_accelerator

from .marks import covers


@covers("new_stream", "get_current_stream", "get_stream_context")
def test_a_stream_is_current_inside_its_context_only(platform):
    outer, stream, inner = platform.get_current_stream(), platform.new_stream(), platform.new_stream()
    context = platform.get_stream_context()

    def leave_by_error():
        with context(inner):
            assert platform.get_current_stream() == inner
            raise KeyError("leave")

    with context(stream):
        assert platform.get_current_stream() == stream
        with pytest.raises(KeyError, match="leave"):
            leave_by_error()
        assert platform.get_current_stream() == stream
    assert platform.get_current_stream() == outer


@covers("get_stream_context", "get_current_stream")
def test_the_current_stream_belongs_to_a_thread(platform):
    stream = platform.new_stream()
    seen = []
    with platform.get_stream_context()(stream):
        thread = threading.Thread(target=lambda: seen.append(platform.get_current_stream() == stream))
        thread.start()
        thread.join()
    assert seen == [False]


@covers("new_event", "new_stream")
def test_events_order_streams(platform, adapter):
    first, second, event = platform.new_stream(), platform.new_stream(), platform.new_event()
    with platform.get_stream_context()(first):
        value = adapter.tensor([1.0, 2.0]) * 3
        event.record(first)
    second.wait_event(event)
    second.wait_stream(first)
    with platform.get_stream_context()(second):
        total = value.sum()
    recorded = second.record_event()
    recorded.synchronize()
    assert recorded.query()
    assert second.query()
    assert adapter.numpy(total) == 9.0


@covers("get_stream_context")
def test_something_else_is_no_stream(platform):
    with pytest.raises(TypeError, match=r"get_stream_context: expected a stream of new_stream\(\), got str"):
        platform.get_stream_context()("stream")


class Handle:
    """A reduction in flight that tells what happens to it, and where."""

    def __init__(self, platform, log, name, error=None):
        self.platform, self.log, self.name, self.error = platform, log, name, error

    def wait(self):
        if self.error is not None:
            raise self.error
        on_gradient_stream = self.platform.get_current_stream() == Platform.grad_sync_stream
        self.log.append((f"wait {self.name}", on_gradient_stream))

    def post(self):
        on_gradient_stream = self.platform.get_current_stream() == Platform.grad_sync_stream
        self.log.append((f"post {self.name}", on_gradient_stream))


@covers("set_grad_reduce_handle", "wait_grad_handle", "_process_current_handle")
def test_one_handle_is_in_flight_and_the_previous_is_finished_first(platform):
    log: list[tuple[str, bool]] = []
    first, second = Handle(platform, log, "a"), Handle(platform, log, "b")
    platform.set_grad_reduce_handle(first, first.post)
    assert Platform.current_grad_handle is first
    assert log == []
    platform.set_grad_reduce_handle(second)
    assert log == [("wait a", True), ("post a", True)]
    assert Platform.current_grad_handle is second
    assert Platform.post_grad_handle_process is None
    platform.wait_grad_handle()
    assert log == [("wait a", True), ("post a", True), ("wait b", True)]
    assert Platform.current_grad_handle is None
    platform.wait_grad_handle()
    platform._process_current_handle()
    assert len(log) == 3


@covers("set_grad_reduce_handle", "wait_grad_handle")
def test_every_platform_shares_the_handle_that_is_in_flight(platform):
    class Derived(type(platform)):
        pass

    log: list[tuple[str, bool]] = []
    handle = Handle(platform, log, "a")
    Derived().set_grad_reduce_handle(handle)
    for reader in (Platform, type(platform), platform, Derived):
        assert reader.current_grad_handle is handle
    Platform.wait_grad_handle.__func__(platform)
    assert log == [("wait a", True)]
    state = {"current_grad_handle", "post_grad_handle_process", "grad_sync_stream"}
    assert not [owner for owner in Derived.__mro__ if owner is not Platform and state & set(vars(owner))]


@covers("new_stream", "set_grad_reduce_handle", "wait_grad_handle")
def test_a_subclass_may_override_new_stream_as_an_instance_method(platform, monkeypatch):
    monkeypatch.setattr(Platform, "grad_sync_stream", None)

    class Counting(type(platform)):
        def __init__(self):
            self.made = []

        def new_stream(self):
            self.made.append(super().new_stream())
            return self.made[-1]

    counting, log = Counting(), []
    counting.set_grad_reduce_handle(Handle(platform, log, "a"))
    counting.wait_grad_handle()
    assert counting.made == [Platform.grad_sync_stream]
    assert log == [("wait a", True)]


@covers("new_stream")
@pytest.mark.parametrize("timing", ["lazy", "random", "eager"])
def test_copies_go_to_a_stream_of_the_platform_under_simulation(platform, adapter, monkeypatch, timing):
    monkeypatch.setattr(platform_module, "platform", platform)
    with hp.configure(hp.SwapConfig(min_bytes=0)), simulated_accelerator(timing):
        value = adapter.tensor(np.ones((8, 8)), "float32") * 3
        moved, storage, stream = SwapTensor(value, "mul"), Storage(), platform.new_stream()
        storage.swap_storage.setdefault(0, []).append(moved)
        del value
        storage.launch_offload(stream)
        storage.wait_offload()
        assert moved.state == "host"
        storage.resize_device_storage()
        storage.launch_load(stream)
        storage.wait_load()
        assert adapter.numpy(moved.get_val()).tolist() == [[3.0] * 8] * 8
    SwapManager().reset()


@covers("set_grad_reduce_handle")
def test_a_plain_function_is_called_without_arguments(platform):
    calls: list[str] = []

    def post_process():
        calls.append("post")

    platform.set_grad_reduce_handle(Handle(platform, [], "a"), post_process)
    assert platform.post_grad_handle_process is post_process
    platform.wait_grad_handle()
    assert calls == ["post"]


@covers("wait_grad_handle")
def test_a_failed_reduction_is_raised_once(platform):
    outer = platform.get_current_stream()
    platform.set_grad_reduce_handle(Handle(platform, [], "bad", error=RuntimeError("link down")))
    with pytest.raises(RuntimeError, match="link down"):
        platform.wait_grad_handle()
    assert platform.get_current_stream() == outer
    platform.wait_grad_handle()
    assert platform.current_grad_handle is None


@covers("wait_grad_handle")
def test_the_current_stream_is_ordered_after_the_gradient_stream(monkeypatch):
    monkeypatch.setattr(Platform, "grad_sync_stream", None)
    log: list[str] = []

    class LoggingStream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    class Logging(Platform):
        @staticmethod
        def new_stream():
            return LoggingStream("gradient")

        @staticmethod
        def get_current_stream():
            return LoggingStream("compute")

        @staticmethod
        def get_stream_context():
            return lambda stream: contextlib.nullcontext(log.append(f"on {stream.name}"))

    class Reduction:
        def wait(self):
            log.append("reduced")

    Logging.set_grad_reduce_handle(Reduction(), lambda: log.append("post"))
    Logging.wait_grad_handle()
    assert log == ["on gradient", "reduced", "post", "compute waits for gradient"]


@covers("noop_context_fn")
def test_null_contexts_are_two_and_fresh(platform):
    forward, recompute = platform.noop_context_fn()
    with forward as entered, recompute as entered_too:
        assert (entered, entered_too) == (None, None)
    assert platform.noop_context_fn()[0] is not forward


@covers("get_symmetric_memory_handler")
def test_symmetric_memory_says_why_it_is_not_there(platform):
    handler = platform.get_symmetric_memory_handler()
    if handler.is_available():
        pytest.skip("this device has symmetric memory; tests/gpu uses it")
    with pytest.raises(UnsupportedMemberError, match=r"get_symmetric_memory_handler\(\).empty: .*because .*Instead: "):
        handler.empty(4)
    with pytest.raises(UnsupportedMemberError, match=r"get_symmetric_memory_handler\(\).rendezvous: .*because"):
        handler.rendezvous(None)
