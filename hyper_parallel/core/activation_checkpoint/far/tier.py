"""Far memory as the engine sees it: lend space for some bytes, write them, read them back, take the space back.

A tier knows sizes, caps and files. It never knows tensors, graphs or layers, and it decides nothing about *when*.

Rules every tier keeps
----------------------
1. ``reserve`` never blocks for long and never raises for lack of space: it answers with a reason instead of a lease.
2. ``write`` and ``read`` queue a copy and return; the completion they return orders everything else.
3. ``release`` may be called while a copy is in flight and from any thread, also from a destructor in the middle of
   another call of this tier. The space is used again only after ``after``: either that is done when the space is lent, or
   the new lease's ``write`` orders its stream behind it. It takes no lock it could already hold.
4. What was written stays readable, any number of times, until it is released.
5. An error of the medium names its path and leaves the bytes readable wherever they still are.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hyper_parallel.core.activation_checkpoint.adapter import Completion, DeviceBackend, Event, FlatBytes, Stream

__all__ = ["Lease", "Refusal", "Tier", "TierStatistics"]


class Refusal(str, enum.Enum):
    """Why a tier lends no space."""

    OVER_LIMIT = "over_limit"  # the user's cap, or the default one, would be exceeded
    NO_SPACE = "no_space"  # the host or the file system has no more


class Lease:
    """Space for ``nbytes`` in one tier. Only its tier reads ``extent``."""

    __slots__ = ("extent", "nbytes", "tier")

    def __init__(self, tier: Tier, nbytes: int, extent: Any) -> None:
        self.tier = tier
        self.nbytes = nbytes
        self.extent = extent  # a tier's own record of where the bytes are


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierStatistics:
    """What a tier holds and has done so far, in bytes."""

    name: str
    live_bytes: int
    peak_live_bytes: int
    held_bytes: int  # what the tier takes from the host or disk now, lent or not
    peak_held_bytes: int
    allocations: int  # how often it asked the host or the file system for more
    written_bytes: int
    read_bytes: int
    refusals: int
    limit_bytes: int | None


class Tier(Protocol):
    """One kind of far memory."""

    name: str

    def reserve(self, backend: DeviceBackend, nbytes: int) -> Lease | Refusal:
        """Space for ``nbytes``, or the reason why there is none."""

    def write(
        self, lease: Lease, source: FlatBytes, *, backend: DeviceBackend, stream: Stream, ready: Event
    ) -> Completion:
        """Queue a copy of ``source`` into the lease, on the outgoing copy stream, after ``ready``."""

    def read(
        self, lease: Lease, target: FlatBytes, *, backend: DeviceBackend, stream: Stream, ready: Event
    ) -> Completion:
        """Queue a copy of the lease's bytes into ``target``, on the incoming copy stream, after ``ready``."""

    def release(self, lease: Lease, after: Completion | None) -> None:
        """Take the space back once ``after`` is done."""

    def statistics(self) -> TierStatistics:
        """What it holds and has done so far."""

    def close(self) -> None:
        """Give everything back to the host; leases still out keep their bytes until they are released."""

    def retire(self) -> None:
        """The same without a wait, for destructors: what is still in use goes with its last use."""
