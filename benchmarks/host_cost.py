"""What a swapped tensor costs the host, out and back, by device, by number of tensors and by part.

    OMP_NUM_THREADS=1 python -m benchmarks.host_cost [--device cuda] [--rounds 20] [--output PATH]

A chain of ``sin`` saves its input at every op. Each saved tensor leaves the device in forward, also the last ones, and comes
back in backward. The cost is the time of that step less the time of the plain step, for each tensor. Three devices are measured:

* ``no-op``: CPU tensors on a device whose streams, events and copies do nothing. What remains is our own work.
* ``simulated``: the simulated accelerator. Its clocks and checks cost far more than the engine; it is here for its counts.
* ``cuda``: a GPU, where there is one (``--device cuda``). Launching copies and events is part of the cost.

Processor time of the calling thread is measured where backward runs on it (CPU tensors), else the time of the clock, with a
device that is idle before each step. A step is measured in slices, and for each slice the fastest of many steps counts, because
everything else on the machine can only add to it. Calls are counted by a profile of one step, by module, and device calls by
the no-op device.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import cProfile
import dataclasses
import gc
import itertools
import json
import platform
import pstats
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import hyper_parallel as hp
from hyper_parallel.backends.torch import AsyncSaveOnCpu, native
from hyper_parallel.backends.torch.devices import hide_from_modes, host_view
from hyper_parallel.core.activation_checkpoint.devices import simulated_key
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.testing import simulated_accelerator

__all__ = ["Cost", "NoOpDevice", "measure", "no_op_device", "table"]

COUNTS = (25, 100, 400, 1600)
_WINDOW = 128  # tensors; by a 32nd of it copies out are launched together
_PREFETCH = 64  # tensors; by a 16th of it loads are launched together
_SLICE = 25  # tensors
_CPU = torch.device("cpu")


class NoOpDevice:
    """A device without work: see ``DeviceBackend``. It counts the calls. An event is its number.

    The host sees an event one step late, as it does where it runs ahead of the device.
    """

    name = "no-op"
    is_host_memory = False
    unseen = staticmethod(hide_from_modes)
    host_view = staticmethod(host_view)

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self._extension: Any = native.load()
        self._streams = 0
        self._events = self._events_before = self._events_done = 0

    def begin_step(self) -> None:
        """What was queued before the last step is done now."""
        self._events_done, self._events_before = self._events_before, self._events

    def current_stream(self) -> int:
        """The compute stream."""
        self.calls["current_stream"] += 1
        return 0

    def new_stream(self) -> int:
        """A number."""
        self._streams += 1
        return self._streams

    def record_event(self, stream: int, *, timing: bool = False) -> int:
        """A number."""
        self.calls["timed event" if timing else "event"] += 1
        self._events += 1
        return self._events

    def wait_event(self, stream: int, event: int) -> None:
        """Nothing runs."""
        self.calls["wait"] += 1

    def event_is_done(self, event: int) -> bool:
        """Whether the step before the last one recorded it."""
        self.calls["query"] += 1
        return event <= self._events_done

    def synchronize_event(self, event: int) -> None:
        """Nothing runs."""
        self.calls["synchronize"] += 1

    def elapsed_us(self, start: int, end: int) -> float:
        """A copy takes a microsecond."""
        return 1.0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Host bytes."""
        self.calls["allocate"] += 1
        with torch._C._DisableTorchDispatch():
            return torch.empty(nbytes, dtype=torch.uint8)

    def allocate_all(self, sizes: list[int]) -> list[torch.Tensor]:
        """Host bytes, taken as a real device's are."""
        if self._extension is None:
            return [self.allocate(nbytes) for nbytes in sizes]
        self.calls["allocate"] += len(sizes)
        made: list[torch.Tensor] = self._extension.allocate_all(sizes, _CPU)
        return made

    def allocate_host(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Host bytes."""
        self.calls["allocate_host"] += 1
        return torch.empty(nbytes, dtype=torch.uint8)

    def dropped(self, nbytes: int) -> None:
        """Nothing to do."""

    def held_bytes(self) -> int | None:
        """Unknown."""
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Never."""
        return False

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        """No byte is moved: the gradients of a step on this device are wrong."""
        self.copy_all([(destination, source)], stream)

    def copy_all(self, copies: list[tuple[torch.Tensor, torch.Tensor]], stream: int) -> None:
        """The same; counted with a switch of streams, which a real device makes here."""
        self.calls["stream switch"] += 1
        self.calls["copy"] += len(copies)


@contextlib.contextmanager
def no_op_device() -> Iterator[NoOpDevice]:
    """CPU tensors are on a :class:`NoOpDevice` inside."""
    manager, device = SwapManager(), NoOpDevice()
    manager.backends[simulated_key("torch", "cpu")] = device
    try:
        yield device
    finally:
        manager.forget_backend(device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one swapped tensor, out and back."""

    device: str
    tensors: int
    plain_us: float
    forward_us: float  # beyond the plain forward
    backward_us: float  # beyond the plain backward
    calls: dict[str, float]  # Python calls by module, from a profile
    device_calls: dict[str, float]  # counted by the no-op device

    @property
    def us(self) -> float:
        """Out and back."""
        return self.forward_us + self.backward_us


class _Step:
    """One step that saves ``tensors`` values of ``nbytes`` each, plain or swapped."""

    def __init__(self, tensors: int, nbytes: int, device: str, before: Callable[[], None]) -> None:
        self._tensors = tensors
        self._before = before
        self._x = torch.ones(nbytes // 4, device=device, requires_grad=True)
        self._gradient = torch.ones_like(self._x)
        self._clock = time.perf_counter if device == "cuda" else time.thread_time
        self._config = hp.SwapConfig(
            min_bytes=1, tail_bytes=0, window_bytes=_WINDOW * nbytes, prefetch_bytes=_PREFETCH * nbytes
        )

    def forward(self, moments: list[float], later_moments: list[float], *, swaps: bool) -> torch.Tensor:
        """The chain. The clock is read at every ``_SLICE`` tensors: in forward, and when backward comes back to them."""
        with AsyncSaveOnCpu(swap_config=self._config) if swaps else contextlib.nullcontext():
            x = self._x + 0
            for at in range(self._tensors):
                x = torch.sin(x)
                if at % _SLICE == _SLICE - 1 or at == self._tensors - 1:
                    moments.append(self._clock())
                    x.register_hook(lambda _: later_moments.append(self._clock()))
        if swaps:
            # The last ones would stay, so few tensors would cost less than many.
            for engine in SwapManager()._engines.values():
                for record in engine.live_records():
                    engine.finish_offload(record)
        moments.append(self._clock())
        return x

    def run(self, *, swaps: bool) -> tuple[list[float], list[float]]:
        """Seconds of each slice of forward and of backward."""
        self._x.grad = None
        self._before()
        if self._x.device.type == "cuda":
            torch.cuda.synchronize()
        forward, backward = [self._clock()], []
        out = self.forward(forward, backward, swaps=swaps)
        backward.append(self._clock())
        out.backward(self._gradient)
        backward.append(self._clock())
        return _between(forward), _between(backward)

    def fastest(self, rounds: int) -> dict[bool, tuple[float, float]]:
        """Microseconds of forward and backward for each tensor, by whether the step swaps.

        The two take turns; two steps come before them. For every slice the fastest step counts: on a busy machine no long step
        is left alone as a whole.
        """
        found: dict[bool, list[tuple[list[float], list[float]]]] = {False: [], True: []}
        gc.collect()
        gc.disable()
        try:
            for step in range(rounds + 2):
                for swaps, times in found.items():
                    took = self.run(swaps=swaps)
                    if step >= 2:
                        times.append(took)
        finally:
            gc.enable()
        return {
            swaps: (
                sum(map(min, zip(*(one for one, _ in times)))) * 1e6 / self._tensors,
                sum(map(min, zip(*(two for _, two in times)))) * 1e6 / self._tensors,
            )
            for swaps, times in found.items()
        }


def _between(moments: list[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(moments)]


def _module_of(path: str) -> str:
    at = path.rfind("hyper_parallel/")
    if at < 0:
        return "built-in" if path == "~" else "other"
    return path[at + len("hyper_parallel/") :].removesuffix(".py")


def _profiled_calls(run: Callable[[], Any], tensors: int) -> dict[str, float]:
    """Calls for each tensor, by module."""
    profile = cProfile.Profile()
    profile.runcall(run)
    found: collections.Counter[str] = collections.Counter()
    for (path, _, _), (_, calls, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]  # not in the stubs
        found[_module_of(path)] += calls
    return {module: round(calls / tensors, 2) for module, calls in found.most_common() if calls >= tensors // 10}


def _cost(name: str, tensors: int, nbytes: int, rounds: int, device: NoOpDevice | None) -> Cost:
    before = device.begin_step if device is not None else lambda: None
    step = _Step(tensors, nbytes, "cuda" if name == "cuda" else "cpu", before)
    fastest = step.fastest(rounds)
    if device is not None:
        device.calls.clear()
    calls = _profiled_calls(lambda: step.run(swaps=True), tensors)
    found = {} if device is None else {call: round(n / tensors, 2) for call, n in device.calls.most_common()}
    return Cost(
        device=name,
        tensors=tensors,
        plain_us=sum(fastest[False]),
        forward_us=fastest[True][0] - fastest[False][0],
        backward_us=fastest[True][1] - fastest[False][1],
        calls=calls,
        device_calls=found,
    )


def measure(device: str, counts: tuple[int, ...], *, rounds: int, nbytes: int) -> list[Cost]:
    """The costs on one device, by number of tensors."""
    costs = []
    for tensors in counts:
        SwapManager().reset()
        with contextlib.ExitStack() as stack:
            counted = stack.enter_context(no_op_device()) if device == "no-op" else None
            if device == "simulated":
                stack.enter_context(simulated_accelerator(timing="eager"))
            costs.append(_cost(device, tensors, nbytes, rounds, counted))
    SwapManager().reset()
    return costs


def table(costs: list[Cost]) -> str:
    """Markdown."""
    lines = [
        "| device | tensors | us out and back | forward | backward | plain step | Python calls |",
        "|---|---|---|---|---|---|---|",
    ]
    for cost in costs:
        lines.append(
            f"| {cost.device} | {cost.tensors} | {cost.us:.1f} | {cost.forward_us:.1f} | {cost.backward_us:.1f} "
            f"| {cost.plain_us:.1f} | {sum(cost.calls.values()):.0f} |"
        )
    for cost in costs:
        if cost.device_calls:
            found = ", ".join(f"{count:g} {call}" for call, count in cost.device_calls.items())
            lines += ["", f"Device calls for each tensor, {cost.tensors} tensors: {found}"]
    last = costs[-1]
    lines += ["", f"Python calls for each tensor, {last.device}, {last.tensors} tensors:", ""]
    lines += [f"* {module}: {count:g}" for module, count in last.calls.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("no-op", "simulated", "cuda"), action="append", default=None)
    parser.add_argument("--tensors", type=int, action="append", default=None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--nbytes", type=int, default=4096, help="bytes of each tensor")
    parser.add_argument("--output", default=None, help="path without suffix; .json and .md are written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    devices = args.device or ["no-op", "simulated", *(["cuda"] if torch.cuda.is_available() else [])]
    counts = tuple(args.tensors or COUNTS)
    texts, found = [], []
    for device in devices:
        costs = measure(device, counts, rounds=args.rounds, nbytes=args.nbytes)
        texts.append(table(costs))
        found += [{**dataclasses.asdict(cost), "us": cost.us} for cost in costs]
        print(texts[-1], flush=True)
    if args.output:
        facts = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name()
        command = f"python -m benchmarks.host_cost --rounds {args.rounds} --nbytes {args.nbytes}"
        Path(args.output + ".json").write_text(json.dumps({"schema": 1, **facts, "costs": found}, indent=1))
        text = "\n\n".join(texts)
        Path(args.output + ".md").write_text(
            f"# Host cost of a swapped tensor\n\n- {facts}\n- command: `{command}`\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
