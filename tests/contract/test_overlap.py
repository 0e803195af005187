"""The sync hook and its coordinator: the identity in value and gradient, roles as the table says, never a deadlock."""

# ruff: noqa: B023 - every function made in a loop here is called before the loop goes on.

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hyper_parallel.core.overlap import HookCoordinator
from hyper_parallel.errors import GroupError

from .marks import covers

PATIENCE_S = 600
"""Longer than anything here takes; only a broken coordinator waits for it."""


class Recorder:
    """A coordinator that only writes down what it is told."""

    def __init__(self):
        self.calls = []

    def notify_dispatched(self, role):
        self.calls.append(("dispatched", role))

    def rendezvous(self, role):
        self.calls.append(("rendezvous", role))


ROLES = {
    "A": [("compute", "comm"), ("comm", "compute")],
    "B": [("comm", "compute"), ("compute", "comm")],
    "C": [("compute", "comm"), ("comm", "compute")],
    "D": [("comm", "compute"), ("compute", "comm")],
}
"""Hook to its (finished, next), forward and backward."""


@covers("differentiable_sync_hook")
@pytest.mark.parametrize("name", sorted(ROLES))
def test_a_hook_is_the_identity_and_plays_its_roles(platform, adapter, name):
    recorder = Recorder()
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    seen = []

    def loss(x):
        y = platform.differentiable_sync_hook(x, name, recorder)
        seen.append(adapter.numpy(y))
        return (y * y).sum()

    (gradient,) = adapter.gradients(loss, array)
    np.testing.assert_array_equal(seen[0], array)
    np.testing.assert_array_equal(gradient, 2 * array)
    (finished, following), (finished_back, following_back) = ROLES[name]
    assert recorder.calls == [
        ("dispatched", finished),
        ("rendezvous", following),
        ("dispatched", finished_back),
        ("rendezvous", following_back),
    ]


@covers("differentiable_sync_hook")
def test_a_model_passes_its_hooks_in_order_and_back(platform, adapter):
    recorder = Recorder()

    def loss(x):
        for name in "ABCD":
            x = platform.differentiable_sync_hook(x * 2.0, name, recorder)
        return x.sum()

    adapter.gradients(loss, np.ones(2, dtype=np.float32))
    following = [role for call, role in recorder.calls if call == "rendezvous"]
    assert following == ["comm", "compute", "comm", "compute"] * 2


@covers("differentiable_sync_hook")
def test_an_unknown_hook_is_refused(platform, adapter):
    for name in ("E", "a", "", None):
        with pytest.raises(ValueError, match=r"differentiable_sync_hook: unknown hook .*; known are A, B, C, D"):
            platform.differentiable_sync_hook(adapter.tensor([1.0]), name, Recorder())


def in_threads(*bodies):
    """Run bodies at once; returns their errors in order, None where there was none."""
    errors = [None] * len(bodies)
    start = threading.Barrier(len(bodies))

    def run(place, body):
        try:
            start.wait(PATIENCE_S)
            body()
        except Exception as error:
            errors[place] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a thread still waits: the coordinator let it deadlock"
    return errors


def test_a_new_coordinator_is_off_and_then_nobody_waits():
    coordinator = HookCoordinator()
    assert not coordinator.is_enabled()
    coordinator.rendezvous("comm")
    coordinator.notify_dispatched("comm")
    coordinator.enable()
    assert coordinator.is_enabled()
    coordinator.disable()
    assert not coordinator.is_enabled()
    coordinator.rendezvous("compute")


def test_compute_starts_only_when_the_communication_is_under_way():
    for _ in range(20):
        coordinator, order = HookCoordinator(timeout_s=PATIENCE_S / 2), []
        coordinator.enable()

        def communicate():
            coordinator.rendezvous("comm")
            order.append("comm dispatched")
            coordinator.notify_dispatched("comm")

        def compute():
            coordinator.rendezvous("compute")
            order.append("compute")

        assert in_threads(compute, communicate) == [None, None]
        assert order == ["comm dispatched", "compute"]


def alternate(coordinator, roles, log=None):
    """A thread's work: meet in each role, do the role's work, say so."""
    for role in roles:
        coordinator.rendezvous(role)
        if log is not None:
            log.append(role)
        coordinator.notify_dispatched(role)


def test_two_threads_take_turns_for_many_rounds():
    coordinator, log = HookCoordinator(timeout_s=PATIENCE_S / 2), []
    coordinator.enable()
    errors = in_threads(
        lambda: alternate(coordinator, ["comm", "compute"] * 50, log),
        lambda: alternate(coordinator, ["compute", "comm"] * 50, log),
    )
    assert errors == [None, None]
    # In every meeting the communication is dispatched first. Its thread may then reach, but not pass, the next meeting.
    assert [sorted(log[i : i + 2]) for i in range(0, 200, 2)] == [["comm", "compute"]] * 100
    assert log[0::2] == ["comm"] * 100


def test_equal_roles_meet_without_an_order():
    coordinator = HookCoordinator(timeout_s=PATIENCE_S / 2)
    coordinator.enable()
    roles = ["comm", "compute"] * 10
    assert in_threads(lambda: alternate(coordinator, roles), lambda: alternate(coordinator, roles)) == [None, None]


def test_unequal_hook_counts_end_in_a_timeout_error():
    coordinator = HookCoordinator(timeout_s=PATIENCE_S / 2)
    coordinator.enable()

    def one_hook_too_many():
        alternate(coordinator, ["comm", "compute"])
        coordinator._timeout_s = 0.1  # for the meeting that nobody comes to; a busy machine may be late for the others
        coordinator.rendezvous("comm")

    errors = in_threads(one_hook_too_many, lambda: alternate(coordinator, ["compute", "comm"]))
    assert errors[1] is None
    assert isinstance(errors[0], GroupError)
    assert "timed out after 0.1 s, while waiting to go on with 'comm'" in str(errors[0])
    assert "the other thread did not reach a hook" in str(errors[0])


def test_a_communication_that_never_comes_ends_in_a_timeout_error():
    coordinator = HookCoordinator(timeout_s=PATIENCE_S / 2)
    coordinator.enable()

    def compute_in_vain():
        while coordinator._waiting is None:  # until the other thread is there
            time.sleep(0.001)
        coordinator._timeout_s = 0.1
        coordinator.rendezvous("compute")

    errors = in_threads(lambda: coordinator.rendezvous("comm"), compute_in_vain)
    assert errors[0] is None
    assert "never said that it had dispatched comm" in str(errors[1])
    coordinator._timeout_s = PATIENCE_S / 2
    errors = in_threads(lambda: alternate(coordinator, ["comm"]), lambda: alternate(coordinator, ["compute"]))
    assert errors == [None, None], "after an error the coordinator serves the next pair"


def test_disable_lets_a_waiting_thread_go():
    coordinator, waiting = HookCoordinator(timeout_s=PATIENCE_S * 2), threading.Event()
    coordinator.enable()

    def wait():
        waiting.set()
        coordinator.rendezvous("comm")

    def release():
        waiting.wait(PATIENCE_S)
        coordinator.disable()

    assert in_threads(wait, release) == [None, None]


def test_bad_roles_and_timeouts_are_refused():
    with pytest.raises(ValueError, match=r"HookCoordinator.timeout_s: 0 must be a positive number of seconds"):
        HookCoordinator(timeout_s=0)
    for method in ("rendezvous", "notify_dispatched"):
        with pytest.raises(
            ValueError, match=rf"HookCoordinator.{method}: unknown role 'send'; known are compute, comm"
        ):
            getattr(HookCoordinator(), method)("send")
