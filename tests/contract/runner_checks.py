"""Checks that go wrong on purpose, for the test of the runner itself; pytest does not collect them."""

from __future__ import annotations

import time

from .worker import World


class Passes:
    """Every rank is content."""

    @staticmethod
    def check(world: World) -> None:
        assert world.platform.get_world_size() == world.size


class FailsOnOne:
    """Rank 1 fails and the others do not."""

    @staticmethod
    def check(world: World) -> None:
        print(f"rank {world.rank} says hello")
        if world.rank == 1:
            raise AssertionError("only rank 1 is unhappy")


class Hangs:
    """Rank 0 never comes back."""

    @staticmethod
    def check(world: World) -> None:
        while world.rank == 0:
            time.sleep(1)
