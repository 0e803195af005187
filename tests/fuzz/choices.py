"""Where a generator's decisions come from, and the decisions that are the same for every framework."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from fuzz.program import Settings

__all__ = ["Choices", "HypothesisChoices", "RandomChoices", "chance", "settings_of"]

T = TypeVar("T")


class Choices(Protocol):
    """Where a generator's decisions come from. The first option is the simplest."""

    def one_of(self, options: Sequence[T]) -> T: ...

    def integer(self, low: int, high: int) -> int: ...


class RandomChoices:
    """Fast choices by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one_of(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def integer(self, low: int, high: int) -> int:
        return low + int(self._random.random() * (high - low + 1))


class HypothesisChoices:
    """Choices that hypothesis can shrink."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        from hypothesis import strategies

        self._draw, self._strategies = draw, strategies

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(self._strategies.integers(low, high)))


def chance(choices: Choices, percent: int) -> bool:
    """True in so many of a hundred cases; the simplest is False."""
    return choices.integer(0, 99) >= 100 - percent


def settings_of(choices: Choices) -> Settings:
    """How the simulated device and the engine are set."""
    # Mostly settings under which bytes really leave and come back: a tail or a window as large as the program keeps all.
    timing, seed = choices.one_of(("lazy", "random", "lazy", "random", "eager")), choices.integer(0, 999)
    return Settings(
        timing=timing,
        seed=seed,
        min_bytes=choices.one_of((0, 0, 0, 0, 0, 0, 16, 48)),
        tail_bytes=choices.one_of((0, 0, 0, 0, 0, 64, 512)),
        window_bytes=choices.one_of((0, 0, 0, 0, 64, 512, 65536)),
        prefetch_bytes=choices.one_of((65536, 0, 64, 512)),
        device_bytes=(None, None, 0, 2048, 16384, 65536)[seed % 6],  # no choice of its own: programs keep their numbers
        host_limit=choices.one_of((None,) * 12 + (0, 64, 256, 1024, 4096)),
        tiers=choices.one_of((("pinned",),) * 6 + (("pageable",), ("pinned", "pageable"), ("pinned", "disk"))),
        verify=choices.one_of((False, False, True)),
    )
