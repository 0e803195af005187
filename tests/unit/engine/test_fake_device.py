"""The fake device can show what the engine's tests rely on, and imports no framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .fake_device import FakeDevice


def test_nothing_runs_until_told_and_a_wait_holds_a_stream() -> None:
    device = FakeDevice()
    out = device.new_stream()
    done: list[str] = []
    ready = device.record_event(device.current)
    device.wait_event(out, ready)
    source, destination = device.fill(b"ab"), device.allocate_host(2, pinned=True)
    device.copy(destination, source, out)
    device.queue(lambda: done.append("kernel"))
    device.run("out")
    assert (bytes(destination), device.event_is_done(ready), done) == (b"??", False, [])
    device.run("compute")
    assert (bytes(destination), device.event_is_done(ready), done) == (b"??", True, ["kernel"])
    device.run("out")
    assert bytes(destination) == b"ab"
    assert device.log == ["compute: record e1", "out: wait e1", "out: copy 2"]


def test_a_wait_for_an_event_that_cannot_happen_is_told() -> None:
    device = FakeDevice()
    first, second = device.new_stream(), device.new_stream()
    never = device.record_event(second)
    second.steps.clear()
    device.wait_event(first, never)
    with pytest.raises(AssertionError, match="e2 on out can never happen"):
        device.synchronize_event(device.record_event(first))


def test_time_passes_with_copies_and_device_bytes_are_counted_while_they_live() -> None:
    device = FakeDevice(capacity_bytes=10)
    device.copy_us = 5.0
    lane = device.new_stream()
    start = device.record_event(lane)
    bytes_on_device = device.allocate(8)
    device.copy(device.allocate_host(8, pinned=False), bytes_on_device, lane)
    end = device.record_event(lane)
    device.synchronize_event(end)
    assert (device.elapsed_us(start, end), device.held_bytes()) == (5.0, 8)
    with pytest.raises(MemoryError, match="the fake device has 10 bytes"):
        device.allocate(3)
    del bytes_on_device
    assert device.held_bytes() == 0


def test_these_tests_import_no_framework() -> None:
    modules = [path.stem for path in sorted(Path(__file__).parent.glob("*.py")) if path.stem != "__init__"]
    assert {"calls", "fake_device", "test_engine_forward", "test_record"} <= set(modules)
    folder, package = Path(__file__).parent.parent, Path(__file__).parent.name
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(folder)!r})\n"
        f"for name in {modules!r}: importlib.import_module('{package}.' + name)\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'mindspore', 'transformers', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
