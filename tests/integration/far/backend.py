"""A small real device for these tests: torch CPU tensors, and streams that are threads.

Nothing here is simulated arithmetic: a stream runs its work in its own thread, later than it was queued, and an event
is done when the work before it was. A stream that is held stands still, which makes "still in flight" a fact.
"""

from __future__ import annotations

import collections
import queue
import random
import threading
import time
from collections.abc import Callable

import torch

from hyper_parallel.core.activation_checkpoint.devices import OneByOne

# No wait in these tests is longer; a test that reaches it fails instead of hanging.
LIMIT_S = 600.0


class ThreadEvent:
    def __init__(self) -> None:
        self.happened = threading.Event()
        self.at_us = 0.0

    def fire(self) -> None:
        self.at_us = time.perf_counter() * 1e6
        self.happened.set()

    def wait(self) -> None:
        assert self.happened.wait(LIMIT_S), "an event of this test never happened"


class ThreadStream:
    def __init__(self, *, jitter: random.Random | None = None) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._jitter = jitter
        threading.Thread(target=self._run, daemon=True).start()

    def queue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def hold(self) -> ThreadEvent:
        """Stand still until the answer is fired."""
        gate = ThreadEvent()
        self.queue(gate.wait)
        return gate

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if self._jitter is not None:
                time.sleep(self._jitter.random() * 2e-4)
            work()


class TorchBackend(OneByOne):
    """``is_host_memory`` says whether it plays a CPU or an accelerator; the bytes are torch CPU tensors in both."""

    def __init__(self, *, name: str = "threads", is_host_memory: bool = False, host_has: int | None = None) -> None:
        self.name = name
        self.is_host_memory = is_host_memory
        self.host_has = host_has
        self.host_allocations: list[tuple[int, bool]] = []
        self.calls: collections.Counter[str] = collections.Counter()
        self._stream = ThreadStream()

    def current_stream(self) -> ThreadStream:
        return self._stream

    def new_stream(self) -> ThreadStream:
        return ThreadStream()

    def record_event(self, stream: ThreadStream, *, timing: bool = False) -> ThreadEvent:
        event = ThreadEvent()
        stream.queue(event.fire)
        return event

    def wait_event(self, stream: ThreadStream, event: ThreadEvent) -> None:
        stream.queue(event.wait)

    def event_is_done(self, event: ThreadEvent) -> bool:
        return event.happened.is_set()

    def synchronize_event(self, event: ThreadEvent) -> None:
        self.calls[f"synchronize_event in {threading.current_thread().name}"] += 1
        event.wait()

    def elapsed_us(self, start: ThreadEvent, end: ThreadEvent) -> float:
        return end.at_us - start.at_us

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def allocate_host(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        if self.host_has is not None and nbytes > self.host_has:
            raise MemoryError(f"this host has {self.host_has} bytes")
        self.host_allocations.append((nbytes, pinned))
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: ThreadStream) -> None:
        assert destination.shape == source.shape
        stream.queue(lambda: destination.copy_(source))

    def host_view(self, flat: torch.Tensor) -> memoryview:
        return memoryview(flat.numpy())

    def ready(self) -> ThreadEvent:
        """An event that is done at once."""
        return self.record_event(self._stream)


class ManualCompletion:
    """A copy that ends when the test says so."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.waited = threading.Event()

    def finish(self) -> None:
        self._done.set()

    def is_done(self) -> bool:
        return self._done.is_set()

    def order(self, stream: ThreadStream) -> None:
        self.wait()

    def wait(self) -> None:
        self.waited.set()
        assert self._done.wait(LIMIT_S), "a completion of this test was never finished"


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
