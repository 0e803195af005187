"""Events of a device whose events are recorded again: only those that nobody holds."""

from __future__ import annotations

from hyper_parallel.core.activation_checkpoint.devices import StreamDevice


class Event:
    """Remembers where it was recorded."""

    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        type(self).made += 1
        self.is_timed = enable_timing
        self.places: list[str] = []

    def record(self, stream: str) -> None:
        self.places.append(stream)


class Counted(Event):
    """With a count of its own."""


def test_an_event_that_nobody_holds_is_recorded_again() -> None:
    device = StreamDevice("fake", Counted, reuses_events=True)
    before = Counted.made
    for at in range(50):
        event = device.record_event(f"s{at}")
        assert event.places[-1] == f"s{at}"
        del event
    assert Counted.made - before == 1


def test_an_event_that_is_held_is_never_recorded_again() -> None:
    device = StreamDevice("fake", Event, reuses_events=True)
    held = [device.record_event(f"s{at}") for at in range(20)]
    for _ in range(100):
        device.record_event("later")
    assert [event.places for event in held] == [[f"s{at}"] for at in range(20)]
    assert len({id(event) for event in held}) == 20


def test_timed_and_other_events_are_kept_apart() -> None:
    device = StreamDevice("fake", Event, reuses_events=True)
    for timing in (True, False, True, False):
        assert device.record_event("s", timing=timing).is_timed is timing


def test_a_device_that_does_not_say_so_makes_every_event_anew() -> None:
    device = StreamDevice("fake", Event)
    assert device.record_event("s").places == ["s"]
    before = Event.made
    device.record_event("s")
    assert Event.made == before + 1
