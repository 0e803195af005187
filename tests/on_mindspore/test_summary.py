"""One line at the end of the first step, as on torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mindspore
import pytest
from mindspore import mint

import hyper_parallel as hp
from hyper_parallel.core.activation_checkpoint.summary import LOGGER

from .models import WIDTH, Block


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER.name]


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (hp.swap_wrapper, "nothing was swapped; stayed where it was: below_min_bytes "),
        (hp.checkpoint_wrapper, "nothing was swapped, recomputed 2 regions"),
        (lambda cell: hp.checkpoint_wrapper(cell, swap_inputs=True), "nothing was swapped, recomputed 2 regions"),
    ],
    ids=["swap", "checkpoint", "swap_inputs"],
)
def test_it_is_said_once(wrap: Callable[[Any], Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER.name)
    first, second = wrap(Block()), wrap(Block())

    def forward(x: Any) -> Any:
        return second(first(x)).sum()

    x = mint.ones((2, WIDTH))
    forward(x)  # no gradient is recorded
    assert lines(caplog) == []
    weights = [*first.trainable_params(), *second.trainable_params()]
    gradients = mindspore.value_and_grad(forward, None, weights=weights)
    gradients(x)
    gradients(x)
    (line,) = lines(caplog)
    assert line.startswith(f"hyper_parallel: first step: {words}")
    assert "tape" not in line, "there is no recorder for MindSpore"
    assert "Python again" not in line


def test_off_is_off(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER.name)
    monkeypatch.setenv("HYPER_PARALLEL_SUMMARY", "0")
    block = hp.swap_wrapper(Block())
    mindspore.value_and_grad(lambda x: block(x).sum(), None, weights=block.trainable_params())(mint.ones((2, WIDTH)))
    assert lines(caplog) == []
