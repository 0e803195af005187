"""The table: every call site of a step × every fault, and what may come of it. No cell is empty.

A cell is an experiment (:class:`Cell`), or a sentence that says why this cannot happen there. An experiment tries the fault at
every call of the site in the step, or at evenly spread ones where there are many.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hyper_parallel.backends.torch.devices import HostBackend
from hyper_parallel.core.activation_checkpoint.far import disk_file
from hyper_parallel.core.activation_checkpoint.far.disk_workers import Workers
from hyper_parallel.simulation.backend import SimulatedBackend

from . import inject
from .bench import Bench, expected_gradients, trial
from .inject import AnyMoment, Handlers, OpSite, Site
from .ranks import partner_dies

__all__ = ["CELLS", "FAULTS", "ROWS", "Cell", "Row"]

MOST_CALLS: Final = 10  # at more calls than this, evenly spread ones are tried
MOST_MOMENTS: Final = 40

PINNED: Final = Bench(name="pinned")
PAGEABLE: Final = Bench(name="pageable", tiers=("pageable",))
SPILL: Final = Bench(name="pinned, then disk", tiers=("pinned", "disk"))
DISK: Final = Bench(name="disk, simulated device", tiers=("disk",))
HOST: Final = Bench(name="disk, host memory", is_simulated=False, tiers=("disk",))
CHECKED: Final = Bench(name="pinned, verified", verify=True)
ON_DEMAND: Final = Bench(name="pinned, nothing ahead", prefetch_bytes=0)

FAULTS: Final = {
    "refused": "no memory, no room on the disk",
    "fails": "an error of the device or the disk",
    "short": "fewer bytes moved than asked for",
    "flipped": "a bit comes back different",
    "slow": "every call takes its time",
    "interrupted": "Ctrl-C: a real SIGINT, before and after the call",
    "terminated": "a real SIGTERM, with a handler that raises",
    "worker dies": "our threads end",
    "partner dies": "another rank ends",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A call site under a device. ``kind`` says what it asks for."""

    name: str
    kind: str
    site: Any = None  # Site | OpSite | AnyMoment; None: the row has an experiment of its own
    bench: Bench = PINNED
    is_warm: bool = False  # whether it is reached in a step that is not the first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One experiment: what may come of it, in the words of ``Outcome``."""

    row: Row
    acts: tuple[Any, ...]
    allowed: frozenset[str]
    lasts: bool = False  # tried once with one bad call, and once with all calls from there on
    bench: Bench | None = None
    every_call: bool = False
    around: Any = contextlib.nullcontext
    run_alone: Any = None  # an experiment of its own, in place of all that

    def run(self, folder: Path) -> collections.Counter[str]:
        """How often what came of it. Raises where a promise was broken."""
        if self.run_alone is not None:
            return collections.Counter(self.run_alone(folder))
        outcomes: collections.Counter[str] = collections.Counter()
        for act, at, lasts in self._trials(folder):
            outcomes[self._try(folder, act, at, lasts)] += 1
        return outcomes

    def _trials(self, folder: Path) -> Iterator[tuple[Any, int | None, bool]]:
        if self.every_call:
            yield from ((act, None, False) for act in self.acts)
            return
        made = self._count_calls(folder)
        assert made, f"{self.row.name}: the step never comes there"
        for act in self.acts:
            for lasts in (False, True)[: 1 + self.lasts]:
                yield from (
                    (act, at, lasts) for at in _spread(made, MOST_MOMENTS if self.row.kind == "moment" else MOST_CALLS)
                )

    def _count_calls(self, folder: Path) -> int:
        seen: list[Any] = []

        @contextlib.contextmanager
        def counting() -> Iterator[None]:
            with self.row.site.replaced(None, inject.as_it_is) as calls:
                yield
            seen.append(calls)

        trial(self._bench, folder, counting, is_warm=self.row.is_warm, reference=_reference())
        made: int = seen[0].made
        return made

    def _try(self, folder: Path, act: Any, at: int | None, lasts: bool) -> str:
        handlers = Handlers()
        seen: list[Any] = []

        @contextlib.contextmanager
        def fault() -> Iterator[None]:
            with handlers.installed(), self.around(), self.row.site.replaced(at, act, lasts=lasts) as calls:
                seen.append(calls)
                yield

        outcome = trial(
            self._bench,
            folder,
            fault,
            is_warm=self.row.is_warm,
            reference=_reference(),
            may_hold=lambda: handlers.swallowed > 0,
            holds_until_next=self.row.kind == "workers",
        )
        if handlers.swallowed:
            return _SWALLOWED
        # How a file is cut into calls differs a little from step to step.
        is_missed = at is not None and bool(seen) and seen[0].made <= at
        return _NOT_REACHED if is_missed and outcome.error is None else str(outcome)

    @property
    def _bench(self) -> Bench:
        return self.bench or self.row.bench


def _spread(made: int, most: int) -> list[int]:
    if made <= most:
        return list(range(made))
    return sorted({round(number * (made - 1) / (most - 1)) for number in range(most)})


@functools.cache
def _reference() -> list[bytes]:
    return expected_gradients()


# ------------------------------------------------------------------ the rows


def _is_pinned(self: Any, nbytes: int, *, pinned: bool) -> bool:
    return pinned


def _is_pageable(self: Any, nbytes: int, *, pinned: bool) -> bool:
    return not pinned


def _goes_out(self: Any, destination: Any, source: Any, stream: Any) -> bool:
    return bool(self.is_host(destination))


def _comes_back(self: Any, destination: Any, source: Any, stream: Any) -> bool:
    return not _goes_out(self, destination, source, stream)


def _is_nameless(path: Any, flags: int, *args: Any, **kwargs: Any) -> bool:
    return flags & os.O_TMPFILE == os.O_TMPFILE


_HOST_MEMORY: Final = functools.partial(Site, owner=SimulatedBackend, attribute="allocate_host")
_WRITE: Final = Site(owner=disk_file.os, attribute="pwritev")
_READ: Final = Site(owner=disk_file.os, attribute="preadv")
_DEVICE_MEMORY: Final = Site(owner=SimulatedBackend, attribute="allocate")

ROWS: Final = (
    Row(name="pinned memory", kind="memory", site=_HOST_MEMORY(picks=_is_pinned)),
    Row(name="pageable memory", kind="memory", site=_HOST_MEMORY(picks=_is_pageable), bench=PAGEABLE),
    Row(name="pinned memory, a disk behind it", kind="memory", site=_HOST_MEMORY(picks=_is_pinned), bench=SPILL),
    Row(name="staging buffers of the disk", kind="memory", site=_HOST_MEMORY(picks=_is_pinned), bench=DISK),
    Row(name="buffer of a checksum", kind="memory", site=_HOST_MEMORY(picks=_is_pageable), bench=CHECKED),
    Row(name="device memory, loads ahead", kind="device memory", site=_DEVICE_MEMORY, is_warm=True),
    Row(
        name="device memory, loads on demand", kind="device memory", site=_DEVICE_MEMORY, bench=ON_DEMAND, is_warm=True
    ),
    Row(
        name="host memory of a load from disk",
        kind="device memory",
        site=Site(owner=HostBackend, attribute="allocate_at"),
        bench=HOST,
        is_warm=True,
    ),
    Row(name="an op of the step itself", kind="op", site=OpSite(), is_warm=True),
    Row(
        name="copy out", kind="copy", site=Site(owner=SimulatedBackend, attribute="copy", picks=_goes_out), is_warm=True
    ),
    Row(
        name="copy back",
        kind="copy",
        site=Site(owner=SimulatedBackend, attribute="copy", picks=_comes_back),
        is_warm=True,
    ),
    Row(
        name="opening the swap file",
        kind="open",
        site=Site(owner=disk_file.os, attribute="open", picks=_is_nameless),
        bench=HOST,
    ),
    Row(name="growing the swap file", kind="grow", site=Site(owner=disk_file, attribute="_fallocate"), bench=HOST),
    Row(name="writing, from host memory", kind="write", site=_WRITE, bench=HOST),
    Row(name="writing, from a device", kind="write", site=_WRITE, bench=DISK),
    Row(name="reading, into host memory", kind="read", site=_READ, bench=HOST, is_warm=True),
    Row(name="reading, for a device", kind="read", site=_READ, bench=DISK, is_warm=True),
    Row(name="worker threads, host memory", kind="workers", site=Site(owner=Workers, attribute="_next"), bench=HOST),
    Row(name="worker threads, a device", kind="workers", site=Site(owner=Workers, attribute="_next"), bench=DISK),
    Row(name="any moment, pinned memory", kind="moment", site=AnyMoment(), is_warm=True),
    Row(name="any moment, disk", kind="moment", site=AnyMoment(), bench=HOST, is_warm=True),
    Row(name="a collective of two ranks", kind="collective"),
)

# ------------------------------------------------------------------ what may come of it

_RIGHT: Final = "step right"  # of a read: the value was brought ahead and nobody asked for it
_KEPT: Final = "step right, bytes stay on the device"
_SWALLOWED: Final = "swallowed by Python in a destructor"
_NOT_REACHED: Final = "call not made in this step"
_INTERRUPTED: Final = frozenset({"KeyboardInterrupt", _SWALLOWED})
_TERMINATED: Final = frozenset({"Stopped", _SWALLOWED})

_INT: Final = (inject.signalled(signal.SIGINT, is_after=False), inject.signalled(signal.SIGINT, is_after=True))
_TERM: Final = (inject.signalled(signal.SIGTERM, is_after=False),)

_ONE_WAY: Final = "has one way to fail: refused"
_NO_BYTES: Final = "no bytes move here"
_NO_WORKER: Final = "no thread of ours takes part"
_NO_RANK: Final = "no other rank takes part"
_NO_ROOM: Final = "asks for no room"
_WHOLE: Final = "all bytes or an error; a device knows no third"

_CANNOT: Final[dict[str, dict[str, str]]] = {
    "memory": {"fails": _ONE_WAY, "short": _NO_BYTES, "flipped": _NO_BYTES, "worker dies": _NO_WORKER},
    "device memory": {"fails": _ONE_WAY, "short": _NO_BYTES, "flipped": _NO_BYTES, "worker dies": _NO_WORKER},
    "op": {"short": _WHOLE, "flipped": "the step's own numbers are its own affair", "worker dies": _NO_WORKER},
    "copy": {"refused": _NO_ROOM, "short": _WHOLE, "worker dies": _NO_WORKER},
    "open": {"short": _NO_BYTES, "flipped": _NO_BYTES, "worker dies": "starts them later"},
    "grow": {"short": _NO_BYTES, "flipped": _NO_BYTES, "worker dies": "does not wait for them"},
    "write": {"flipped": "noticed when it is read", "worker dies": "see the worker threads"},
    "read": {"refused": _NO_ROOM, "worker dies": "see the worker threads"},
    "workers": {"refused": _NO_ROOM, "fails": "see writing and reading", "short": _NO_BYTES, "flipped": _NO_BYTES},
    "moment": {
        **dict.fromkeys(("refused", "fails", "short", "flipped", "slow"), "see the calls above"),
        "worker dies": "see the worker threads",
    },
    "collective": {
        **dict.fromkeys(("refused", "fails", "short", "flipped"), "the framework's own affair"),
        "slow": "a collective waits, up to its limit",
        **dict.fromkeys(("interrupted", "terminated"), "inside the framework's call; see any moment"),
        "worker dies": _NO_WORKER,
    },
}


def _cells() -> Iterator[tuple[tuple[str, str], Cell | str]]:
    for row in ROWS:
        for fault in FAULTS:
            yield (row.name, fault), _cell(row, fault)


def _cell(row: Row, fault: str) -> Cell | str:
    if row.kind == "collective" and fault == "partner dies":
        return Cell(
            row=row, acts=(), allowed=frozenset({"error within the limit, next step right"}), run_alone=partner_dies
        )
    if fault == "partner dies":
        return _NO_RANK
    reason = _CANNOT[row.kind].get(fault)
    if reason is not None:
        return reason
    # A worker's call runs beside the step: the signal may find the step at its end.
    late = {_RIGHT, _NOT_REACHED} if row.kind in ("write", "read", "workers", "moment") else set()
    if fault == "interrupted":
        # After an open the kernel's number is lost with the interrupt, as it is around any os.open.
        return Cell(row=row, acts=_INT[:1] if row.kind in ("open", "moment") else _INT, allowed=_INTERRUPTED | late)
    if fault == "terminated":
        return Cell(row=row, acts=_TERM, allowed=_TERMINATED | late)
    if fault == "slow":
        return Cell(row=row, acts=(inject.slow,), allowed=frozenset({_RIGHT}), every_call=True)
    return _CAN[row.kind, fault](row)


def _refused_memory(row: Row) -> Cell:
    allowed = {_RIGHT, _KEPT, "FarMemoryError"} if row.bench.verify else {_RIGHT, _KEPT}
    return Cell(row=row, acts=(inject.raising(inject.out_of_memory),), allowed=frozenset(allowed), lasts=True)


def _refused_device_memory(row: Row) -> Cell:
    allowed = frozenset({_RIGHT, "MemoryError"})
    return Cell(row=row, acts=(inject.raising(inject.out_of_memory),), allowed=allowed, lasts=True)


def _failing(row: Row, make: Any, *allowed: str) -> Cell:
    return Cell(row=row, acts=(inject.raising(make),), allowed=frozenset(allowed), lasts=True)


def _checked(row: Row) -> Bench:
    return dataclasses.replace(row.bench, verify=True, timing="eager")


_CAN: Final[dict[tuple[str, str], Any]] = {
    ("memory", "refused"): _refused_memory,
    ("device memory", "refused"): _refused_device_memory,
    ("op", "refused"): lambda row: _failing(row, inject.out_of_memory, "MemoryError"),
    ("op", "fails"): lambda row: _failing(row, inject.device_broken, "RuntimeError"),
    ("copy", "fails"): lambda row: _failing(row, inject.device_broken, "RuntimeError"),
    ("copy", "flipped"): lambda row: (
        Cell(row=row, acts=(inject.flipped_copy,), allowed=frozenset({"CorruptDataError", _RIGHT}), bench=_checked(row))
        if row.name == "copy back"
        else "noticed when it comes back"
    ),
    ("open", "refused"): lambda row: _failing(row, inject.disk_full, "DiskTierError"),
    ("open", "fails"): lambda row: _failing(row, inject.disk_broken, "DiskTierError"),
    ("grow", "refused"): lambda row: Cell(
        row=row,
        acts=(inject.as_it_is,),
        allowed=frozenset({_KEPT}),
        around=lambda: inject.small_files(4096),
    ),
    ("grow", "fails"): lambda row: _failing(row, inject.disk_broken, _KEPT),
    ("write", "refused"): lambda row: _failing(row, inject.disk_full, "DiskTierError", _RIGHT, _KEPT, _NOT_REACHED),
    ("write", "fails"): lambda row: _failing(row, inject.disk_broken, "DiskTierError", _RIGHT, _KEPT, _NOT_REACHED),
    ("write", "short"): lambda row: Cell(row=row, acts=(inject.short,), allowed=frozenset({_RIGHT, _NOT_REACHED})),
    ("read", "fails"): lambda row: _failing(row, inject.disk_broken, "DiskTierError", _RIGHT, _NOT_REACHED),
    ("read", "short"): lambda row: Cell(
        row=row, acts=(inject.short, inject.ended), allowed=frozenset({_RIGHT, "DiskTierError", _NOT_REACHED})
    ),
    ("read", "flipped"): lambda row: Cell(
        row=row,
        acts=(inject.flipped_read,),
        allowed=frozenset({"CorruptDataError", _RIGHT, _NOT_REACHED}),
        bench=_checked(row),
    ),
    ("workers", "worker dies"): lambda row: Cell(
        row=row, acts=(inject.none_left,), allowed=frozenset({_RIGHT, "DiskTierError", _NOT_REACHED}), lasts=True
    ),
}

CELLS: Final = dict(_cells())
