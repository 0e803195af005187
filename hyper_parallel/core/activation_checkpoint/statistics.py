"""What happened to saved values: counters that the engine fills, and the frozen record that users read."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from hyper_parallel.core.activation_checkpoint.far.tier import TierStatistics

__all__ = ["INSIDE_REPLAYED_REGION", "Counters", "KeepReason", "SwapStats"]

SCHEMA = 1
INSIDE_REPLAYED_REGION = "inside a region whose Python runs again"  # a key of SwapStats.regions_from_python


class KeepReason:
    """Why a value that could have been swapped stays on the device. Plain strings: they are keys of a report."""

    SMALL = "below_min_bytes"
    HOST = "already_on_host"
    PARAMETER = "parameter"
    EMPTY = "empty"
    EXOTIC = "no_plain_storage"  # sparse, nested, quantized, wrapper subclasses, without data
    IN_BACKWARD = "saved_during_backward"  # a replay, or a graph of the gradient
    POLICY = "policy"
    TAIL = "needed_first"
    OVER_LIMIT = "over_limit"
    NO_SPACE = "no_space"
    LAST_GROUP = "last_group"
    PROTECTED = "protected_output"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapStats:
    """A snapshot of everything counted since the last reset. Bytes and microseconds."""

    schema: int = SCHEMA
    saved_bytes: int
    recomputed_bytes: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    kept_bytes: Mapping[str, int]
    kept_count: Mapping[str, int]
    replayed_ops: Mapping[str, int]
    overruled: Mapping[str, int]
    regions_from_tape: int
    regions_from_python: Mapping[str, int]
    bytes_by_tag: Mapping[str, int]
    hidden_copy_us: float
    exposed_copy_us: float
    peak_resident_bytes: int
    pinned_bytes: int
    prefetch_hits: int
    late_loads: int
    misses: int
    shared_copies: int
    shared_bytes: int
    live_records: int
    tiers: tuple[TierStatistics, ...]

    def since(self, before: SwapStats) -> SwapStats:
        """What was counted after ``before``. What is no count stays as it is: peaks, what tiers hold, how many records live."""
        changes: dict[str, Any] = {name: max(0, getattr(self, name) - getattr(before, name)) for name in _TOTALS}
        changes |= {name: _difference(getattr(self, name), getattr(before, name)) for name in _TABLES}
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            plain[field.name] = dict(value) if isinstance(value, Mapping) else value
        plain["tiers"] = [dataclasses.asdict(tier) for tier in self.tiers]
        return plain


_TOTALS: Final = (
    "saved_bytes",
    "recomputed_bytes",
    "regions_from_tape",
    "swapped_out_bytes",
    "swapped_in_bytes",
    "hidden_copy_us",
    "exposed_copy_us",
    "prefetch_hits",
    "late_loads",
    "misses",
    "shared_copies",
    "shared_bytes",
)
_TABLES: Final = ("kept_bytes", "kept_count", "replayed_ops", "overruled", "regions_from_python", "bytes_by_tag")


def _difference(after: Mapping[str, int], before: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(
        {key: count - before.get(key, 0) for key, count in after.items() if count > before.get(key, 0)}
    )


class Counters:
    """The running totals. One lock, held for an addition only, so that two threads lose nothing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.trace: Callable[[str, Any], None] | None = None  # called with (what, record) at every step of the schedule
        self.on_replay: Callable[[Any, bool], None] | None = None
        """Called with a region's module or function where a replay of its tape begins (True) and ends (False)."""
        self.on_region: Callable[[Any, str], None] | None = None
        """Called by :meth:`count_region` with the same arguments."""
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        self.saved_bytes = 0
        self.recomputed_bytes = 0
        self.swapped_out_bytes = 0
        self.swapped_in_bytes = 0
        self.kept_bytes: Counter[str] = Counter()
        self.kept_count: Counter[str] = Counter()
        self.replayed_ops: Counter[str] = Counter()
        self.overruled: Counter[str] = Counter()
        self.regions_from_tape = 0
        self.regions_from_python: Counter[str] = Counter()
        self.bytes_by_tag: Counter[str] = Counter()
        self.copy_us = 0.0
        self.exposed_copy_us = 0.0
        self.peak_resident_bytes = 0
        self.prefetch_hits = 0
        self.late_loads = 0
        self.misses = 0
        self.shared_copies = 0
        self.shared_bytes = 0

    def keep(self, reason: str, nbytes: int) -> None:
        """Count a value that stays."""
        with self.lock:
            self.kept_bytes[reason] += nbytes
            self.kept_count[reason] += 1

    def keep_many(self, reason: str, nbytes: int, count: int) -> None:
        """The same for ``count`` values at once."""
        with self.lock:
            self.kept_bytes[reason] += nbytes
            self.kept_count[reason] += count

    def add(self, field: str, amount: float) -> None:
        """Add to one plain total."""
        with self.lock:
            self.__dict__[field] += amount

    def add_to(self, field: str, key: str, amount: int = 1) -> None:
        """Add to one entry of a table."""
        with self.lock:
            getattr(self, field)[key] += amount

    def count_region(self, region: Any, reason: str) -> None:
        """Count one call of a region (a module or a function): why it runs Python again; empty: it runs from a tape."""
        if reason:
            self.add_to("regions_from_python", reason)
        else:
            self.add("regions_from_tape", 1)
        if self.on_region is not None:
            self.on_region(region, reason)

    def count_recorded(self, region: Any, reason: str, recomputed_bytes: int, saved_bytes: int) -> None:
        """Count one recorded call of a region: as :meth:`count_region`, and the bytes that its tape makes again and keeps."""
        with self.lock:
            self.recomputed_bytes += recomputed_bytes
            self.saved_bytes += saved_bytes
        self.count_region(region, reason)

    def snapshot(self, *, tiers: tuple[TierStatistics, ...], live_records: int) -> SwapStats:
        """The frozen record."""
        with self.lock:
            return SwapStats(
                saved_bytes=self.saved_bytes,
                recomputed_bytes=self.recomputed_bytes,
                swapped_out_bytes=self.swapped_out_bytes,
                swapped_in_bytes=self.swapped_in_bytes,
                hidden_copy_us=max(0.0, self.copy_us - self.exposed_copy_us),
                exposed_copy_us=self.exposed_copy_us,
                peak_resident_bytes=self.peak_resident_bytes,
                pinned_bytes=sum(tier.held_bytes for tier in tiers if tier.name == "pinned"),
                prefetch_hits=self.prefetch_hits,
                late_loads=self.late_loads,
                misses=self.misses,
                shared_copies=self.shared_copies,
                shared_bytes=self.shared_bytes,
                live_records=live_records,
                tiers=tiers,
                kept_bytes=_frozen(self.kept_bytes),
                kept_count=_frozen(self.kept_count),
                replayed_ops=_frozen(self.replayed_ops),
                overruled=_frozen(self.overruled),
                regions_from_tape=self.regions_from_tape,
                regions_from_python=_frozen(self.regions_from_python),
                bytes_by_tag=_frozen(self.bytes_by_tag),
            )


def _frozen(table: Counter[str]) -> Mapping[str, int]:
    return MappingProxyType({key: count for key, count in table.items() if count})
