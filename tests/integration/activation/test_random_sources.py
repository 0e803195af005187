"""``preserve_rng_state`` and the random sources that are not torch's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hyper_parallel as hp

DRAWN: list[float] = []  # a global name is not in reach of a region: what a replay adds stays

DRAWS: dict[str, tuple[Callable[[Any], float], Callable[[], Any]]] = {
    "random": (lambda _: random.random(), lambda: None),
    "numpy.random": (lambda _: float(np.random.rand()), lambda: None),
    "random.Random": (lambda source: float(source.random()), lambda: random.Random(5)),
    "numpy Generator": (lambda source: float(source.random()), lambda: np.random.default_rng(5)),
    "numpy RandomState": (lambda source: float(source.rand()), lambda: np.random.RandomState(5)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("preserves", [False, True])
@pytest.mark.python_replay
def test_a_replay_draws_the_same_numbers_unless_it_is_told_not_to(name: str, preserves: bool) -> None:
    draw, make = DRAWS[name]
    DRAWN.clear()

    def forward(x: torch.Tensor, source: Any) -> torch.Tensor:
        DRAWN.append(draw(source))
        return (x * DRAWN[-1]).exp()

    x = torch.ones(3, requires_grad=True)
    hp.checkpoint(forward, x, make(), preserve_rng_state=preserves).sum().backward()
    assert len(DRAWN) == 2
    assert (DRAWN[0] == DRAWN[1]) is preserves
