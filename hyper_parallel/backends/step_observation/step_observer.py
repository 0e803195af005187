"""Observes a model's step in one way of running it: a few steps are timed undisturbed, then one is watched closely.

Memory over time
----------------
On a host the curve is the resident set, sampled. On an accelerator it is read where modules begin and end, with the
highest value since the reading before; it follows the order of issue and is drawn over device time.
"""

from __future__ import annotations

import contextlib
import gc
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from hyper_parallel._version import __version__
from hyper_parallel.backends.planning.blocks import find_blocks
from hyper_parallel.backends.planning.module_tree import BlockRef, Module
from hyper_parallel.backends.step_observation.framework import ObservedFramework
from hyper_parallel.backends.step_observation.host_memory import PERIOD_S, HostMeter, HostSampler
from hyper_parallel.backends.step_observation.module_watch import ModuleWatch
from hyper_parallel.core.activation_checkpoint.far.disk_workers import DiskCompletion
from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.core.activation_checkpoint.statistics import SwapStats
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.core.activation_checkpoint.timing import LinkSpan
from hyper_parallel.fates import Fate
from hyper_parallel.records.run_record import FateTotal, MemoryCurve, RegionTotal, StepRecord
from hyper_parallel.records.versions import Versions
from hyper_parallel.records.work_span import Track, WorkSpan

__all__ = ["StepObserver", "find_observed_blocks", "versions_of"]

_MOST_POINTS: Final = 1500  # of a drawn curve; more than any screen has


def find_observed_blocks(
    framework: ObservedFramework, model: Any, patterns: str | Sequence[str] | None = None
) -> list[BlockRef]:
    """The blocks of a model to which nothing was applied yet."""
    return find_blocks(framework.tree, framework.require_model(model, "record"), patterns, who="record")


def versions_of(framework: ObservedFramework, model: Module) -> Versions:
    """Where and with what a model runs."""
    meter = framework.meter(model) or HostMeter()
    return Versions(
        framework=framework.name,
        framework_version=framework.version,
        device=meter.device_name,
        library_version=__version__,
        python_version=platform.python_version(),
    )


class StepObserver:
    """Observes the step of one model, in whatever way it is run now; the answer is a step record.

    ``base`` names bytes that are there whatever the step does, beside weights and gradients: the process itself.
    """

    def __init__(
        self,
        framework: ObservedFramework,
        model: Module,
        step: Callable[[], Any],
        blocks: Sequence[BlockRef],
        *,
        base: dict[str, int] | None = None,
    ) -> None:
        self._framework = framework
        self._model = model
        self._step = step
        self._blocks = blocks
        self._base = base or {}
        self._meter: Any = framework.meter(model) or HostMeter()
        self._is_host = isinstance(self._meter, HostMeter)

    @property
    def memory_kind(self) -> str:
        """What the bytes of its records are."""
        if self._is_host:
            return "resident memory of the process"
        return "simulated device memory" if self._meter.is_simulated else "device memory"

    def observe(
        self, name: str, *, what: str = "", warmup: int = 1, steps: int = 2, after: Callable[[Any], None] | None = None
    ) -> StepRecord:
        """Run ``warmup + steps + 1`` steps. ``after`` is called with each step's result, outside the timing."""
        for _ in range(warmup):
            self._run(after)
        gc.collect()
        self._meter.wait()
        self._meter.reset_peak()
        before = SwapManager().stats()
        seconds = [self._timed(after) for _ in range(steps)]
        self._meter.wait()
        peak = self._meter.peak_bytes()
        counted = SwapManager().stats()
        watched = _WatchedStep(self._framework, self._meter, self._blocks, is_host=self._is_host)
        with watched.running():
            result = self._step()
        if after is not None:
            after(result)
        memory = watched.curve()
        peak = max(peak, *memory.nbytes) if memory.nbytes else peak
        spans = watched.spans()
        stalled = sum(span.end_us - span.start_us for span in spans if span.track is Track.STALL) / 1e6
        exposed = (counted.exposed_copy_us - before.exposed_copy_us) / 1e6 / steps
        return StepRecord(
            name=name,
            what=what,
            peak_bytes=peak,
            peak_where=_where(memory, spans),
            peak_parts=self._parts(peak),
            step_seconds=statistics.median(seconds),
            seconds=tuple(seconds),
            out_bytes=(counted.swapped_out_bytes - before.swapped_out_bytes) // steps,
            back_bytes=(counted.swapped_in_bytes - before.swapped_in_bytes) // steps,
            exposed_seconds=stalled if self._is_host else exposed,
            memory=memory,
            spans=spans,
            fates=_fates(before, counted, steps),
            regions=watched.regions(),
            notes=self._notes(),
        )

    def time_one(self, *, after: Callable[[Any], None] | None = None) -> float:
        """The seconds of one step, after one that warms up: one round of several ways that take turns."""
        self._run(None)
        return self._timed(after)

    def _run(self, after: Callable[[Any], None] | None) -> None:
        result = self._step()
        if after is not None:
            after(result)

    def _timed(self, after: Callable[[Any], None] | None) -> float:
        self._meter.wait()
        start = self._meter.mark()
        result = self._step()
        end = self._meter.mark()
        self._meter.wait()
        if after is not None:
            after(result)
        return float(self._meter.seconds(start, end))

    def _parts(self, peak: int) -> dict[str, int]:
        parts = self._base | self._framework.peak_parts(self._model, is_simulated=self._meter.is_simulated)
        parts[self._framework.rest] = max(0, peak - sum(parts.values()))
        return parts

    def _notes(self) -> tuple[str, ...]:
        if self._is_host:
            return (f"waits for copies were sampled every {PERIOD_S * 1e3:.0f} ms",)
        if self._meter.is_simulated:
            return ("a simulated device counts bytes; its times are the host's, and its copies take none",)
        return ()


class _WatchedStep:
    """One step that runs while modules, copies and memory are recorded."""

    def __init__(  # meter: planning's Meter
        self, framework: ObservedFramework, meter: Any, blocks: Sequence[BlockRef], *, is_host: bool
    ) -> None:
        self._framework = framework
        self._meter = meter
        self._blocks = blocks
        self._is_host = is_host
        self._base: Any = None
        self._watch: ModuleWatch | None = None
        self._sampler: HostSampler | None = None
        self._copies: list[tuple[Track, int, DiskCompletion]] = []
        self._spans: list[LinkSpan] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The step runs inside."""
        manager = SwapManager()
        outer, self._watch = (
            manager.counters.trace,
            ModuleWatch(self._framework, self._blocks, self._meter, reads_memory=not self._is_host),
        )
        try:
            with contextlib.ExitStack() as stack:
                if self._is_host:
                    manager.counters.trace = self._add_copy
                    self._sampler = stack.enter_context(HostSampler())
                else:
                    self._spans = stack.enter_context(manager.record_timeline())
                self._base = self._meter.mark()
                if not self._is_host:
                    self._meter.reset_peak()  # the curve's first point is of this step
                self._watch.point()
                manager.counters.on_replay = self._watch.replays_from_tape
                manager.counters.on_region = self._watch.region_ran
                yield
                self._meter.wait()
        finally:
            manager.counters.trace, manager.counters.on_replay, manager.counters.on_region = outer, None, None
            self._watch.remove()
            self._meter.wait()

    def _add_copy(self, what: str, record: Record) -> None:
        completion = {"offload": record.out, "load": record.back}.get(what)
        if isinstance(completion, DiskCompletion):
            track = Track.COPY_OUT if what == "offload" else Track.COPY_BACK
            self._copies.append((track, record.nbytes, completion))

    def _us(self, mark: Any) -> float:
        return float(self._meter.seconds(self._base, mark)) * 1e6

    def curve(self) -> MemoryCurve:
        """Memory over the step."""
        assert self._watch is not None, "the step ran"
        if self._sampler is not None:
            points = [(max(0.0, (at - self._base) * 1e6), nbytes) for at, nbytes in self._sampler.memory]
        else:
            points = []
            for mark, peak, now in self._watch.points:
                at = self._us(mark)
                points += [(at, max(peak, now)), (at, now)] if peak > now else [(at, now)]
        points.sort(key=lambda point: point[0])
        points = _thinned(points)
        return MemoryCurve(
            times_us=tuple(round(at, 1) for at, _ in points), nbytes=tuple(nbytes for _, nbytes in points)
        )

    def regions(self) -> tuple[RegionTotal, ...]:
        """The recomputed regions, those that ran from a tape first."""
        assert self._watch is not None, "the step ran"
        return tuple(
            RegionTotal(reason=reason, count=len(names), names=tuple(dict.fromkeys(names)))
            for reason, names in sorted(self._watch.regions.items())
        )

    def spans(self) -> tuple[WorkSpan, ...]:
        """Work, copies and waits, by their start."""
        assert self._watch is not None, "the step ran"
        found = [_span(run.track, self._us(run.start), self._us(run.end), run.name) for run in self._watch.runs]
        base = self._base
        for track, nbytes, completion in self._copies:
            if completion.is_done() and completion.end_us >= completion.start_us > 0:
                start, end = completion.start_us - base * 1e6, completion.end_us - base * 1e6
                found.append(_span(track, start, end, nbytes=nbytes))
        if self._sampler is not None:
            found += [
                _span(Track.STALL, (start - base) * 1e6, (end - base) * 1e6) for start, end in self._sampler.stalls
            ]
        if not self._meter.is_simulated:
            found += [_span(Track(span.track), span.start_us, span.end_us, nbytes=span.nbytes) for span in self._spans]
        return tuple(sorted(found, key=lambda span: span.start_us))


def _span(track: Track, start_us: float, end_us: float, name: str = "", *, nbytes: int = 0) -> WorkSpan:
    start = round(max(0.0, start_us), 1)
    return WorkSpan(track=track, name=name, start_us=start, end_us=max(start, round(end_us, 1)), nbytes=nbytes)


def _thinned(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Few enough points to draw: of every stretch the lowest and the highest, in their order."""
    if len(points) <= _MOST_POINTS:
        return points
    size = -(-2 * len(points) // _MOST_POINTS)
    kept: list[tuple[float, int]] = []
    for at in range(0, len(points), size):
        stretch = points[at : at + size]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def _where(memory: MemoryCurve, spans: Sequence[WorkSpan]) -> str:
    """What ran when the curve was highest."""
    if not memory.nbytes:
        return ""
    at = memory.times_us[memory.nbytes.index(max(memory.nbytes))]
    running = [span for span in spans if span.name and span.start_us <= at <= span.end_us]
    for track in (Track.REPLAY, Track.BACKWARD, Track.FORWARD):
        for span in running:
            if span.track is track:
                return f"{track.value} of {span.name}"
    backward = [span.start_us for span in spans if span.track is Track.BACKWARD]
    forward = [span.start_us for span in spans if span.track is Track.FORWARD]
    if backward and at < min(backward):
        return "start, before the first block" if forward and at < min(forward) else "head and loss"
    return "end, after the last block's backward" if backward else ""


def _fates(before: SwapStats, after: SwapStats, steps: int) -> tuple[FateTotal, ...]:
    rows = [
        (Fate.SWAP, "", after.swapped_out_bytes - before.swapped_out_bytes),
        (Fate.SAVE, "", after.saved_bytes - before.saved_bytes),
        (Fate.RECOMPUTE, "", after.recomputed_bytes - before.recomputed_bytes),
    ]
    rows += [
        (Fate.SAVE, reason, nbytes - before.kept_bytes.get(reason, 0)) for reason, nbytes in after.kept_bytes.items()
    ]
    return tuple(FateTotal(fate=fate, reason=reason, nbytes=n // steps) for fate, reason, n in rows if n >= steps)
