"""Far memory as the engine uses it: one interface to the tiers, in the order the user set.

A request goes to the first tier; where that one has no space, the refusal is counted by tier and reason, and the next is
asked. When all refuse, so does :class:`FarMemory`, and the engine keeps the bytes where they are.

With ``verify`` every write is checksummed before it leaves and every read is compared when its consumer is ordered
after it. Both hold the host until the bytes are there: a mode for tests and for finding broken hardware.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import weakref
import zlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import (
    Completion,
    DeviceBackend,
    Event,
    FlatBytes,
    Stream,
    StreamCompletion,
)
from hyper_parallel.core.activation_checkpoint.far.disk import DiskTier
from hyper_parallel.core.activation_checkpoint.far.host import HostBudget, HostTier
from hyper_parallel.core.activation_checkpoint.far.process_memory import (
    count_local_processes,
    default_host_limit_bytes,
)
from hyper_parallel.core.activation_checkpoint.far.tier import Lease, Refusal, Tier, TierStatistics
from hyper_parallel.errors import CorruptDataError, DiskTierError, FarMemoryError, again

__all__ = ["FarMemory", "Overflow", "PlacesBytes"]


@runtime_checkable
class PlacesBytes(Protocol):
    """A backend whose device is host memory, and which can say where in a page a buffer begins."""

    def allocate_at(self, nbytes: int, *, residue_bytes: int) -> FlatBytes:
        """Uninitialised bytes that begin ``residue_bytes`` after a page's first address, storage and all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overflow:
    """How often, and with how many bytes in all, one tier refused for one reason."""

    tier: str
    reason: Refusal
    count: int
    nbytes: int


class FarMemory:
    """The tiers of one :class:`~hyper_parallel.config.SwapConfig`, tried in spill order."""

    def __init__(self, config: SwapConfig) -> None:
        if config.host_limit is None:
            self._budget = HostBudget(default_host_limit_bytes(1), count_sharers=count_local_processes)
        else:
            self._budget = HostBudget(config.host_limit)
        self._verify = config.verify
        self._tiers = tuple(self._make_tier(name, config) for name in config.tiers)
        first = self._tiers[0]
        self.together = first if isinstance(first, HostTier) and not config.verify else None
        """The tier whose leases can be pieces of :meth:`write_together` and :meth:`read_together`; None where none can."""
        # A released lease still names its tier, so a tier would wait for the garbage collector.
        weakref.finalize(self, _retire, self._tiers).atexit = False
        self._refused_lock = threading.Lock()
        self._refused: collections.Counter[tuple[str, Refusal]] = collections.Counter()
        self._refused_bytes: collections.Counter[tuple[str, Refusal]] = collections.Counter()

    def _make_tier(self, name: str, config: SwapConfig) -> Tier:
        if name != "disk":
            return HostTier(self._budget, pinned=name == "pinned")
        assert config.disk_path is not None  # SwapConfig has checked it
        return DiskTier(
            config.disk_path, limit_bytes=config.disk_limit, budget=self._budget, count_sharers=count_local_processes
        )

    def reserve(self, backend: DeviceBackend, nbytes: int) -> Lease | Refusal:
        """Space in the first tier that has it, else the last tier's reason."""
        answer: Lease | Refusal = Refusal.OVER_LIMIT
        for tier in self._tiers_for(backend):
            answer = tier.reserve(backend, nbytes)
            if isinstance(answer, Lease):
                return _CheckedLease(answer) if self._verify else answer
            with self._refused_lock:
                self._refused[tier.name, answer] += 1
                self._refused_bytes[tier.name, answer] += nbytes
        return answer

    def reserve_together(self, backend: DeviceBackend, sizes: Sequence[int]) -> Sequence[Lease]:
        """Leases of :attr:`together` for the first of these sizes, as many as it has at once; ask one by one for the others."""
        if self.together is None or self._tiers_for(backend)[0] is not self.together:
            return ()
        return self.together.reserve_together(backend, sizes)

    def write(
        self, lease: Lease, source: FlatBytes, *, backend: DeviceBackend, stream: Stream, ready: Event
    ) -> Completion:
        """Queue a copy of ``source`` into the lease; see :class:`Tier`."""
        if isinstance(lease, _CheckedLease):
            backend.synchronize_event(ready)
            lease.checksum = _checksum(source, lease.nbytes, backend, stream)
        return lease.tier.write(lease, source, backend=backend, stream=stream, ready=ready)

    def allocate(self, backend: DeviceBackend, lease: Lease) -> FlatBytes:
        """Uninitialised device bytes for :meth:`read`, placed where the lease's tier fills them without a copy."""
        residue_bytes = lease.tier.residue_bytes(lease) if isinstance(lease.tier, DiskTier) else None
        if residue_bytes is None or not isinstance(backend, PlacesBytes):
            return backend.allocate(lease.nbytes)
        return backend.allocate_at(lease.nbytes, residue_bytes=residue_bytes)

    def read(
        self, lease: Lease, target: FlatBytes, *, backend: DeviceBackend, stream: Stream, ready: Event
    ) -> Completion:
        """Queue a copy of the lease's bytes into ``target``; see :class:`Tier`."""
        completion = lease.tier.read(lease, target, backend=backend, stream=stream, ready=ready)
        if isinstance(lease, _CheckedLease):
            return _CheckedCompletion(completion, lease, target, backend, stream)
        return completion

    def write_together(
        self, pieces: Sequence[tuple[Lease, FlatBytes]], *, backend: DeviceBackend, stream: Stream, ready: Event
    ) -> Completion:
        """Queue the copies out of several sources, each into its lease; see :attr:`together`."""
        assert self.together is not None, "a lease has said that it moves with others"
        return self.together.write_together(pieces, backend=backend, stream=stream, ready=ready)

    def read_together(
        self, pieces: Sequence[tuple[Lease, FlatBytes]], *, backend: DeviceBackend, stream: Stream, ready: Event
    ) -> Completion:
        """Queue the copies back of several leases; see :attr:`together`."""
        assert self.together is not None, "a lease has said that it moves with others"
        return self.together.read_together(pieces, backend=backend, stream=stream, ready=ready)

    def release(self, lease: Lease, after: Completion | None) -> None:
        """Take the space back once ``after`` is done; safe in destructors, see :class:`Tier`."""
        if after is not None and after.__class__ is not StreamCompletion:
            after = unchecked(after)  # a tier knows its own completions best, so it gets them bare
        lease.tier.release(lease, after)

    def host_bytes(self, lease: Lease) -> FlatBytes | None:
        """The lease's bytes where they lie in host memory in one piece; for looking, not for keeping."""
        return lease.tier.host_bytes(lease) if isinstance(lease.tier, HostTier) else None

    def statistics(self) -> tuple[TierStatistics, ...]:
        """What each tier holds and has done, in spill order."""
        return tuple(tier.statistics() for tier in self._tiers)

    def overflows(self) -> tuple[Overflow, ...]:
        """Every refusal so far, by tier in spill order and by reason."""
        with self._refused_lock:
            return tuple(
                Overflow(tier=tier.name, reason=reason, count=self._refused[key], nbytes=self._refused_bytes[key])
                for tier in self._tiers
                for reason in Refusal
                if (key := (tier.name, reason)) in self._refused
            )

    @property
    def failure(self) -> DiskTierError | None:
        """The first error of the disk tier, after which it lends no more; None while all is well."""
        return next((tier.failure for tier in self._tiers if isinstance(tier, DiskTier) and tier.failure), None)

    def close(self) -> None:
        """Give everything back; leases still out keep their bytes until they are released."""
        with contextlib.ExitStack() as stack:
            for tier in self._tiers:
                stack.callback(tier.close)

    def _tiers_for(self, backend: DeviceBackend) -> tuple[Tier, ...]:
        """Where the device is host memory, the host tiers would free nothing: a disk serves it, if there is one."""
        if backend.is_host_memory:
            return tuple(tier for tier in self._tiers if isinstance(tier, DiskTier)) or self._tiers
        return self._tiers


def _retire(tiers: tuple[Tier, ...]) -> None:
    for tier in tiers:
        tier.retire()


class _CheckedLease(Lease):
    """A lease that remembers what was written to it."""

    __slots__ = ("checksum",)

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease.tier, lease.nbytes, lease.extent)
        self.checksum: int | None = None


class _CheckedCompletion:
    """A read that is compared with what was written, the first time that something relies on it."""

    def __init__(
        self, bare: Completion, lease: _CheckedLease, target: FlatBytes, backend: DeviceBackend, stream: Stream
    ) -> None:
        self.bare = bare
        self._lock = threading.Lock()
        self._unchecked: tuple[_CheckedLease, FlatBytes, DeviceBackend, Stream] | None = (
            lease,
            target,
            backend,
            stream,
        )
        self._error: CorruptDataError | None = None

    def is_done(self) -> bool:
        return self.bare.is_done()

    def is_ordered_before(self, stream: Stream) -> bool:
        """See :class:`~hyper_parallel.core.activation_checkpoint.adapter.Completion`."""
        return False

    def order(self, stream: Stream) -> None:
        self._check()
        self.bare.order(stream)

    def wait(self) -> None:
        self._check()
        self.bare.wait()

    def _check(self) -> None:
        with self._lock:
            if self._unchecked is not None:
                lease, target, backend, stream = self._unchecked
                self.bare.wait()
                try:
                    found = _checksum(target, lease.nbytes, backend, stream)
                except MemoryError as error:
                    raise FarMemoryError(
                        f"{lease.tier.name}: cannot check {lease.nbytes} bytes that were read back, because the host has no "
                        "memory for a copy of them; leave verify=True off, or lower SwapConfig.host_limit"
                    ) from error
                self._unchecked = None  # lets the target go; a second look would compare what its user made of it
                if found != lease.checksum:
                    self._error = CorruptDataError(
                        f"{lease.tier.name}: cannot return {lease.nbytes} bytes; because they are not those that were "
                        f"written (checksum {found:#010x}, expected {lease.checksum:#010x}); "
                        f"check this machine's {'disk' if lease.tier.name == 'disk' else 'memory'}, "
                        "or leave that tier out of SwapConfig.tiers"
                    )
        if self._error is not None:
            raise again(self._error)


def unchecked(copy: Completion) -> Completion:
    """The same completion for a caller that drops the bytes: what is not read needs no checksum, and no wait for one."""
    return copy.bare if isinstance(copy, _CheckedCompletion) else copy


def _checksum(flat: FlatBytes, nbytes: int, backend: DeviceBackend, stream: Stream) -> int:
    """Of bytes that are there already; a device's are copied to the host for it."""
    if not backend.is_host_memory:
        host = backend.allocate_host(nbytes, pinned=False)
        backend.copy(host, flat, stream)
        backend.synchronize_event(backend.record_event(stream))
        flat = host
    return zlib.crc32(backend.host_view(flat))
