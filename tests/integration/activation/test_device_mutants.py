"""Each wait, event and hold of the engine is needed: a simulated device that ignores one of them is noticed.

Every program runs once to count its calls, then once per call with that call ignored. The judge of the device or a bitwise
comparison must notice, unless the call is *idle* (its stream is ordered already, by the device's own clocks) or listed below
with the reason. The lists are exact: what they name survives, and nothing else does.
"""

from __future__ import annotations

import pytest

from .device_faults import Call, Program, calls_of, run, skip
from .faulty_programs import PROGRAMS

SURVIVE_EVERYWHERE = {
    "event: _start < ": "it measures the time of a copy",
    "event: stalled < ": "it measures how long compute waits",
}
"""By the start of a call's name."""

AT_ONCE = "the window is 0: our reference goes in the same call, while the op still holds its own"
NO_READER = "only the second stream reads, and it is ordered by itself"
SURVIVE = {
    "one_step (window 0, prefetch 0)": {
        f"hold: _launched < _launch_offload: offload #{number}": AT_ONCE for number in range(4)
    },
    "one_step (window 9, prefetch 0)": {
        f"event: write_together < write: copy-0 #{number}": "the host asks when far memory is free, and lends it to nobody"
        for number in (1, 2)
    },
    "one_step (window 0, prefetch 2, verify True)": {
        f"wait: _check < order: host for copy-1 #{number}": "the checksum's own copy runs behind it, and is waited for"
        for number in (0, 1)
    },
    "a_swapped_value_is_changed_in_place (window 9, prefetch 9)": {
        "event: write_together < write: copy-0 #2": "the bytes are a layer's output, which the next layer holds"
    },
    "room_under_a_load (window 8, prefetch 99, tail 32, host_limit 4096)": {
        f"{call}{stream} #{number}": "the copy before it was launched after its producer ran, and orders the lane"
        for call in ("event: start_offload < _launch_offload: ", "wait: write_together < write: copy-0 for ")
        for stream in ("compute", "side")
        for number in (1, 2, 3)
    },
    "driven_by_hand (window 9, prefetch 0)": {
        "hold: _launched < _launch_offload: offload #0": "a SwapTensor holds its own tensor until wait_offload"
    },
    "a_reader_on_another_stream (window 0, prefetch 0)": {
        "wait: finish_load < _make_readable: compute for copy-1 #0": NO_READER,
        "hold: _launched < _launch_offload: offload #0": AT_ONCE,
    },
    "a_reader_on_a_stream_that_never_saw_the_load (window 0, prefetch 0)": {
        "wait: finish_load < _make_readable: compute for copy-1 #0": NO_READER,
        "wait: _order_owner < __del__: compute for side #0": "the program has made the first stream wait for the second",
        "event: _order_owner < __del__: side #0": "the program has made the first stream wait for the second",
        "hold: _launched < _launch_offload: offload #0": AT_ONCE,
    },
}
"""By program and call."""


def may_survive(program: Program, call: Call) -> bool:
    is_listed = call.name in SURVIVE.get(program.name, ()) or call.name.startswith(tuple(SURVIVE_EVERYWHERE))
    return call.is_idle or is_listed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_wait_event_and_hold_is_needed_or_listed(program: Program) -> None:
    expected = program.steps(None)
    unhurt = run(program)
    assert (unhurt.error, unhurt.violations) == (None, ())
    assert not unhurt.is_noticed(expected)
    calls = [(fault, call) for fault, found in calls_of(program).items() if fault in program.faults for call in found]
    survivors = {call.name for fault, call in calls if not run(program, skip(fault, call.number)).is_noticed(expected)}
    assert survivors == {call.name for _, call in calls if may_survive(program, call)}
    assert len(survivors) < len(calls)


def test_the_list_names_programs_and_calls_that_exist() -> None:
    names = {program.name for program in PROGRAMS}
    assert set(SURVIVE) <= names
    for program in PROGRAMS:
        found = [call.name for calls in calls_of(program).values() for call in calls]
        assert len(set(found)) == len(found)
        assert set(SURVIVE.get(program.name, ())) <= set(found)


def test_a_load_is_ordered_after_the_copy_out_where_its_buffer_is_not() -> None:
    """On one compute stream the buffer of a load is taken after the copy out was ordered. On another one it is not."""
    (program,) = (program for program in PROGRAMS if program.steps.__name__ == "a_load_on_another_stream")
    waits = [call for call in calls_of(program)["wait"] if ": copy-1 for copy-0 " in call.name]
    assert [call.name for call in waits] == ["wait: read_together < read: copy-1 for copy-0 #0"]
    assert run(program, skip("wait", waits[0].number)).is_noticed(program.steps(None))


def test_the_programs_have_calls_of_every_kind() -> None:
    """A program whose calls are not counted would pass without a mutant."""
    counts = dict.fromkeys(("wait", "event", "hold"), 0)
    for program in PROGRAMS:
        for fault, calls in calls_of(program).items():
            counts[fault] += sum(not may_survive(program, call) for call in calls) if fault in program.faults else 0
    assert counts["wait"] > 150
    assert counts["event"] > 150
    assert counts["hold"] > 60
