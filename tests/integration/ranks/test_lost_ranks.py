"""A rank that ends leaves nothing behind, and the others end with an error that names it."""

from __future__ import annotations

import signal
from pathlib import Path

from .launch import Ended, launch


def _survivors(ended: list[Ended], *, has_store: bool = True) -> list[Ended]:
    """The last rank was killed. The others name it, whichever of them noticed first.

    Where the store of the group went with it, a rank that notices late may take one that has stopped for lost as well.
    """
    *survivors, lost = ended
    assert lost.code == -signal.SIGKILL, lost.output
    for rank, one in enumerate(survivors):
        assert one.said is not None, f"rank {rank} ended with {one.code}: {one.output}"
        assert len(survivors) in one.said["ranks"], one.said
        assert has_store is False or one.said["ranks"] == [len(survivors)], one.said
        assert f"rank {len(survivors)} (process " in one.said["text"]
        assert "has ended, so the other ranks stop too" in one.said["text"]
    return survivors


def test_a_rank_that_ends_while_the_ranks_plan_is_named(tmp_path: Path) -> None:
    for one in _survivors(launch("lost_while_planning", 3, tmp_path)):
        assert one.said["text"].startswith("fit_memory: rank 2 ")


def test_a_rank_that_ends_with_the_store_of_the_group_is_named(tmp_path: Path) -> None:
    _survivors(launch("lost_with_the_store", 3, tmp_path), has_store=False)


def test_a_rank_that_ends_in_a_measured_step_is_named(tmp_path: Path) -> None:
    """The step has collectives of torch; their error is the cause of ours."""
    for one in _survivors(launch("lost_in_a_step_of_a_plan", 3, tmp_path)):
        assert "RuntimeError" in one.said["cause"]


def test_a_rank_that_ends_in_training_leaves_nothing_behind(tmp_path: Path) -> None:
    for one in _survivors(launch("lost_in_training", 2, tmp_path)):
        assert one.said["text"].startswith("training step: rank 1 ")
        assert "RuntimeError" in one.said["cause"]
    assert list((tmp_path / "disk").iterdir()) == []
    for rank in range(2):
        for name in (tmp_path / f"shared-{rank}").read_text().split("\n"):
            assert not name or not Path(name).exists()


def test_a_rank_that_does_not_come_is_named_after_the_timeout(tmp_path: Path) -> None:
    first, last = launch("late", 2, tmp_path)
    assert last.code == 0, last.output
    assert first.said is not None, first.output
    assert first.said["ranks"] == [1]
    assert "did not come within 1 s" in first.said["text"]
    assert "rank_timeout_seconds" in first.said["text"]
