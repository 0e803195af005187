"""Faults at the borders of the engine: the framework's allocator and copies, the kernel's files, threads and signals.

A :class:`Site` is one place where a step asks somebody else for something. A fault replaces one call there, the k-th of
the step, and lets all others through: the parts on both sides of the border are the real ones. Signals are real signals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SLOW_S: Final = 0.002


class Act(Protocol):
    """Answers a call in place of ``real``."""

    def __call__(self, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The answer."""


class Calls:
    """How many calls a site has seen; workers count too."""

    def __init__(self) -> None:
        self.made = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        """The number of this call."""
        with self._lock:
            self.made += 1
            return self.made - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """``owner.attribute`` is the border; ``picks`` says which of its calls belong to this site."""

    owner: Any
    attribute: str
    picks: Callable[..., bool] = lambda *args, **kwargs: True

    @contextlib.contextmanager
    def replaced(self, at: int | None, act: Act, *, lasts: bool = False) -> Iterator[Calls]:
        """Answer call number ``at`` with ``act``, and all later ones too where it ``lasts``; None: every call."""
        real = getattr(self.owner, self.attribute)
        calls = Calls()

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.picks(*args, **kwargs):
                return real(*args, **kwargs)
            number = calls.next()
            if at is None or number == at or (lasts and number > at):
                return act(real, args, kwargs)
            return real(*args, **kwargs)

        setattr(self.owner, self.attribute, call)
        try:
            yield calls
        finally:
            setattr(self.owner, self.attribute, real)


class OpSite:
    """Every op of the step itself: forward, replay and backward, as the framework dispatches them."""

    @contextlib.contextmanager
    def replaced(self, at: int | None, act: Act, *, lasts: bool = False) -> Iterator[Calls]:
        """See :class:`Site`."""
        calls = Calls()

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                number = calls.next()
                if at is None or number == at or (lasts and number > at):
                    return act(op, args, kwargs or {})
                return op(*args, **(kwargs or {}))

        with Mode():
            yield calls


class AnyMoment:
    """Any moment of the step: call number k is k hundredths of the time that the step takes."""

    NUM_MOMENTS: Final = 100

    def __init__(self) -> None:
        self._step_s = 0.02

    @contextlib.contextmanager
    def replaced(self, at: int | None, act: Act, *, lasts: bool = False) -> Iterator[Calls]:
        """See :class:`Site`; the real call is nothing at all."""
        calls = Calls()
        calls.made = self.NUM_MOMENTS
        started = time.perf_counter()
        is_over = threading.Event()

        def wait_and_act() -> None:
            if at is not None and not is_over.wait(self._step_s * at / self.NUM_MOMENTS):
                act(lambda: None, (), {})

        waiter = threading.Thread(target=wait_and_act)
        waiter.start()
        try:
            yield calls
            if at is None:
                self._step_s = time.perf_counter() - started
        finally:
            is_over.set()
            waiter.join()


# ------------------------------------------------------------------ what can happen at a site


def as_it_is(real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Nothing happens."""
    return real(*args, **kwargs)


def raising(make: Callable[[], BaseException]) -> Act:
    """The call fails. Each error is a new one: an error that is kept would keep its frames."""

    def act(real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise make()

    return act


def out_of_memory() -> BaseException:
    """As the simulated device and the host say it."""
    return MemoryError("planned: no memory")


def disk_full() -> BaseException:
    """As the kernel says it."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def disk_broken() -> BaseException:
    """As the kernel says it."""
    return OSError(errno.EIO, os.strerror(errno.EIO))


def device_broken() -> BaseException:
    """As torch says it."""
    return RuntimeError("planned: device error")


def slow(real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The call takes its time."""
    time.sleep(SLOW_S)
    return real(*args, **kwargs)


def short(real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The kernel moves fewer bytes than it was asked to, as it may."""
    fd, views, offset = args
    half = max(1, len(views[0]) // 2)
    return real(fd, [views[0][:half]], offset)


def ended(real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The file is shorter than it was."""
    return 0


def flipped_read(real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The disk gives back another bit than it was given."""
    moved = real(*args, **kwargs)
    _, views, _ = args
    views[0][0] ^= 1
    return moved


def flipped_copy(real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A bit of host memory changed between the copy out and the copy back."""
    _, _, source, _ = args
    with torch._C._DisableTorchDispatch():
        source.view(torch.uint8)[0] ^= 1
    return real(*args, **kwargs)


def signalled(number: int, *, is_after: bool) -> Act:
    """A real signal arrives before the call, or when the call is done and nobody knows yet."""

    def act(real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not is_after:
            Handlers.send(number)
        answer = real(*args, **kwargs)
        if is_after:
            Handlers.send(number)
        return answer

    return act


def none_left(real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A worker is told that there is nothing more to do, and ends."""
    return


class Stopped(SystemExit):
    """What a trainer's own handler of SIGTERM raises."""


class Handlers:
    """Ctrl-C raises KeyboardInterrupt, SIGTERM raises :class:`Stopped`, as in a trainer that saves before it goes.

    Python itself swallows what a handler raises inside a destructor; ``swallowed`` counts that.
    """

    _armed: ClassVar[list[Handlers]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.swallowed = 0

    @classmethod
    def send(cls, number: int) -> None:
        """Send this process a signal, unless the trial is over: a worker may come to it late."""
        with cls._lock:
            if cls._armed:
                cls._armed.clear()
                os.kill(os.getpid(), number)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """While this is open, one signal is taken."""
        hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        before = {
            signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._stop),
        }
        Handlers._armed.append(self)
        try:
            yield
            self._disarm()
        finally:
            with contextlib.suppress(KeyboardInterrupt, Stopped):  # one is raised already
                self._disarm()
            for number, handler in before.items():
                signal.signal(number, handler)
            sys.unraisablehook = hook

    def _disarm(self) -> None:
        with Handlers._lock:  # a worker that is about to send does so first
            Handlers._armed.clear()
        time.sleep(0.001)  # what it sent arrives here
        Handlers._armed.clear()

    def _stop(self, number: int, frame: Any) -> None:
        raise Stopped(128 + number)

    def _unraisable(self, what: Any) -> None:
        if not isinstance(what.exc_value, KeyboardInterrupt | Stopped):
            sys.__unraisablehook__(what)
        self.swallowed += 1


@contextlib.contextmanager
def small_files(most_bytes: int) -> Iterator[None]:
    """The kernel's own limit: no file of this process may grow beyond it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
