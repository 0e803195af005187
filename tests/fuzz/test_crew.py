"""The long run's crew: a worker that hangs or dies is a result, and the run ends by itself."""

from __future__ import annotations

import collections
import multiprocessing.connection
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from fuzz.doors import Tick
from fuzz.strange_worker import strange_worker

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_LIMIT_S = 600.0


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Any:
    # Behind the tests: the command there has the name of the package that it runs.
    monkeypatch.setattr(sys, "path", [*sys.path, str(_ROOT / "scripts")])
    import crew

    monkeypatch.setattr(crew, "END_S", 1.0)
    monkeypatch.setattr(crew, "START_S", 300.0)
    return crew


def answers_of(worker: Any, numbers: list[int]) -> list[Any]:
    worker.take(numbers)
    replies: list[Any] = []
    deadline = time.monotonic() + _LIMIT_S
    while len(replies) < len(numbers):
        assert time.monotonic() < deadline, f"no more than {replies} in {_LIMIT_S} s"
        multiprocessing.connection.wait([worker.connection], timeout=0.1)
        reply = worker.answer()
        if reply is not None:
            replies.append(reply)
            if worker.todo:
                worker.next()
    return replies


def test_a_worker_that_hangs_or_dies_is_a_failure_and_is_replaced(crew: Any) -> None:
    worker = crew.Worker((), limit_s=10.0, target=strange_worker)
    first = worker.process.pid
    replies = answers_of(worker, [0, 1, 0, 2, 0, 3, 0])
    assert [reply["kind"] for reply in replies] == ["equal", "crash", "equal", "crash", "equal", "crash", "equal"]
    assert replies[1]["detail"] == "no answer after 10 s, exit code -9"
    assert replies[3]["detail"] == "the process died, exit code 3"
    assert replies[5]["detail"] == "the process died, exit code -9"
    assert worker.process.pid != first
    worker.end()
    assert not worker.process.is_alive()


def test_a_run_of_the_command_ends_by_itself(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "out.json"
    command = [sys.executable, str(_ROOT / "scripts" / "fuzz.py"), "--programs", "6", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6 programs in ")
    assert output.exists()


def test_a_turn_is_not_passed_on_a_thread_that_is_none_of_the_program() -> None:
    # A GPU run stood still: two threads' backwards share the framework's one thread for the device, and the first waited
    # there for a turn that the second could only give back on that same thread.
    tick, calls = Tick(2), collections.Counter[str]()

    def on_the_frameworks_thread() -> None:
        for _ in range(10):
            tick()
            calls["made"] += 1

    outside = threading.Thread(target=on_the_frameworks_thread, daemon=True)
    outside.start()
    outside.join(timeout=_LIMIT_S)
    assert not outside.is_alive()
    assert calls["made"] == 10


def test_an_error_in_a_replay_leaves_no_hooks_on_the_thread_that_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "0")  # a replay from a tape runs none of this Python
    # Before 2.13 torch's checkpoint takes its hooks off when the error is forgotten, on whichever thread that happens.
    import hyper_parallel as hp

    left: list[Any] = []
    errors: list[BaseException] = []

    def fails_when_replayed(x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("planned")
        return x.sin().sin()

    def on_another_thread() -> None:
        x = torch.randn(4, requires_grad=True)
        loss = hp.checkpoint(lambda x: hp.checkpoint(fails_when_replayed, x.cos()).exp(), x).sum()
        try:
            loss.backward()
        except RuntimeError as error:
            errors.append(error)  # kept, as torch keeps an error that crosses threads
        left.append(torch._C._autograd._top_saved_tensors_default_hooks(True))

    worker = threading.Thread(target=on_another_thread)
    worker.start()
    worker.join(timeout=_LIMIT_S)
    assert [str(error) for error in errors] == ["planned"]
    assert left == [None]
