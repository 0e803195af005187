"""Which ranks of a group are still there: each says where it runs, and all meet before they exchange anything.

Everything is a key in the store that the group was made with; there is no thread and no connection of our own. A key is
written by one rank and read by the others:

    peer/RANK     where this rank runs, written once
    N/RANK        this rank has come to meeting N
    N/full        all ranks have come
    lost          the first loss that any rank found, in words

A rank waits for a meeting by asking for ``N/full``. Meanwhile it asks whether a process of its own host that has not come has
ended, which is known at once, and whether another rank has written ``lost``. What no rank can see (a host that is gone, a rank
that hangs) ends with the timeout. The ranks that have not come are named in each case.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from hyper_parallel.core.processes import Process
from hyper_parallel.errors import LostRankError

__all__ = ["KeyStore", "RankPresence"]

_PREFIX: Final = "hyper_parallel/"
_LOST: Final = f"{_PREFIX}lost"
_FIRST_PAUSE_SECONDS: Final = 0.001
_LONGEST_PAUSE_SECONDS: Final = 0.1
_LOOK_EVERY_SECONDS: Final = 0.5  # how often a rank that waits looks for processes that have ended
_GRACE_SECONDS: Final = 1.0
_MOST_NAMED: Final = 8


class KeyStore(Protocol):
    """A store of keys that all ranks see, as ``torch.distributed.Store``. Its errors are ``RuntimeError``."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys are there; never waits."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and read it."""

    def delete_key(self, key: str) -> bool:
        """Remove a key."""


class RankPresence:
    """This rank among those of its group."""

    def __init__(self, store: KeyStore, rank: int, size: int, *, process: Process | None = None) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._me = process or Process.current()
        self._peers: dict[int, Process] = {rank: self._me}
        self._number = 0  # of the next meeting
        store.set(f"{_PREFIX}peer/{rank}", json.dumps(self._me))

    def local_processes(self) -> int:
        """How many ranks are on this host; a rank that has not said where it is counts. Never waits, never raises."""
        try:
            peers = self._known_peers(range(self._size))
        except RuntimeError:  # the store is gone
            peers = self._peers
        elsewhere = sum(peer.host != self._me.host for peer in peers.values())
        return self._size - elsewhere

    def local_ranks(self) -> list[int]:
        """The ranks of this host, in their order. After a meeting all are known."""
        peers = self._known_peers(range(self._size))
        return [rank for rank in range(self._size) if rank in peers and peers[rank].host == self._me.host]

    def meet(self, timeout_seconds: float, *, who: str) -> None:
        """Return when every rank has come here.

        Raises:
            LostRankError: a rank has ended, or did not come within ``timeout_seconds``; names it.
        """
        number, self._number = self._number, self._number + 1
        try:
            self._meet(number, timeout_seconds, who)
            if number:  # no rank asks for the keys of the meeting before any more
                self._store.delete_key(f"{_PREFIX}{number - 1}/{self._rank}")
        except LostRankError:
            raise
        except RuntimeError as error:  # of the store
            raise self._lost_store(who) from error

    def find_lost(self, within_seconds: float, *, who: str) -> LostRankError | None:
        """After an error: the rank that was lost, or None where none is found within this time."""
        deadline = time.monotonic() + within_seconds
        while True:
            try:
                found = self._found_by_others() or self._ended_here(range(self._size), who)
            except RuntimeError:
                return self._lost_store(who)
            if found is not None or time.monotonic() > deadline:
                return found
            time.sleep(_LONGEST_PAUSE_SECONDS)

    def _meet(self, number: int, timeout_seconds: float, who: str) -> None:
        store, full = self._store, f"{_PREFIX}{number}/full"
        store.set(f"{_PREFIX}{number}/{self._rank}", "1")
        if store.add(f"{_PREFIX}{number}/count", 1) == self._size:
            store.set(full, "1")
            if number:
                for name in ("full", "count"):
                    store.delete_key(f"{_PREFIX}{number - 1}/{name}")
        started = looked = time.monotonic()
        pause = _FIRST_PAUSE_SECONDS
        while not store.check([full]):
            now = time.monotonic()
            if now - looked >= _LOOK_EVERY_SECONDS:
                looked = now
                self._raise_if_lost(number, now - started >= timeout_seconds, timeout_seconds, who)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _raise_if_lost(self, number: int, is_late: bool, timeout_seconds: float, who: str) -> None:
        missing = [rank for rank in range(self._size) if not self._store.check([f"{_PREFIX}{number}/{rank}"])]
        found = self._found_by_others() or self._ended_here(missing, who)
        if found is None and is_late and missing:
            found = self._report(
                missing,
                f"{who}: {self._named(missing)} did not come within {timeout_seconds:g} s, and the other ranks wait no longer. "
                "Look at what it does, or raise SwapConfig.rank_timeout_seconds "
                "(HYPER_PARALLEL_RANK_TIMEOUT_SECONDS).",
            )
        if found is not None:
            raise found

    def _ended_here(self, ranks: Iterable[int], who: str) -> LostRankError | None:
        """The processes of this host that have ended."""
        peers = self._known_peers(ranks)
        ended = [rank for rank in ranks if rank in peers and peers[rank].has_ended(self._me)]
        if not ended:
            return None
        return self._report(
            ended,
            f"{who}: {self._named(ended)} has ended, so the other ranks stop too. Look for the reason in its output, and start "
            "the job again.",
        )

    def _report(self, ranks: Sequence[int], text: str) -> LostRankError:
        """Tell the other ranks. The first loss is the reason for all that follow."""
        if not self._store.check([_LOST]):
            self._store.set(_LOST, json.dumps([list(ranks), text]))
        return self._found_by_others() or _error(ranks, text)

    def _found_by_others(self) -> LostRankError | None:
        if not self._store.check([_LOST]):
            return None
        ranks, text = json.loads(self._store.get(_LOST))
        return _error(ranks, text)

    def _lost_store(self, who: str) -> LostRankError:
        """The store cannot be asked any more, and with it what the others found.

        A rank that stops looks like one that was lost to those that look later, so all look before one stops.
        """
        ended = [rank for rank, peer in self._peers.items() if peer.has_ended(self._me)]
        time.sleep(_GRACE_SECONDS)
        named = (
            self._named(ended) if ended else "the process that keeps the store of the group (rank 0, or the launcher)"
        )
        return _error(
            ended or [0],
            f"{who}: {named} has ended, so the other ranks stop too. Look for the reason in its output, and start the job again.",
        )

    def _known_peers(self, ranks: Iterable[int]) -> dict[int, Process]:
        unknown = [rank for rank in ranks if rank not in self._peers]
        keys = [f"{_PREFIX}peer/{rank}" for rank in unknown]
        are_all_there = bool(keys) and self._store.check(keys)
        for rank, key in zip(unknown, keys):
            if are_all_there or self._store.check([key]):
                self._peers[rank] = Process(*json.loads(self._store.get(key)))
        return self._peers

    def _named(self, ranks: Sequence[int]) -> str:
        names = []
        for rank in ranks[:_MOST_NAMED]:
            peer = self._peers.get(rank)
            names.append(f"rank {rank}" + (f" (process {peer.pid} on {peer.host_name})" if peer is not None else ""))
        rest = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
        return ", ".join(names) + rest


def _error(ranks: Sequence[int], text: str) -> LostRankError:
    error = LostRankError(text)
    error.ranks = tuple(ranks)
    return error
