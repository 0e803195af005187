"""Every scenario, under every kind and timing: bitwise what the same step gives without the engine."""

from __future__ import annotations

from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel.errors import ActivationError, InPlaceChangeError
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.testing import simulated_accelerator

from .kinds import KINDS, MAIN, PLAIN, SEEDED, Kind
from .scenario import MAY_REFUSE, SECOND_ORDER, assert_same, oracle, run
from .scenarios import SCENARIOS

SMALL_WINDOW: dict[str, Any] = {"window_bytes": 300, "tail_bytes": 0, "prefetch_bytes": 600}
"""Bytes leave at once, back-pressure and a full prefetch window are met in every step."""
WITH_TAIL: dict[str, Any] = {"window_bytes": 1000, "tail_bytes": 500, "prefetch_bytes": 300}

CORE = {
    "one_step",
    "attention_with_shared_tables_and_mask",
    "dropout",
    "exception_in_recompute_then_a_step",
    "five_forwards_backwards_in_any_order",
    "in_place_inside_a_layer",
    "keywords_and_nested_values",
    "nested_wrappers",
    "strange_strides_and_types",
}
"""Scenarios that run under every kind; the others run under the main ones."""


def check(name: str, kind: Kind, **settings: Any) -> None:
    """Run one scenario on the simulated accelerator and compare it with its oracle."""
    oracle(name, PLAIN)  # before: outside the simulation
    with simulated_accelerator(**settings):
        try:
            results = run(name, kind)
        except InPlaceChangeError:
            compat.end_failed_gradient()
            if name in MAY_REFUSE and kind.files_outputs:
                return
            raise
    assert_same(name, kind, results)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in sorted(set(SCENARIOS) - SECOND_ORDER) for kind in (KINDS if name in CORE else MAIN)],
    ids=lambda value: value if isinstance(value, str) else repr(value),
)
def test_bitwise_when_copies_are_as_late_as_can_be(name: str, kind: Kind) -> None:
    check(name, kind, timing="lazy", **SMALL_WINDOW)


@pytest.mark.parametrize("kind", SEEDED, ids=repr)
@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - SECOND_ORDER))
def test_bitwise_when_copies_come_at_random_moments(name: str, kind: Kind) -> None:
    check(name, kind, timing="random", seed=len(name) + len(kind.name), **WITH_TAIL)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("name", sorted(SECOND_ORDER))
def test_second_derivatives_are_right_or_refused_by_name(name: str, kind: Kind) -> None:
    if kind.name == "checkpoint":
        check(name, kind, timing="lazy", **SMALL_WINDOW)
        return
    with pytest.raises(ActivationError, match=r": cannot give a second derivative, because MindSpore loses"):
        check(name, kind, timing="lazy", **SMALL_WINDOW)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_every_kind_really_swaps_or_recomputes(kind: Kind) -> None:
    with simulated_accelerator(**SMALL_WINDOW) as sim:
        run("one_step", kind)
        stats = hp.stats()
    if kind.name != "checkpoint":
        assert sim.swapped_bytes > 0
        assert stats.swapped_out_bytes == sim.swapped_bytes
        assert stats.swapped_in_bytes > 0
    if kind.name in ("mixed", "op_list"):
        assert stats.saved_bytes > 0
        assert stats.recomputed_bytes > 0
