"""How these tests make an engine and call it: one function per engine method whose name may change."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.far.memory import FarMemory
from hyper_parallel.core.activation_checkpoint.record import Position, Record
from hyper_parallel.core.activation_checkpoint.residency import Move
from hyper_parallel.core.activation_checkpoint.statistics import Counters

from .fake_device import FakeDevice

UNIT = 64
"""The bytes of every saved value, unless a test says otherwise."""
HOST_LIMIT = 2**20


class FakeSource:
    """What the engine asks of a :class:`Source`, as a test says it is."""

    def __init__(
        self,
        key: Hashable = None,
        version: int = 0,
        *,
        is_alive: Callable[[], bool] = lambda: True,
        is_unchanged: Callable[[], bool] = lambda: True,
    ) -> None:
        self.storage_key = self.share_key = id(self) if key is None else key
        self.version = version
        self.is_alive = is_alive
        self.is_unchanged = is_unchanged


class Schedule:
    """An engine on a fake device, and what it says it does: (``offload`` | ``drop`` | ``load`` | ``use`` | ``miss``, tag)."""

    def __init__(self, device: FakeDevice | None = None, **settings: Any) -> None:
        self.device = FakeDevice() if device is None else device
        self.counters = Counters()
        self.events: list[str] = []
        self.counters.trace = lambda what, record: self.events.append(f"{what} {record.tag}")
        config = SwapConfig(
            **{"tail_bytes": 0, "window_bytes": 0, "prefetch_bytes": 0, "host_limit": HOST_LIMIT, **settings}
        )
        self.far = FarMemory(config)
        self.engine = Engine(self.device, config, self.far, self.counters)

    def save(self, name: str, *, sequence: int = 0, nbytes: int = UNIT, **arguments: Any) -> Record:
        """An op made ``nbytes`` full of the first letter of ``name``, and autograd saved them."""
        made = self.device.fill(name[:1].encode() * nbytes)
        return self.engine.admit(made, nbytes, position=Position(sequence), tag=name, **arguments)

    def save_all(self, names: str, **arguments: Any) -> list[Record]:
        """One value per letter, in forward order."""
        return [self.save(name, sequence=at, **arguments) for at, name in enumerate(names)]

    def read(self, record: Record, task: Task | None = None) -> str:
        """What a consumer on the current stream reads, as the set of letters; everything queued runs."""
        found = self.engine.fetch(record, task)
        seen: list[bytes] = []
        self.device.queue(lambda: seen.append(bytes(found)))
        self.device.run()
        return "".join(sorted(set(seen[0].decode())))

    def take_events(self) -> list[str]:
        """What the engine did since the last look."""
        events, self.events = self.events, []
        return events


class Task:
    """One backward run that reaches the sequence numbers for which ``reaches`` holds."""

    def __init__(self, reaches: Callable[[int], bool] = lambda sequence: True) -> None:
        self.key = object()
        self._reaches = reaches
        self._callbacks: list[Callable[[], None]] = []
        self.asked = 0

    def reach(self) -> Callable[[int, int], bool]:
        self.asked += 1
        return lambda first, last: any(self._reaches(sequence) for sequence in range(first, last + 1))

    def at_end(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        """The run is over."""
        for callback in self._callbacks:
            callback()


def copy_out_before_change(engine: Engine, record: Record) -> bool:
    return engine.finish_copy_before_write(record)


def check_window(engine: Engine) -> None:
    engine.trim_window()


def begin_replay(engine: Engine, task: Task, *, is_near: bool = True) -> None:
    engine.start_prefetch(task, is_near=is_near)


def drop_after_replay(engine: Engine, record: Record) -> None:
    engine.drop_after_replay(record)


def make_move(record: Record, move: Move) -> None:
    """Ask ``record`` for one move of the table."""
    {
        Move.START_OFFLOAD: record.start_offload,
        Move.FINISH_OFFLOAD: record.finish_offload,
        Move.CANCEL_OFFLOAD: record.cancel_offload,
        Move.START_LOAD: record.start_load,
        Move.FINISH_LOAD: record.finish_load,
    }[move]()


def tags(records: Iterable[Record]) -> list[str | None]:
    return [record.tag for record in records]
