"""One step, played by hand and by the simulator. Expected bytes are sums of named terms, expected times too."""

from __future__ import annotations

import dataclasses

import pytest

from hyper_parallel.planner.block_trace import LEFT_ALONE, Choice
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.profile import (
    BlockKind,
    Cut,
    CutRegion,
    FarCaps,
    HostCost,
    Link,
    OpProfile,
    Profile,
    Segment,
)
from hyper_parallel.planner.step_simulator import SimulatedStep, StepSimulator
from hyper_parallel.records.moments import MOMENTS, MomentBytes

from .small import KIND, SETTINGS, F, G, short_choice, small_profile

BASE, INPUT, VALUE, OUTPUT, TRANSIENT = 100, 3, 10, 4, 5
RECOMPUTE, SAVE, SWAP = short_choice(0, "s", "rr"), short_choice(0, "s", "sr"), short_choice(0, "s", "wr")
SWAP_ALL = short_choice(0, "w", "wr")


def simulate(*choices: Choice, profile: Profile | None = None, settings=SETTINGS) -> SimulatedStep:
    return StepSimulator(profile or small_profile()).explain(choices, settings)


def test_left_alone() -> None:
    line = simulate(LEFT_ALONE, LEFT_ALONE)
    # The last block's backward begins: both inputs, both values.
    assert line.peak_bytes == BASE + 2 * INPUT + 2 * VALUE + TRANSIENT
    assert line.peak_where == "backward of blocks.1"
    assert line.named_parts() == {"base": BASE, "left alone": 2 * (INPUT + VALUE), "working set": TRANSIENT}
    assert line.step_seconds == line.compute_seconds == pytest.approx(2 * (2 * 1.0 + 2 * 2.0))
    assert (line.replay_seconds, line.exposed_seconds, line.out_bytes, line.in_bytes) == (0, 0, 0, 0)


def test_recomputing_replays_what_backward_needs_and_no_more() -> None:
    line = simulate(RECOMPUTE, RECOMPUTE)
    # g is not run again: nothing that it makes is kept.
    assert line.replay_seconds == pytest.approx(2 * F.seconds)
    assert line.peak_bytes == BASE + 2 * INPUT + VALUE + TRANSIENT
    assert line.named_parts()["region inputs"] == 2 * INPUT


def test_a_saved_value_stays_to_the_end_of_its_region() -> None:
    line = simulate(SAVE, SAVE)
    assert line.replay_seconds == 0
    assert line.peak_bytes == BASE + 2 * INPUT + 2 * VALUE + TRANSIENT
    assert line.named_parts()["saved"] == 2 * VALUE


def test_forward_peaks_count_what_is_read_now() -> None:
    wide = dataclasses.replace(G, output_bytes=40, workspace_bytes=7)
    kind = dataclasses.replace(KIND, ops=(F, wide))
    line = simulate(RECOMPUTE, RECOMPUTE, profile=small_profile(kind=kind))
    assert line.peak_where == "forward of blocks.1"
    assert line.peak_bytes == BASE + 2 * INPUT + VALUE + 40 + 7


def test_a_window_that_is_wide_enough_costs_no_time() -> None:
    line = simulate(SWAP, SWAP, profile=small_profile(link=Link(out_bytes_per_second=10.0, in_bytes_per_second=10.0)))
    # f of block 0 leaves from 1 to 2 s, f of block 1 from 3 to 4 s, when forward ends.
    assert line.exposed_seconds == pytest.approx(0)
    assert (line.out_bytes, line.in_bytes) == (2 * VALUE, VALUE)  # block 1's value was still there when it was wanted
    assert line.host_bytes == 2 * VALUE


def test_a_copy_that_the_computing_processor_makes_takes_its_time_however_wide_the_window() -> None:
    link = Link(out_bytes_per_second=10.0, in_bytes_per_second=10.0)
    hidden = simulate(SWAP, SWAP, profile=small_profile(link=link))
    costly = dataclasses.replace(link, compute_seconds_per_byte=0.01)
    shared = simulate(SWAP, SWAP, profile=small_profile(link=costly))
    moved = shared.out_bytes + shared.in_bytes
    assert moved == 3 * VALUE
    assert shared.step_seconds - hidden.step_seconds == pytest.approx(0.01 * moved)


def test_past_the_window_compute_waits_for_the_oldest_copy() -> None:
    slow = Link(out_bytes_per_second=2.5, in_bytes_per_second=1000.0)
    line = simulate(SWAP, SWAP, profile=small_profile(link=slow))
    # Out from 1 to 5 s, but the window is full at 3 s: 2 s. The second is still leaving, until 9 s, when its replay ends at
    # 6 s: 3 s. The load takes 0.01 s, and has 4 s of backward to hide in.
    assert line.exposed_seconds == pytest.approx(2.0 + 3.0)


def test_a_copy_out_that_is_wanted_again_must_still_end_before_its_bytes_go() -> None:
    slow = Link(out_bytes_per_second=1.0, in_bytes_per_second=1000.0)
    line = simulate(LEFT_ALONE, SWAP, profile=small_profile(link=slow))
    # Out from 3 to 13 s; forward ends at 4 s, the replay is empty, and then our reference goes.
    assert line.exposed_seconds == pytest.approx(13 - 4)
    assert line.in_bytes == 0


def test_the_tail_never_leaves() -> None:
    line = simulate(SWAP, SWAP, settings=dataclasses.replace(SETTINGS, tail_bytes=2 * VALUE))
    assert (line.out_bytes, line.in_bytes, line.exposed_seconds) == (0, 0, 0)
    assert line.peak_bytes == BASE + 2 * INPUT + 2 * VALUE + TRANSIENT
    assert line.named_parts()["swap buffers"] == 2 * VALUE


def test_a_late_load_is_waited_for() -> None:
    slow_back = Link(out_bytes_per_second=1000.0, in_bytes_per_second=2.0)
    line = simulate(SWAP, SWAP, profile=small_profile(link=slow_back))
    # Block 0's value is asked for when block 1's is used, at 4 s, and takes 5 s; block 1's backward takes 4 s.
    assert line.exposed_seconds == pytest.approx(1.0)
    roomy = dataclasses.replace(SETTINGS, prefetch_bytes=0)
    missed = simulate(SWAP, SWAP, profile=small_profile(link=slow_back), settings=roomy)
    assert missed.exposed_seconds == pytest.approx(5.0)  # nothing is brought ahead


def test_prefetched_bytes_are_on_the_device_from_the_moment_they_are_asked_for() -> None:
    three = small_profile(blocks=3)
    wide = dataclasses.replace(SETTINGS, prefetch_bytes=100)
    near = dataclasses.replace(SETTINGS, prefetch_bytes=VALUE)
    assert (
        simulate(SWAP, SWAP, SWAP, profile=three, settings=wide).peak_bytes == BASE + 3 * INPUT + 3 * VALUE + TRANSIENT
    )
    assert (
        simulate(SWAP, SWAP, SWAP, profile=three, settings=near).peak_bytes == BASE + 3 * INPUT + 2 * VALUE + TRANSIENT
    )


def test_inputs_leave_too() -> None:
    fast = small_profile(blocks=4, link=Link(out_bytes_per_second=1e6, in_bytes_per_second=1e6))
    none = dataclasses.replace(SETTINGS, window_bytes=0, prefetch_bytes=0)
    line = simulate(*[SWAP_ALL] * 4, profile=fast, settings=none)
    # Nothing is held but one block: its input, its value.
    assert line.peak_bytes == BASE + INPUT + VALUE + TRANSIENT
    assert line.out_bytes == line.in_bytes == 4 * (INPUT + VALUE)


def test_values_too_small_to_move_are_saved() -> None:
    profile = small_profile(engine=dataclasses.replace(SETTINGS, min_bytes=VALUE + 1))
    line = simulate(SWAP, SWAP, profile=profile)
    assert (line.out_bytes, line.named_parts()["saved"]) == (0, 2 * VALUE)


def test_over_the_hosts_cap_bytes_go_to_disk_and_then_nowhere() -> None:
    settings = dataclasses.replace(SETTINGS, window_bytes=0, prefetch_bytes=0)
    disk = Link(out_bytes_per_second=1.0, in_bytes_per_second=1.0)
    with_disk = small_profile(far=FarCaps(host_bytes=VALUE, disk_bytes=VALUE, disk_link=disk))
    line = simulate(SWAP, SWAP, profile=with_disk, settings=settings)
    assert (line.host_bytes, line.disk_bytes) == (VALUE, VALUE)
    # Block 0: out 2 s at once. Block 1: 10 s out to disk. Back: 10 s from disk, 2 s from the host.
    assert line.exposed_seconds == pytest.approx(2 + 10 + 10 + 2)
    alone = simulate(SWAP, SWAP, profile=small_profile(far=FarCaps(host_bytes=VALUE)), settings=settings)
    assert (alone.host_bytes, alone.disk_bytes, alone.out_bytes) == (VALUE, 0, VALUE)
    assert alone.named_parts()["swap buffers"] == VALUE  # block 1's value never left


def test_two_regions_hold_one_half_at_a_time() -> None:
    last = dataclasses.replace(G, inputs=(1,))
    middle = OpProfile(
        name="h", seconds=1.0, output_bytes=10, kept_bytes=10, inputs=(0,), kept_by=(2,), backward_bytes=5
    )
    ops = (dataclasses.replace(F, kept_by=(1,)), middle, last)
    halves = Cut(
        regions=(
            CutRegion(module="a", first_op=0, stop_op=1),
            CutRegion(module="b", first_op=1, stop_op=3, inputs=(0,)),
        )
    )
    whole = Cut(regions=(CutRegion(module="", first_op=0, stop_op=3),))
    kind = BlockKind(name="Block", ops=ops, cuts=(whole, halves), backward_seconds=6.0, input_kept_by=(0,))
    profile = small_profile(blocks=1, kind=kind, link=Link(out_bytes_per_second=1e6, in_bytes_per_second=1e6))
    settings = dataclasses.replace(SETTINGS, window_bytes=0, prefetch_bytes=0)
    one = simulate(short_choice(0, "s", "rrr"), profile=profile)
    assert one.peak_bytes == BASE + INPUT + 2 * VALUE + TRANSIENT
    assert one.replay_seconds == pytest.approx(2.0)
    two = simulate(short_choice(1, "sw", "rrr"), profile=profile, settings=settings)
    # b's replay: its input came back, h is made again; a's value is b's input and not made again.
    assert two.peak_bytes == BASE + INPUT + 2 * VALUE + TRANSIENT
    assert two.replay_seconds == pytest.approx(1.0)
    assert (two.out_bytes, two.in_bytes) == (VALUE, VALUE)


def test_a_view_belongs_to_the_value_behind_it() -> None:
    view = OpProfile(name="view", seconds=0.0, inputs=(0,), alias=0, is_keepable=False, reason="view")
    last = dataclasses.replace(G, inputs=(1,))
    ops = (dataclasses.replace(F, kept_by=(2,)), view, last)
    kind = BlockKind(name="Block", ops=ops, backward_seconds=4.0, input_kept_by=(0,))
    line = simulate(short_choice(0, "s", "wrr"), short_choice(0, "s", "wrr"), profile=small_profile(kind=kind))
    same = simulate(SWAP, SWAP)
    assert (line.peak_bytes, line.step_seconds) == (same.peak_bytes, same.step_seconds)


def test_the_head_frees_its_bytes_before_the_blocks_run_backward() -> None:
    head = Segment(forward_seconds=1, backward_seconds=2, kept_bytes=50, forward_transient_bytes=70, gradient_bytes=9)
    line = simulate(RECOMPUTE, RECOMPUTE, profile=small_profile(epilogue=head))
    assert line.peak_where == "forward of the head and loss"
    assert line.peak_bytes == BASE + 2 * INPUT + 70
    assert line.named_parts()["head and loss"] == 70
    assert line.compute_seconds == pytest.approx(12 + 3)


def test_gradients_that_the_step_makes_stay() -> None:
    kind = dataclasses.replace(KIND, gradient_bytes=20)
    line = simulate(LEFT_ALONE, LEFT_ALONE, profile=small_profile(kind=kind))
    # Block 0's backward: its own input and value, and both blocks' gradients.
    assert line.peak_bytes == BASE + 2 * 20 + INPUT + VALUE + TRANSIENT
    assert line.peak_where == "backward of blocks.0"


def test_where_only_the_blocks_transient_bytes_are_known_they_stand_at_its_start() -> None:
    ops = tuple(dataclasses.replace(op, backward_bytes=0) for op in (F, G))
    kind = dataclasses.replace(KIND, ops=ops, backward_transient_bytes=8)
    assert (
        simulate(LEFT_ALONE, LEFT_ALONE, profile=small_profile(kind=kind)).peak_bytes == BASE + 2 * (INPUT + VALUE) + 8
    )


def issued_in(forward: float, backward: float = 0.0, **host: float) -> Profile:
    """Blocks of two ops of 1 s and twice that in backward, which the host takes this long to issue."""
    kind = dataclasses.replace(KIND, host_forward_seconds=forward, host_backward_seconds=backward)
    return small_profile(kind=kind, host=HostCost(**host))


def test_a_host_that_is_faster_than_the_device_costs_nothing() -> None:
    line = simulate(LEFT_ALONE, LEFT_ALONE, profile=issued_in(1.5, 3.0))
    assert line.step_seconds == pytest.approx(12.0)
    assert line.host_seconds == pytest.approx(2 * (1.5 + 3.0))


def test_the_device_waits_for_a_host_that_is_slower_in_forward_and_does_not_get_that_back() -> None:
    # Forward is issued in 6 s where the device takes 4; backward takes the device 8 s whatever the host does.
    line = simulate(LEFT_ALONE, LEFT_ALONE, profile=issued_in(3.0, 1.0))
    assert line.step_seconds == pytest.approx(6 + 8)
    assert (line.compute_seconds, line.exposed_seconds) == (pytest.approx(12.0), 0)


def test_regions_and_what_runs_in_them_are_issued_too() -> None:
    host = {
        "region_seconds": 0.5,
        "region_op_seconds": 0.25,
        "region_backward_seconds": 0.125,
        "replayed_op_seconds": 1.0,
    }
    line = simulate(RECOMPUTE, RECOMPUTE, profile=issued_in(2.0, 4.0, **host))
    assert line.host_seconds == pytest.approx(2 * (2.0 + 0.5 + 2 * 0.25 + 4.0 + 0.125 + 1 * 1.0))
    assert line.step_seconds == pytest.approx(
        line.host_seconds
    )  # 16.25 s, where the device takes 12 and 2 for the replays
    assert simulate(LEFT_ALONE, LEFT_ALONE, profile=issued_in(2.0, 4.0, **host)).step_seconds == pytest.approx(12.0)


def test_a_swap_is_issued_out_and_back_and_its_copies_start_no_sooner() -> None:
    fast = Link(out_bytes_per_second=1000.0, in_bytes_per_second=1000.0)
    host = {"swap_out_seconds": 3.0, "swap_in_seconds": 2.0}
    profile = dataclasses.replace(issued_in(2.0, 4.0, **host), link=fast)
    line = simulate(SWAP, SWAP, profile=profile)
    assert line.host_seconds == pytest.approx(2 * (2.0 + 3.0 + 2.0 + 4.0))
    assert line.step_seconds == pytest.approx(line.host_seconds)
    # Without their backward: forward alone is 4 s of work, and 10 s of issuing.
    assert (
        simulate(SWAP, SWAP, profile=dataclasses.replace(issued_in(2.0, 0.0, **host), link=fast)).step_seconds >= 10 + 8
    )


def test_time_that_is_scaled_is_the_hosts_too() -> None:
    profile = issued_in(3.0, 5.0)
    twice = StepSimulator(profile, Corrections.of_work(2.0)).explain((LEFT_ALONE, LEFT_ALONE), SETTINGS)
    assert twice.step_seconds == pytest.approx(2 * simulate(LEFT_ALONE, LEFT_ALONE, profile=profile).step_seconds)


def test_corrections_shift_the_peak_and_scale_the_work() -> None:
    more = MomentBytes.of([17] * len(MOMENTS))
    corrections = Corrections(moments=more, work_scale=2.0, stall_cost=0.5)
    profile = small_profile(link=Link(out_bytes_per_second=1.25, in_bytes_per_second=1000.0))
    line = StepSimulator(profile, corrections).explain((SWAP, SWAP), SETTINGS)
    assert line.compute_seconds == pytest.approx(24.0)
    # Out from 2 to 10 s, the window is full at 6 s; the second copy ends at 18 s, forward and the empty replay at 12 s.
    assert line.exposed_seconds == pytest.approx(0.5 * (4 + 6))
    plain = StepSimulator(profile).explain((SWAP, SWAP), SETTINGS)
    assert line.peak_bytes == plain.peak_bytes + 17
    assert sum(line.peak_parts) == line.peak_bytes


def test_playing_and_explaining_agree() -> None:
    simulator = StepSimulator(small_profile(blocks=3))
    for choices in ((LEFT_ALONE, RECOMPUTE, SWAP), (SWAP_ALL, SAVE, LEFT_ALONE), (SWAP, SWAP_ALL, SWAP)):
        played, explained = simulator.simulate(choices, SETTINGS), simulator.explain(choices, SETTINGS)
        assert dataclasses.replace(explained, peak_parts=()) == played


def test_an_input_that_no_recorded_op_reads_is_released_once() -> None:
    """Compiled code and raw kernels read it unseen; every byte is returned all the same."""
    unseen = dataclasses.replace(KIND, ops=(dataclasses.replace(F, inputs=()), G), input_kept_by=())
    profile = small_profile(kind=unseen)
    settings = dataclasses.replace(profile.engine, window_bytes=0)
    line = StepSimulator(profile).simulate((short_choice(0, "w", "rr"),) * 2, settings)
    assert line.out_bytes == 6
