"""Two threads that take turns on one device: while one communicates, the other computes.

Theory of operation. Two threads run the same kind of work, for instance one micro-batch's forward and another's
backward. Each alternates between dispatching computation and dispatching communication, and calls the coordinator at
every change: ``notify_dispatched(finished)``, then ``rendezvous(next)``. A rendezvous is a meeting of exactly two
arrivals. When one comes to communicate and the other to compute, the one that communicates goes first: the other is
held until its ``notify_dispatched("comm")``, so that the communication is under way when the computation that hides it
starts. When both come in the same role there is nothing to order and both go on.

A thread whose partner does not come (unequal numbers of hooks, an exception on the other side) gets an error after
``timeout_s``; nothing ever waits without end. ``disable`` releases the threads that wait. A coordinator that is not
enabled does nothing at all, so hooks may stay in a model that runs alone.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from hyper_parallel.errors import RendezvousTimeoutError

__all__ = ["ROLES", "HookCoordinator"]

ROLES: Final = ("compute", "comm")


class _Meeting:
    """Two arrivals; the second one fills in its role."""

    def __init__(self, first_role: str) -> None:
        self.first_role = first_role
        self.second_role: str | None = None
        self.is_comm_dispatched = False


class HookCoordinator:
    """Makes the hooks of two threads meet; see the theory of operation above."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        if not timeout_s > 0:
            raise ValueError(f"HookCoordinator.timeout_s: {timeout_s!r} must be a positive number of seconds")
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._is_enabled = False
        self._waiting: _Meeting | None = None
        self._current: _Meeting | None = None

    def enable(self) -> None:
        """Begin: from now on hooks meet. Whatever an earlier round left behind is forgotten."""
        with self._changed:
            self._is_enabled = True
            self._waiting = self._current = None
            self._changed.notify_all()

    def disable(self) -> None:
        """End: hooks do nothing from now on, and waiting threads go on."""
        with self._changed:
            self._is_enabled = False
            self._waiting = self._current = None
            self._changed.notify_all()

    def is_enabled(self) -> bool:
        """Whether hooks meet."""
        return self._is_enabled

    def notify_dispatched(self, role: str) -> None:
        """Say that the work of this role has been handed to the device."""
        _must_be_known(role, "notify_dispatched")
        with self._changed:
            if role == "comm" and self._current is not None:
                self._current.is_comm_dispatched = True
                self._changed.notify_all()

    def rendezvous(self, role: str) -> None:
        """Meet the other thread before dispatching work of this role."""
        _must_be_known(role, "rendezvous")
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            if not self._is_enabled:
                return
            meeting = self._join(role, deadline)
            if meeting is not None and role == "compute" and "comm" in (meeting.first_role, meeting.second_role):
                self._await_comm(meeting, deadline)

    def _join(self, role: str, deadline: float) -> _Meeting | None:
        """Become the second of a waiting meeting, or wait as its first; None when released by enable or disable."""
        meeting = self._waiting
        if meeting is not None:
            meeting.second_role = role
            self._waiting, self._current = None, meeting
            self._changed.notify_all()
            return meeting
        meeting = self._waiting = _Meeting(role)
        while meeting.second_role is None and self._waiting is meeting:
            if not self._changed.wait(deadline - time.monotonic()) and meeting.second_role is None:
                self._waiting = None
                raise self._timed_out(role, "the other thread did not reach a hook")
        return meeting if meeting.second_role is not None else None

    def _await_comm(self, meeting: _Meeting, deadline: float) -> None:
        while not meeting.is_comm_dispatched and self._current is meeting:
            if not self._changed.wait(deadline - time.monotonic()) and not meeting.is_comm_dispatched:
                self._current = None
                raise self._timed_out(role="compute", because="the other thread never said that it had dispatched comm")

    def _timed_out(self, role: str, because: str) -> RendezvousTimeoutError:
        return RendezvousTimeoutError(
            f"HookCoordinator.rendezvous: timed out after {self._timeout_s} s, while waiting to go on with {role!r}; "
            f"because {because}; give both threads equally many hooks, call disable() when one ends, or raise timeout_s"
        )


def _must_be_known(role: str, method: str) -> None:
    if role not in ROLES:
        raise ValueError(f"HookCoordinator.{method}: unknown role {role!r}; known are {', '.join(ROLES)}")
