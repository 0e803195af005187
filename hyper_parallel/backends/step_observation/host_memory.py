"""Host memory measured as a device's is: the resident set of this process, and a thread that samples it while a step runs.

On a host compute is synchronous, so a wait for a copy is time that the thread spends inside far memory's
code. The sampler sees it there; such waits are exact to its period, and the step record has a note about it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Final

from hyper_parallel.errors import HyperParallelError

__all__ = ["PERIOD_S", "HostMeter", "HostSampler", "resident_bytes"]

PERIOD_S: Final = 0.001
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_FAR_CODE: Final = os.path.join("activation_checkpoint", "far")
_NEAR: Final = 1.1  # of what is held: a new peak is no higher
_DEPTH: Final = 12  # a wait is at most so many calls below the code that waits


def resident_bytes() -> int:
    """What this process holds in RAM now."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError as error:
        raise HyperParallelError(
            f"recording: cannot read the resident memory of this process, because /proc/self/statm is not there ({error}). "
            "Record on Linux, or on an accelerator."
        ) from None


class HostMeter:
    """RAM read as a device is (see ``planner.meters.Meter``)."""

    is_simulated = False
    device_name = "CPU"

    def active_bytes(self) -> int:
        """Bytes in use now."""
        return resident_bytes()

    def peak_bytes(self) -> int:
        """The most since :meth:`reset_peak`, or since the process began where the kernel allows no reset."""
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return resident_bytes()

    def reset_peak(self) -> None:
        """Start a new peak."""
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def can_reset_peak(self) -> bool:
        """Whether the kernel lets a process begin a new peak: then it is what is held now."""
        self.reset_peak()
        return self.peak_bytes() <= _NEAR * resident_bytes()

    def mark(self) -> float:
        """This moment."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Between two marks."""
        return max(0.0, end - start)

    def wait(self) -> None:
        """Nothing is queued on a host."""


class HostSampler:
    """Samples the resident set, and what the stepping thread does, about a thousand times a second."""

    def __init__(self) -> None:
        self.memory: list[tuple[float, int]] = []  # (perf_counter seconds, bytes)
        self.stalls: list[tuple[float, float]] = []
        self._watched = threading.get_ident()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hyper_parallel sampler", daemon=True)

    def __enter__(self) -> HostSampler:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        was_waiting, before = False, time.perf_counter()
        while not self._is_over.wait(PERIOD_S):
            self._sample()
            now = self.memory[-1][0]
            is_waiting = _waits_for_far_memory(sys._current_frames().get(self._watched))
            if is_waiting and was_waiting:
                self.stalls[-1] = self.stalls[-1][0], now
            elif is_waiting:
                self.stalls.append((before, now))
            was_waiting, before = is_waiting, now

    def _sample(self) -> None:
        self.memory.append((time.perf_counter(), resident_bytes()))


def _waits_for_far_memory(frame: FrameType | None) -> bool:
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if _FAR_CODE in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
