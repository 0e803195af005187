"""Which ranks of a group are there: what one rank reads from the store, and whom it names."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest

from hyper_parallel.backends.planning import rank_presence, world
from hyper_parallel.backends.planning.rank_presence import RankPresence
from hyper_parallel.backends.planning.world import RankedWorld
from hyper_parallel.core.processes import Process, launched_local_processes, start_ticks
from hyper_parallel.errors import LostRankError

ME = Process.current()
NOBODY = ME._replace(pid=2**22 + 1, start_ticks=7)  # larger than any number of a process
ELSEWHERE = ME._replace(host="another", host_name="another", pid_space="another")


class Store:
    """Keys in a dictionary."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.is_gone = False

    def _there(self) -> dict[str, str]:
        if self.is_gone:
            raise RuntimeError("Broken pipe")
        return self.keys

    def set(self, key: str, value: str) -> None:
        self._there()[key] = value

    def get(self, key: str) -> bytes:
        return self._there()[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._there() for key in keys)

    def add(self, key: str, amount: int) -> int:
        keys = self._there()
        keys[key] = str(int(keys.get(key, "0")) + amount)
        return int(keys[key])

    def delete_key(self, key: str) -> bool:
        return self._there().pop(key, None) is not None


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_presence, "_LOOK_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(rank_presence, "_GRACE_SECONDS", 0.0)


def test_a_rank_that_has_not_said_where_it_is_counts_as_local() -> None:
    store = Store()
    first = RankPresence(store, 0, 4)
    assert first.local_processes() == 4
    RankPresence(store, 1, 4, process=ELSEWHERE)
    assert first.local_processes() == 3
    RankPresence(store, 2, 4)
    assert first.local_processes() == 3
    store.is_gone = True
    assert first.local_processes() == 3, "what is known stays known"


def test_meetings_leave_only_the_keys_of_the_last_one() -> None:
    store = Store()
    ranks = [RankPresence(store, rank, 3) for rank in range(3)]
    for number in range(4):
        threads = [threading.Thread(target=rank.meet, args=(600.0,), kwargs={"who": "test"}) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert sorted(key.partition("/")[2] for key in store.keys if "peer" not in key) == [
            f"{number}/0",
            f"{number}/1",
            f"{number}/2",
            f"{number}/count",
            f"{number}/full",
        ]


def test_a_process_of_this_host_that_has_ended_is_named_to_all() -> None:
    store = Store()
    first, second = RankPresence(store, 0, 3), RankPresence(store, 1, 3)
    RankPresence(store, 2, 3, process=NOBODY)
    with pytest.raises(LostRankError, match=rf"^fit: rank 2 \(process {NOBODY.pid} on .*\) has ended") as found:
        first.meet(600.0, who="fit")
    assert found.value.ranks == (2,)
    with pytest.raises(LostRankError, match=r"^fit: rank 2 .*has ended"):  # the words of the first that found it
        second.meet(600.0, who="other")


def test_a_process_that_nobody_can_see_is_waited_for_until_the_timeout() -> None:
    store = Store()
    first = RankPresence(store, 0, 3)
    RankPresence(store, 1, 3, process=NOBODY._replace(pid_space="another"))
    with pytest.raises(
        LostRankError, match=r"rank 1 \(process .*\), rank 2 did not come within 0.01 s.*rank_timeout_seconds"
    ) as found:
        first.meet(0.01, who="fit")
    assert found.value.ranks == (1, 2)


def test_where_the_store_is_gone_those_that_ended_are_named() -> None:
    store = Store()
    first = RankPresence(store, 0, 3)
    RankPresence(store, 2, 3, process=NOBODY)
    assert first.local_ranks() == [0, 2]
    store.is_gone = True
    with pytest.raises(LostRankError, match=rf"rank 2 \(process {NOBODY.pid} .*has ended"):
        first.meet(600.0, who="fit")


def test_where_nobody_is_known_to_have_ended_the_keeper_of_the_store_is_named() -> None:
    store = Store()
    first = RankPresence(store, 1, 2)
    store.is_gone = True
    with pytest.raises(LostRankError, match=r"the process that keeps the store of the group .*rank 0"):
        first.meet(600.0, who="fit")


def test_after_an_error_without_a_lost_rank_none_is_found() -> None:
    store = Store()
    first = RankPresence(store, 0, 2)
    RankPresence(store, 1, 2)
    assert first.find_lost(0.0, who="step") is None
    store.set("hyper_parallel/lost", json.dumps([[1], "rank 1 is gone"]))
    found = first.find_lost(0.0, who="step")
    assert str(found) == "rank 1 is gone"


def test_a_process_that_was_not_waited_for_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = ME._replace(pid=child.pid, start_ticks=start_ticks(child.pid))
        assert not process.has_ended(ME)
        child.kill()
        while start_ticks(child.pid):  # it stays in the table until it is waited for
            time.sleep(0.01)
        assert process.has_ended(ME)


@pytest.mark.parametrize(
    ("environment", "count"), [({}, None), ({"LOCAL_WORLD_SIZE": "8"}, 8), ({"LOCAL_WORLD_SIZE": "x"}, None)]
)
def test_what_launchers_say(environment: dict[str, str], count: int | None) -> None:
    assert launched_local_processes(environment) == count


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_collective_that_breaks_names_the_lost_rank_or_raises_its_own_error(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Platform:
        def all_gather_object(self, rows: list[object], value: object) -> None:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")

    monkeypatch.setattr(world, "get_platform", Platform)
    monkeypatch.setattr(world, "_LOOK_SECONDS", 0.0)
    store = Store()
    store.set("hyper_parallel/0/full", "1")  # all have come
    RankPresence(store, 1, 2, process=NOBODY if is_lost else ME)
    ranks = RankedWorld(0, 2, RankPresence(store, 0, 2))
    with pytest.raises(RuntimeError) as found:  # the words are checked below
        ranks.gather(None)
    if is_lost:
        assert isinstance(found.value, LostRankError)
        assert found.value.ranks == (1,)
        assert "Connection closed" in str(found.value.__cause__)
    else:
        assert str(found.value).startswith("Connection closed by peer")
