"""One line at the end of the first step: by how much memory fell, what was swapped, made again and saved, and what stayed.

The peak is measured where the device counts its bytes. What it would have been without the library is the prediction of
the plan that was applied; without a plan it is estimated (see ``step_memory.py``).

It shows at once whether anything changed. The line goes to the logger
``hyper_parallel.summary`` at level INFO. Where logging was not set up it is written to standard error, as Python does
with warnings. It is off with ``HYPER_PARALLEL_SUMMARY=0``, with a level above INFO on that logger, and on all ranks but 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Mapping
from typing import Final

from hyper_parallel.config import show_bytes
from hyper_parallel.core.activation_checkpoint.statistics import INSIDE_REPLAYED_REGION, SwapStats
from hyper_parallel.core.activation_checkpoint.step_memory import MemoryChange, StepMemory

__all__ = ["LOGGER", "FirstStep", "is_wanted", "write"]

LOGGER: Final = logging.getLogger("hyper_parallel.summary")
_OFF: Final = ("0", "false", "no", "off")
_ALLOCATOR_SETTINGS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclasses.dataclass(kw_only=True)
class FirstStep:
    """What the line needs beside the counters, and whether it was written."""

    is_over: bool = False
    is_trial: bool = False  # trial steps run now, and none of them is the user's first step
    recomputed_regions: int = 0
    predicted: MemoryChange | None = None  # by the plan that was applied
    before: SwapStats | None = None  # what trial steps had counted when they ended
    memory: StepMemory = dataclasses.field(default_factory=StepMemory)
    retries_before: int = 0  # of the device's allocator, when the first region ended
    line: str = ""  # the line, once it was written

    def write_line(self, stats: SwapStats, *, peak_bytes: int | None = None, retries: int = 0) -> None:
        """Write the line about the first step.

        ``peak_bytes``: of the device; None where it does not count them. ``retries``: of its allocator, in this process.
        """
        self.line = _line(stats if self.before is None else _since(self.before, stats), self, peak_bytes)
        self.line += _retries_words(retries - self.retries_before)
        write(self.line)


def is_wanted(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process writes the line."""
    environment = os.environ if environment is None else environment
    is_off = environment.get("HYPER_PARALLEL_SUMMARY", "").strip().lower() in _OFF
    rank = environment.get("RANK") or environment.get("RANK_ID") or "0"  # as torchrun says it, and msrun
    return not is_off and rank == "0" and (LOGGER.isEnabledFor(logging.INFO) or _is_logging_unconfigured())


def _is_logging_unconfigured() -> bool:
    """No level and no handler was set, neither for this library nor for the root logger."""
    ours = (LOGGER, logging.getLogger("hyper_parallel"))
    return not logging.getLogger().handlers and not any(one.handlers or one.level for one in ours)


def write(line: str) -> None:
    """Write a line where a person will see it."""
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info(line)
    elif _is_logging_unconfigured():
        with contextlib.suppress(OSError, ValueError):  # a full disk or a closed stream behind it must not end a step
            _print_beside_bars(line)


def _print_beside_bars(line: str) -> None:
    """Print to standard error. A progress bar of tqdm is taken away and drawn again below the line."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None or not hasattr(tqdm, "write"):
        print(line, file=sys.stderr)
        return
    tqdm.write(line, file=sys.stderr)


def _since(before: SwapStats, stats: SwapStats) -> SwapStats:
    kept = {reason: nbytes - before.kept_bytes.get(reason, 0) for reason, nbytes in stats.kept_bytes.items()}
    python = {
        reason: count - before.regions_from_python.get(reason, 0) for reason, count in stats.regions_from_python.items()
    }
    return dataclasses.replace(
        stats,
        swapped_out_bytes=stats.swapped_out_bytes - before.swapped_out_bytes,
        recomputed_bytes=stats.recomputed_bytes - before.recomputed_bytes,
        saved_bytes=stats.saved_bytes - before.saved_bytes,
        exposed_copy_us=stats.exposed_copy_us - before.exposed_copy_us,
        regions_from_tape=stats.regions_from_tape - before.regions_from_tape,
        regions_from_python={reason: count for reason, count in python.items() if count},
        kept_bytes={reason: nbytes for reason, nbytes in kept.items() if nbytes},
    )


def _memory_words(stats: SwapStats, first_step: FirstStep, peak_bytes: int | None) -> str:
    """By how much memory fell; empty where nothing is known of it."""
    memory = first_step.memory
    less = memory.less_bytes(saved_bytes=stats.saved_bytes, swapped_bytes=stats.swapped_out_bytes)
    change = memory.change(peak_bytes=peak_bytes, less_bytes=less)
    if first_step.predicted is not None:
        measured = peak_bytes if change is not None else None
        change = first_step.predicted.measured(measured)
    if change is not None:
        return f"{change.sentence()}; "
    return f"about {show_bytes(less)} less held for backward; " if less else ""


def _line(stats: SwapStats, first_step: FirstStep, peak_bytes: int | None) -> str:
    done = [f"swapped {show_bytes(stats.swapped_out_bytes)}" if stats.swapped_out_bytes else "nothing was swapped"]
    regions = first_step.recomputed_regions
    if regions:
        how = f" ({show_bytes(stats.recomputed_bytes)})" if stats.recomputed_bytes else ""
        if stats.regions_from_tape:
            how += " from a tape" if stats.regions_from_tape >= regions else f", {stats.regions_from_tape} from a tape"
        done.append(f"recomputed {_counted(regions)}{how}")
    if stats.saved_bytes:
        done.append(f"saved {show_bytes(stats.saved_bytes)}")
    kept = ", ".join(f"{reason} {show_bytes(stats.kept_bytes[reason])}" for reason in sorted(stats.kept_bytes))
    if stats.exposed_copy_us >= 1:
        done.append(f"waited {stats.exposed_copy_us / 1e3:.1f} ms for copies")
    memory = _memory_words(stats, first_step, peak_bytes)
    words = f"hyper_parallel: first step: {memory}{', '.join(done)}{_python_again(stats.regions_from_python, regions)}"
    if kept:
        words += f"; stayed where it was: {kept}"
    if first_step.predicted is not None:
        predicted = f"predicted peak {show_bytes(first_step.predicted.with_bytes)}"
        words += (
            "" if predicted in memory else f"; {predicted}"
        )  # where nothing was measured, it is what memory fell to
    return words


def _retries_words(retries: int, environment: Mapping[str, str] | None = None) -> str:
    """What to do about an allocator that found no memory, gave back what it kept, and asked again; empty where it did not."""
    if retries <= 0:
        return ""
    environment = os.environ if environment is None else environment
    settings = ",".join(environment.get(name, "") for name in _ALLOCATOR_SETTINGS)
    if "expandable_segments:true" in settings.lower().replace(" ", ""):
        advice = "give the step a smaller budget"
    else:
        advice = f"set {_ALLOCATOR_SETTINGS[0]}=expandable_segments:True, or give the step a smaller budget"
    return f"; the allocator was out of memory and asked again {retries} time{'s' * (retries > 1)}, which is slow: {advice}"


def _counted(regions: int) -> str:
    return "1 region" if regions == 1 else f"{regions} regions"


def _python_again(reasons: Mapping[str, int], regions: int) -> str:
    """Why regions run Python again: the most frequent reason. Empty where none does, or where a framework has no recorder.

    A region inside another one runs Python again because that one does, so the reason of that one comes first.
    """
    if not reasons:
        return ""
    count = sum(reasons.values())
    first = max(reasons, key=lambda reason: (reason != INSIDE_REPLAYED_REGION, reasons[reason]))
    who = "they run" if count >= regions else "1 region runs" if count == 1 else f"{count} regions run"
    others = len(reasons) - 1
    more = f" ({others} more in stats().regions_from_python)" if others else ""
    return f"; {who} Python again: {first}{more}"
