"""Ranks of one host share its memory and its link, with nothing set."""

from __future__ import annotations

from pathlib import Path

import pytest

from .launch import Ended, launch
from .worker import LINK_BYTES_PER_SECOND, MACHINE_BYTES, MIB

OF_ONE_PROCESS = MACHINE_BYTES // 2


def _check_shares(ended: list[Ended]) -> None:
    for rank, one in enumerate(ended):
        assert one.said is not None, f"rank {rank}: {one.output}"
    found = [one.said["shared"] for one in ended]
    assert all(row["limit"] == OF_ONE_PROCESS // len(ended) for row in found), found
    assert all(row["refusals"] > 0 and row["out"] > 0 for row in found), found
    held = sum(row["held"] for row in found)
    assert OF_ONE_PROCESS // 2 < held <= OF_ONE_PROCESS


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_memory_and_the_link_of_their_host(size: int, tmp_path: Path) -> None:
    """Without a launcher's variables: the ranks find one another through the store of their group."""
    ended = launch("shared_host", size, tmp_path)
    _check_shares(ended)
    for one in ended:
        assert one.said["explicit"]["limit"] == 3 * MIB, "a limit that is set is for each process"
        shared = LINK_BYTES_PER_SECOND / size
        assert one.said["link"] == [size, LINK_BYTES_PER_SECOND, LINK_BYTES_PER_SECOND, shared, shared]


def test_processes_without_a_group_share_as_the_launcher_says(tmp_path: Path) -> None:
    _check_shares(launch("pinned_memory_without_a_group", 2, tmp_path, LOCAL_WORLD_SIZE="2"))
