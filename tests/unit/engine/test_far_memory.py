"""Host tiers on a fake device: calls, caps, growth, reuse behind a copy, spill order, checksums."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import Completion
from hyper_parallel.core.activation_checkpoint.far.arena import Arena
from hyper_parallel.core.activation_checkpoint.far.host import HostBudget, HostTier
from hyper_parallel.core.activation_checkpoint.far.memory import FarMemory, Overflow
from hyper_parallel.core.activation_checkpoint.far.tier import Lease, Refusal
from hyper_parallel.errors import CorruptDataError, FarMemoryError

from .fake_device import FakeDevice

PAGE = 4096


class Bench:
    """Far memory, a device with both copy streams, and the calls that a record makes."""

    def __init__(self, far: Any = None, **settings: Any) -> None:
        self.device = FakeDevice()
        self.out, self.back = self.device.new_stream(), self.device.new_stream()
        self.far = FarMemory(SwapConfig(**{"host_limit": 16 * PAGE, **settings})) if far is None else far

    def reserve(self, nbytes: int) -> Lease:
        lease = self.far.reserve(self.device, nbytes)
        assert isinstance(lease, Lease)
        return lease

    def write(self, lease: Lease, text: bytes) -> Completion:
        ready = self.device.record_event(self.device.current)
        source = self.device.fill(text)
        return self.far.write(lease, source, backend=self.device, stream=self.out, ready=ready)

    def read(self, lease: Lease) -> bytes:
        target = self.device.allocate(lease.nbytes)
        ready = self.device.record_event(self.device.current)
        back = self.far.read(lease, target, backend=self.device, stream=self.back, ready=ready)
        back.order(self.device.current)
        self.device.run()
        return bytes(target)

    def held_bytes(self) -> int:
        return sum(tier.held_bytes for tier in self.far.statistics())


def test_what_was_written_comes_back_any_number_of_times() -> None:
    bench = Bench()
    lease = bench.reserve(3)
    bench.write(lease, b"abc")
    assert [bench.read(lease) for _ in range(2)] == [b"abc", b"abc"]
    (tier,) = bench.far.statistics()
    assert (tier.written_bytes, tier.read_bytes, tier.live_bytes, tier.held_bytes) == (3, 6, 3, PAGE)


def test_scattered_bytes_come_back_in_order() -> None:
    bench = Bench(host_limit=PAGE)
    leases = [bench.reserve(512) for _ in range(8)]
    for at in (1, 3, 6):
        bench.far.release(leases[at], None)
    lease = bench.reserve(1300)
    bench.device.take_log()
    bench.write(lease, bytes(at % 251 for at in range(1300)))
    assert [line for line in bench.device.log if "copy" in line] == ["out: copy 512", "out: copy 512", "out: copy 276"]
    assert bench.read(lease) == bytes(at % 251 for at in range(1300))
    assert bench.far.host_bytes(lease) is None, "it does not lie in one piece"


def test_reading_what_was_never_written_is_an_error() -> None:
    bench = Bench()
    with pytest.raises(
        FarMemoryError, match="pinned: cannot read a lease of 8 bytes; because nothing was written to it"
    ):
        bench.read(bench.reserve(8))


def test_the_cap_refuses_and_is_counted_by_tier_and_reason() -> None:
    bench = Bench(host_limit=PAGE)
    held = bench.reserve(PAGE)
    assert bench.far.reserve(bench.device, 1) is Refusal.OVER_LIMIT
    assert bench.far.overflows() == (Overflow(tier="pinned", reason=Refusal.OVER_LIMIT, count=1, nbytes=1),)
    bench.far.release(held, None)
    assert isinstance(bench.far.reserve(bench.device, 1), Lease)


def test_a_host_that_refuses_is_another_reason() -> None:
    bench = Bench()
    bench.device.host_bytes = 0
    assert bench.far.reserve(bench.device, 1) is Refusal.NO_SPACE


def test_the_second_tier_serves_what_the_first_refuses() -> None:
    bench = Bench(tiers=("pinned", "pageable"))
    bench.device.host_bytes = PAGE
    assert [bench.reserve(nbytes).tier.name for nbytes in (PAGE, PAGE)] == ["pinned", "pinned"]
    bench = Bench(tiers=("pageable", "pinned"), host_limit=PAGE)
    first = bench.reserve(PAGE)
    assert (first.tier.name, bench.far.reserve(bench.device, PAGE)) == ("pageable", Refusal.OVER_LIMIT)
    assert [overflow.tier for overflow in bench.far.overflows()] == ["pageable", "pinned"]


def test_room_of_an_idle_tier_serves_the_other_under_one_cap() -> None:
    budget, device = HostBudget(PAGE), FakeDevice()
    pinned, pageable = HostTier(budget, pinned=True), HostTier(budget, pinned=False)
    lease = pinned.reserve(device, PAGE)
    assert isinstance(lease, Lease)
    assert pageable.reserve(device, PAGE) is Refusal.OVER_LIMIT
    pinned.release(lease, None)
    assert pinned.statistics().live_bytes == 0
    assert isinstance(pageable.reserve(device, PAGE), Lease)
    assert (pinned.statistics().held_bytes, pageable.statistics().held_bytes) == (0, PAGE)


def test_the_same_step_again_takes_nothing_more_from_the_host() -> None:
    bench = Bench()
    allocations = []
    for _ in range(3):
        leases = [bench.reserve(nbytes) for nbytes in (700, 5000, 1, 512)]
        for lease in leases:
            bench.far.release(lease, None)
        allocations.append(bench.far.statistics()[0].allocations)
    assert allocations[0] == allocations[1] == allocations[2]
    (tier,) = bench.far.statistics()
    assert tier.live_bytes == 0
    assert tier.peak_live_bytes == 700 + 5000 + 1 + 512


def test_room_under_a_copy_is_lent_behind_that_copy() -> None:
    bench = Bench(host_limit=PAGE)
    first = bench.reserve(PAGE)
    copy = bench.write(first, b"a" * PAGE)
    bench.far.release(first, copy)
    second = bench.reserve(PAGE)
    bench.device.take_log()
    bench.write(second, b"b" * PAGE)
    assert bench.device.take_log() == [
        "compute: record e4",
        "out: wait e4",
        "out: wait e3",  # the end of the first copy
        "out: copy 4096",
        "out: record e5",
    ]
    assert bench.read(second) == b"b" * PAGE


def test_room_whose_copy_is_done_is_lent_without_an_order() -> None:
    bench = Bench(host_limit=PAGE)
    first = bench.reserve(PAGE)
    copy = bench.write(first, b"a" * PAGE)
    bench.far.release(first, copy)
    bench.device.run()
    second = bench.reserve(PAGE)
    bench.device.take_log()
    bench.write(second, b"b" * PAGE)
    assert bench.device.take_log() == ["compute: record e4", "out: wait e4", "out: copy 4096", "out: record e5"]


def test_a_lease_of_a_size_that_was_released_looks_at_one_copy_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(host_limit=2**20)
    leases = [bench.reserve(512) for _ in range(100)]
    for lease in leases:
        bench.far.release(lease, bench.write(lease, b"a" * 512))
    held = bench.held_bytes()
    looks: list[object] = []
    calls: list[int] = []
    is_done, take = bench.device.event_is_done, Arena.take
    monkeypatch.setattr(bench.device, "event_is_done", lambda event: (looks.append(event), is_done(event))[1])
    monkeypatch.setattr(Arena, "take", lambda arena, nbytes: (calls.append(nbytes), take(arena, nbytes))[1])
    num_free = held // 512 - 100
    again = [bench.reserve(512) for _ in range(100)]
    assert len(calls) == num_free, "what is free is lent first, and then the arena is not asked"
    assert (len(looks), bench.held_bytes()) == (100 + num_free, held)
    assert len({id(lease.extent) for lease in again}) == 100


def test_small_copies_are_timed_one_in_sixteen_and_large_ones_always() -> None:
    bench = Bench(host_limit=2**26)
    has_start = []
    for nbytes in [8] * 18 + [16 * 2**20] * 2:
        lease = bench.reserve(nbytes)
        copy: Any = bench.write(lease, b"?" * nbytes)
        has_start.append(copy.start is not None)
    assert has_start == [True, *[False] * 15, True, False, True, True]


def test_a_closed_tier_gives_its_memory_back_after_the_last_copy_and_lends_no_more() -> None:
    bench = Bench()
    done, held = bench.reserve(8), bench.reserve(8)
    bench.far.release(done, bench.write(done, b"released"))
    bench.write(held, b"still us")
    bench.far.close()
    assert bench.held_bytes() == PAGE, "one lease is still out"
    with pytest.raises(FarMemoryError, match="pinned: cannot lend 8 bytes; because this tier was closed"):
        bench.far.reserve(bench.device, 8)
    assert bench.read(held) == b"still us"
    bench.far.release(held, None)
    assert bench.held_bytes() == 0


def test_verified_bytes_that_changed_in_far_memory_are_an_error() -> None:
    bench = Bench(verify=True)
    lease = bench.reserve(8)
    bench.write(lease, b"verified")
    bench.device.run()
    assert bench.read(lease) == b"verified"
    host = bench.far.host_bytes(lease)
    assert host is not None
    host[0] ^= 1
    with pytest.raises(CorruptDataError, match=r"pinned: cannot return 8 bytes; .*checksum"):
        bench.read(lease)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_request_without_bytes_is_a_mistake(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"HostTier.reserve: expected at least 1 byte, got {nbytes}"):
        Bench().reserve(nbytes)


def test_a_limit_that_others_share_shrinks_when_they_are_found() -> None:
    sharers = 1
    budget = HostBudget(8 * PAGE, count_sharers=lambda: sharers)
    tier, device = HostTier(budget, pinned=True), FakeDevice()
    first = tier.reserve(device, 3 * PAGE)
    assert isinstance(first, Lease)
    sharers = 2
    assert isinstance(tier.reserve(device, PAGE), Lease)
    assert tier.statistics().limit_bytes == 4 * PAGE
    assert tier.reserve(device, PAGE) is Refusal.OVER_LIMIT
    sharers = 4
    assert tier.reserve(device, PAGE) is Refusal.OVER_LIMIT, "what is held already stays"
    assert not budget.charge(1)
    sharers = 1
    assert isinstance(tier.reserve(device, 4 * PAGE), Lease)
