"""Ops that were observed uncompiled, fitted to what was measured of a compiled block's graphs."""

from __future__ import annotations

import dataclasses

import pytest

from hyper_parallel.fates import Fate
from hyper_parallel.planner.block_trace import LEFT_ALONE, RUN, BlockTrace, Choice, KindAnalysis, make_block_trace
from hyper_parallel.planner.compiled_kind import MeasuredGraphs, fitted_to_graphs
from hyper_parallel.planner.profile import BlockKind, OpProfile

KEPT = {"output_bytes": 80, "kept_bytes": 80}
# norm, matmul, gelu, matmul: the second matmul's output is nobody's; each kept value is read by the op behind it.
KIND = BlockKind(
    name="Block",
    ops=(
        OpProfile(name="native_layer_norm", seconds=2.0, output_bytes=88, kept_bytes=88, inputs=(-1,), kept_by=(0,)),
        OpProfile(name="mm", seconds=10.0, **KEPT, inputs=(0,), kept_by=(2,)),
        OpProfile(name="gelu", seconds=4.0, **KEPT, inputs=(1,), kept_by=(3,)),
        OpProfile(name="mm", occurrence=1, seconds=10.0, output_bytes=40, inputs=(2,)),
    ),
    backward_seconds=50.0,
    input_kept_by=(0,),
)
MEASURED = MeasuredGraphs(
    saved_bytes=(80, 80, 7),
    forward_peak_bytes=200,
    backward_peak_bytes=30,
    replayed_peak_bytes=150,
    forward_seconds=23.0,
    backward_seconds=40.0,
    replayed_seconds=51.0,
)
ALL = Choice(0, (Fate.SAVE,), (Fate.RECOMPUTE,) * 4)


def trace(kind: BlockKind, choice: Choice) -> BlockTrace:
    return make_block_trace(KindAnalysis(kind), choice, input_bytes=0, min_bytes=0)


def kept_after_forward(kind: BlockKind, choice: Choice) -> int:
    return sum(event.net for event in trace(kind, choice).forward)


def peak_of_backward(kind: BlockKind, choice: Choice) -> int:
    now = highest = 0
    for event in trace(kind, choice).backward:
        if event.what == RUN:
            highest, now = max(highest, now + event.peak), now + event.net
    return highest


def test_matmuls_keep_their_time_and_fused_ops_share_the_rest() -> None:
    kind = fitted_to_graphs(KIND, MEASURED)
    assert [op.seconds for op in kind.ops] == pytest.approx([1.0, 10.0, 2.0, 10.0])
    assert kind.backward_seconds == 40.0
    assert kind.runs_from_tape


def test_what_is_recomputed_takes_what_the_graph_took_longer() -> None:
    """The last matmul is not needed again: 11 s beyond are the first one's 10, and 1 for both others."""
    kind = fitted_to_graphs(KIND, MEASURED)
    assert [op.replay_seconds for op in kind.ops][:3] == pytest.approx([1 / 3, 10.0, 2 / 3])
    assert trace(kind, ALL).replay_seconds == pytest.approx(11.0)
    assert trace(kind, ALL).compute_seconds == pytest.approx(63.0)


def test_a_graph_that_takes_less_than_its_matmuls_shares_it_among_them() -> None:
    kind = fitted_to_graphs(KIND, dataclasses.replace(MEASURED, forward_seconds=10.0))
    assert [op.seconds for op in kind.ops] == pytest.approx([0.04, 5.0, 0.08, 5.0])


def test_a_step_that_does_not_fit_left_alone() -> None:
    kind = fitted_to_graphs(KIND, dataclasses.replace(MEASURED, backward_seconds=None))
    assert kind.backward_seconds == pytest.approx(51.0 - 13.0)
    assert all(op.replay_seconds is None for op in kind.ops)


def test_left_alone_it_keeps_what_its_graph_saves() -> None:
    kind = fitted_to_graphs(KIND, MEASURED)
    assert kind.graph is not None
    assert kind.graph.saves == (1, 2)
    assert kind.graph.other_bytes == 7
    assert kept_after_forward(kind, LEFT_ALONE) == 80 + 80 + 7
    assert sum(event.net for event in trace(kind, LEFT_ALONE).backward) == -167
    assert kept_after_forward(kind, ALL) == 0


def test_a_main_output_is_known_by_most_of_its_bytes() -> None:
    kind = fitted_to_graphs(KIND, dataclasses.replace(MEASURED, saved_bytes=(80,) * 3))
    assert kind.graph is not None
    assert kind.graph.saves == (0, 1, 2)  # the norm's 88 bytes are its output and its means
    assert kind.graph.other_bytes == 0


def test_the_peak_of_a_graph_that_recomputes_everything_is_the_measured_one() -> None:
    for peak in (60, 150, 200):
        kind = fitted_to_graphs(KIND, dataclasses.replace(MEASURED, replayed_peak_bytes=peak))
        assert peak_of_backward(kind, ALL) == pytest.approx(peak, abs=4)
    assert peak_of_backward(kind, LEFT_ALONE) == 30


def test_it_has_one_region() -> None:
    assert len(fitted_to_graphs(KIND, MEASURED).cuts) == 1
