"""Pinned and pageable host memory: exact, bounded, reused, and never lent under a copy that is still queued."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import pytest
import torch

from hyper_parallel.core.activation_checkpoint.far.host import HostBudget, HostTier
from hyper_parallel.core.activation_checkpoint.far.tier import Lease, Refusal
from hyper_parallel.errors import FarMemoryError

from .backend import LIMIT_S, ManualCompletion, ThreadStream, TorchBackend, random_bytes

KIB, MIB = 2**10, 2**20


def pinned_tier(limit: int = 1024 * MIB) -> HostTier:
    return HostTier(HostBudget(limit), pinned=True)


def lend(tier: HostTier, backend: TorchBackend, nbytes: int) -> Lease:
    lease = tier.reserve(backend, nbytes)
    assert isinstance(lease, Lease), lease
    return lease


def addresses(lease: Lease) -> list[tuple[int, int]]:
    return [(host.data_ptr(), host.data_ptr() + len(host)) for host in lease.extent.hosts]


def overlap(one: Lease, other: Lease) -> bool:
    return any(a < d and c < b for a, b in addresses(one) for c, d in addresses(other))


def write(tier: HostTier, lease: Lease, source: torch.Tensor, backend: TorchBackend, stream: ThreadStream):
    return tier.write(lease, source, backend=backend, stream=stream, ready=backend.ready())


def read(tier: HostTier, lease: Lease, backend: TorchBackend, stream: ThreadStream):
    target = backend.allocate(lease.nbytes)
    return target, tier.read(lease, target, backend=backend, stream=stream, ready=backend.ready())


def test_bytes_come_back_any_number_of_times() -> None:
    tier, backend = pinned_tier(), TorchBackend()
    out, back = backend.new_stream(), backend.new_stream()
    source = random_bytes(3 * MIB + 17, seed=1)
    lease = lend(tier, backend, len(source))
    write(tier, lease, source, backend, out)
    for _ in range(2):
        target, completion = read(tier, lease, backend, back)
        completion.wait()
        assert torch.equal(target, source)
    statistics = tier.statistics()
    assert (statistics.written_bytes, statistics.read_bytes) == (len(source), 2 * len(source))


@pytest.mark.parametrize("pinned", [True, False])
def test_asks_the_backend_for_the_kind_it_is_named_after(pinned: bool) -> None:
    tier, backend = HostTier(HostBudget(MIB), pinned=pinned), TorchBackend()
    lend(tier, backend, 1000)
    assert backend.host_allocations == [(4096, pinned)]
    assert tier.name == ("pinned" if pinned else "pageable")


def test_the_copy_waits_for_ready_and_the_reader_for_the_copy_out() -> None:
    tier, backend = pinned_tier(), TorchBackend()
    out, back = backend.new_stream(), backend.new_stream()
    source = torch.zeros(MIB, dtype=torch.uint8)
    gate = backend.current_stream().hold()
    backend.current_stream().queue(lambda: source.fill_(7))
    lease = lend(tier, backend, len(source))
    written = write(tier, lease, source, backend, out)
    target, loaded = read(tier, lease, backend, back)
    assert not written.is_done()
    gate.fire()
    loaded.wait()
    assert torch.equal(target, torch.full_like(target, 7))


def test_scattered_room_gives_the_bytes_back_in_order() -> None:
    tier, backend = pinned_tier(30 * MIB), TorchBackend()
    stream = backend.new_stream()
    leases = [lend(tier, backend, 10 * MIB) for _ in range(3)]
    tier.release(leases[0], None)
    tier.release(leases[2], None)
    scattered = lend(tier, backend, 20 * MIB - 5)
    assert len(scattered.extent.hosts) == 2
    assert not overlap(scattered, leases[1])
    source = random_bytes(scattered.nbytes, seed=2)
    write(tier, scattered, source, backend, stream)
    target, completion = read(tier, scattered, backend, stream)
    completion.wait()
    assert torch.equal(target, source)
    assert tier.statistics().allocations == 3


def step(tier: HostTier, backend: TorchBackend, out: ThreadStream, back: ThreadStream, sizes: list[int]) -> None:
    """Forward writes all, backward reads all in the other order, and nobody waits on the host."""
    leases = []
    for nbytes in sizes:
        lease = lend(tier, backend, nbytes)
        write(tier, lease, backend.allocate(nbytes), backend, out)
        leases.append(lease)
    for lease in reversed(leases):
        _, completion = read(tier, lease, backend, back)
        tier.release(lease, completion)


def test_a_third_identical_step_allocates_nothing_though_its_copies_are_still_queued() -> None:
    tier, backend = pinned_tier(), TorchBackend()
    out, back = backend.new_stream(), backend.new_stream()
    gate = back.hold()  # the host is three whole steps ahead of the device
    sizes = [MIB + 512 * (i % 3) for i in range(24)]
    step(tier, backend, out, back, sizes)
    first = tier.statistics()
    step(tier, backend, out, back, sizes)
    step(tier, backend, out, back, sizes)
    last = tier.statistics()
    assert last.allocations == first.allocations
    assert last.held_bytes == first.held_bytes <= 1.05 * sum(sizes)
    assert not any(name.endswith("MainThread") for name in backend.calls)  # no host synchronisation
    gate.fire()


def test_room_borrowed_under_a_queued_read_is_not_overwritten_before_it() -> None:
    tier, backend = pinned_tier(MIB), TorchBackend()
    out, back = backend.new_stream(), backend.new_stream()
    first, second = random_bytes(MIB, seed=3), random_bytes(MIB, seed=4)
    lease = lend(tier, backend, MIB)
    write(tier, lease, first, backend, out)
    gate = back.hold()
    target, loaded = read(tier, lease, backend, back)
    tier.release(lease, loaded)
    again = lend(tier, backend, MIB)  # the same room: the cap allows no other
    written = write(tier, again, second, backend, out)
    assert not written.end.happened.wait(0.2)  # the outgoing stream runs, and stands before this copy
    gate.fire()
    loaded.wait()
    assert torch.equal(target, first)
    target, loaded = read(tier, again, backend, back)
    loaded.wait()
    assert torch.equal(target, second)


def test_room_borrowed_and_released_unwritten_stays_under_its_old_copies() -> None:
    tier, backend = pinned_tier(2 * MIB), TorchBackend()
    stream = backend.new_stream()
    leases = [lend(tier, backend, MIB) for _ in range(2)]
    gates = []
    for lease in leases:
        write(tier, lease, backend.allocate(MIB), backend, stream)
        gates.append(stream.hold())
        tier.release(lease, read(tier, lease, backend, stream)[1])
    borrowed = lend(tier, backend, 2 * MIB)
    assert len(borrowed.extent.free_after) == 2
    tier.release(borrowed, None)
    pool = borrowed.extent.pool
    tier.statistics()
    assert [room.after.is_done() for room in pool.in_flight] == [False]
    for gate in gates:
        gate.fire()
    pool.in_flight[0].after.wait()
    lend(tier, backend, 2 * MIB)
    assert tier.statistics().allocations == 2


def test_another_devices_copy_is_not_ordered_but_waited_for() -> None:
    """Room is lent early only to the device whose stream carries the copy."""
    tier = pinned_tier()
    one, twin = TorchBackend(), TorchBackend()  # same kind and name, so they share a pool
    stream = one.new_stream()
    lease = lend(tier, one, MIB)
    write(tier, lease, one.allocate(MIB), one, stream)
    gate = stream.hold()
    tier.release(lease, read(tier, lease, one, stream)[1])
    held = addresses(lease)
    other = lend(tier, twin, MIB)
    assert not any(a < d and c < b for a, b in held for c, d in addresses(other))
    assert tier.statistics().allocations == 2
    gate.fire()


def test_never_lent_while_a_completion_is_pending() -> None:
    tier, backend = pinned_tier(8 * MIB), TorchBackend()
    leases = [lend(tier, backend, MIB) for _ in range(4)]
    pending = [ManualCompletion() for _ in leases]
    for lease, completion in zip(leases, pending):
        tier.release(lease, completion)
    fresh = [lend(tier, backend, MIB) for _ in range(4)]
    assert tier.statistics().allocations == 8
    for one in fresh:
        tier.release(one, None)
    pending[2].finish()  # not the oldest
    big = lend(tier, backend, 5 * MIB)
    assert tier.statistics().allocations == 8
    assert big.extent.pool.in_flight_bytes == 3 * MIB


def test_room_that_is_free_and_room_under_a_queued_copy_serve_one_lease_together() -> None:
    tier, backend = pinned_tier(), TorchBackend()
    stream = backend.new_stream()
    leases = [lend(tier, backend, MIB) for _ in range(2)]
    write(tier, leases[0], backend.allocate(MIB), backend, stream)
    gate = stream.hold()
    tier.release(leases[0], read(tier, leases[0], backend, stream)[1])  # its copy can be ordered, and is not done
    copy = ManualCompletion()
    tier.release(leases[1], copy)  # not the oldest, and cannot be ordered
    tier.statistics()
    copy.finish()
    both = lend(tier, backend, 2 * MIB - 5)
    assert tier.statistics().allocations == 2
    assert len(both.extent.hosts) == 2
    source = random_bytes(both.nbytes, seed=9)
    write(tier, both, source, backend, backend.new_stream())
    gate.fire()
    target, completion = read(tier, both, backend, stream)
    completion.wait()
    assert torch.equal(target, source)


@pytest.mark.parametrize("seed", range(6))
def test_the_host_is_asked_for_bytes_only_where_room_of_all_kinds_is_too_little(seed: int) -> None:
    tier, backend = pinned_tier(), TorchBackend()
    stream = backend.new_stream()
    gate = stream.hold()  # every copy on this stream stays queued
    draw = random.Random(seed)
    leases: list[Lease] = []
    pending: list[ManualCompletion] = []
    for _ in range(300):
        if leases and draw.random() < 0.5:
            lease = leases.pop(draw.randrange(len(leases)))
            after = write(tier, lease, backend.allocate(lease.nbytes), backend, stream)
            if draw.random() < 0.5:
                after = ManualCompletion()
                pending.append(after)
            tier.release(lease, after)
        else:
            leases.append(lend(tier, backend, draw.randint(1, 64 * KIB)))
        if pending and draw.random() < 0.5:
            pending.pop(draw.randrange(len(pending))).finish()
    assert all(nbytes > 0 for nbytes, _ in backend.host_allocations)
    assert not any(overlap(a, b) for i, a in enumerate(leases) for b in leases[:i])
    gate.fire()


def test_at_the_cap_it_waits_for_the_oldest_pending_copy() -> None:
    tier, backend = pinned_tier(2 * MIB), TorchBackend()
    leases = [lend(tier, backend, MIB) for _ in range(2)]
    oldest, newest = ManualCompletion(), ManualCompletion()
    tier.release(leases[0], oldest)
    tier.release(leases[1], newest)
    got: list[Lease | Refusal] = []
    thread = threading.Thread(target=lambda: got.append(tier.reserve(backend, MIB)), daemon=True)
    thread.start()
    assert oldest.waited.wait(LIMIT_S)
    assert not got
    assert tier.statistics().live_bytes == 0  # the waiting thread does not hold the lock
    oldest.finish()
    thread.join(LIMIT_S)
    assert isinstance(got[0], Lease)
    assert not newest.waited.is_set()
    assert tier.statistics().held_bytes == 2 * MIB


def test_over_the_cap_is_an_answer_with_a_reason() -> None:
    tier, backend = pinned_tier(2 * MIB), TorchBackend()
    lend(tier, backend, MIB)
    assert tier.reserve(backend, MIB + 1) is Refusal.OVER_LIMIT
    assert tier.statistics().refusals == 1
    lend(tier, backend, MIB)


def test_a_host_that_refuses_is_an_answer_with_a_reason() -> None:
    tier, backend = pinned_tier(), TorchBackend(host_has=MIB)
    lend(tier, backend, MIB)
    assert tier.reserve(backend, 2 * MIB) is Refusal.NO_SPACE
    assert tier.statistics().refusals == 1


def test_pinned_and_pageable_share_one_cap_and_idle_slabs_move_between_them() -> None:
    budget, backend = HostBudget(4 * MIB), TorchBackend()
    pinned, pageable = HostTier(budget, pinned=True), HostTier(budget, pinned=False)
    lease = lend(pinned, backend, 3 * MIB)
    assert pageable.reserve(backend, 2 * MIB) is Refusal.OVER_LIMIT
    pinned.release(lease, None)
    pinned.statistics()
    lend(pageable, backend, 2 * MIB)
    assert pinned.statistics().held_bytes == 0
    assert pageable.statistics().held_bytes == 2 * MIB == budget.held_bytes
    assert not budget.charge(2 * MIB + 1)
    assert budget.charge(2 * MIB)
    assert pinned.reserve(backend, 1) is Refusal.OVER_LIMIT
    budget.refund(2 * MIB)
    lend(pinned, backend, 2 * MIB)


@pytest.mark.parametrize("seed", range(6))
def test_changing_shapes_hold_at_most_five_percent_more_than_the_live_peak(seed: int) -> None:
    tier, backend = pinned_tier(), TorchBackend()
    out, back = backend.new_stream(), backend.new_stream()
    draw = random.Random(seed)
    for _ in range(12):
        length = draw.randint(64, 4096)  # the sequence length of this step
        step(tier, backend, out, back, [length * draw.choice([256, 768, 1024]) for _ in range(12)])
        statistics = tier.statistics()
        assert statistics.held_bytes <= 1.05 * statistics.peak_live_bytes


@pytest.mark.parametrize("seed", range(6))
def test_leases_of_any_age_and_size_hold_at_most_five_percent_more_than_the_live_peak(seed: int) -> None:
    tier, backend = pinned_tier(), TorchBackend()
    draw = random.Random(seed)
    leases: list[Lease] = []
    for _ in range(600):
        if leases and draw.random() < 0.48:
            tier.release(leases.pop(draw.randrange(len(leases))), None)
        else:
            leases.append(lend(tier, backend, draw.randint(16 * KIB, 4 * MIB)))
        statistics = tier.statistics()
        assert statistics.live_bytes == sum(lease.nbytes for lease in leases)
        assert statistics.held_bytes <= 1.05 * statistics.peak_live_bytes
    assert not any(overlap(a, b) for i, a in enumerate(leases) for b in leases[:i])


def test_small_requests_share_slabs_once_the_pool_is_large() -> None:
    tier, backend = pinned_tier(), TorchBackend()
    lend(tier, backend, 256 * MIB)
    for _ in range(64):
        lend(tier, backend, 64 * KIB)
    assert tier.statistics().allocations == 2


def test_eight_threads_of_random_load_never_exceed_the_cap() -> None:
    limit = 24 * MIB
    budget = HostBudget(limit)
    tiers = [HostTier(budget, pinned=True), HostTier(budget, pinned=False)]
    backends = [TorchBackend(name=f"device:{i}") for i in range(2)]
    held, over, failures = 0, [], []
    real_lock = threading.Lock()

    def watch(backend: TorchBackend) -> None:
        allocate = backend.allocate_host

        def allocate_host(nbytes: int, *, pinned: bool) -> torch.Tensor:
            nonlocal held
            slab = allocate(nbytes, pinned=pinned)
            with real_lock:
                held += nbytes
                if held > limit:
                    over.append(held)
            # What the host really holds: counted when a slab is made and when its memory is gone.
            weakref.finalize(slab.untyped_storage(), gone, nbytes)
            return slab

        backend.allocate_host = allocate_host

    def gone(nbytes: int) -> None:
        nonlocal held
        with real_lock:
            held -= nbytes

    def load(seed: int) -> None:
        try:
            draw = random.Random(seed)
            backend, stream = backends[seed % 2], ThreadStream(jitter=draw)
            mine: list[tuple[Lease, HostTier, torch.Tensor]] = []
            for turn in range(60):
                tier = draw.choice(tiers)
                lease = tier.reserve(backend, draw.randint(1, 3 * MIB))
                if isinstance(lease, Lease):
                    source = torch.full((lease.nbytes,), (seed * 31 + turn) % 251, dtype=torch.uint8)
                    write(tier, lease, source, backend, stream)
                    mine.append((lease, tier, source))
                while mine and (not isinstance(lease, Lease) or draw.random() < 0.5):
                    old, owner, source = mine.pop(draw.randrange(len(mine)))
                    target, completion = read(owner, old, backend, stream)
                    owner.release(old, completion)
                    completion.wait()
                    if not torch.equal(target, source):
                        failures.append((seed, turn, old.nbytes))
                    lease = None if not mine else lease
            for old, owner, _ in mine:
                owner.release(old, None)
        except BaseException as error:
            failures.append(error)
            raise

    for backend in backends:
        watch(backend)
    threads = [threading.Thread(target=load, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert failures == []
    assert over == []
    statistics = [tier.statistics() for tier in tiers]
    assert [one.live_bytes for one in statistics] == [0, 0]
    assert sum(one.refusals for one in statistics) > 0  # the load did reach the cap
    assert budget.held_bytes == sum(one.held_bytes for one in statistics) <= limit


def test_release_inside_a_destructor_in_the_middle_of_reserve() -> None:
    """The collector runs where it likes: here inside the allocation that reserve makes with the lock held."""
    tier, backend = pinned_tier(), TorchBackend()
    first = lend(tier, backend, MIB)

    class Owner:
        def __init__(self, lease: Lease) -> None:
            self.lease = lease
            self.cycle = self

        def __del__(self) -> None:
            tier.release(self.lease, None)

    owner = weakref.ref(Owner(first))
    allocate = backend.allocate_host

    def allocate_host(nbytes: int, *, pinned: bool) -> torch.Tensor:
        gc.collect()
        return allocate(nbytes, pinned=pinned)

    backend.allocate_host = allocate_host
    lend(tier, backend, 2 * MIB)
    assert owner() is None
    assert tier.statistics().live_bytes == 2 * MIB


def test_close_gives_idle_slabs_back_and_the_lent_ones_when_released() -> None:
    budget, backend = HostBudget(64 * MIB), TorchBackend()
    tier, stream = HostTier(budget, pinned=True), backend.new_stream()
    source = random_bytes(MIB, seed=5)
    kept, idle = lend(tier, backend, MIB), lend(tier, backend, 2 * MIB)
    write(tier, kept, source, backend, stream)
    tier.release(idle, None)
    tier.close()
    assert budget.held_bytes == MIB
    target, completion = read(tier, kept, backend, stream)
    completion.wait()
    assert torch.equal(target, source)
    tier.release(kept, completion)
    assert budget.held_bytes == 0
    with pytest.raises(FarMemoryError, match="pinned: cannot lend 5 bytes; because this tier was closed"):
        tier.reserve(backend, 5)


def test_misuse_is_named() -> None:
    tier, backend = pinned_tier(), TorchBackend()
    lease = lend(tier, backend, 100)
    with pytest.raises(FarMemoryError, match="cannot read a lease of 100 bytes; because nothing was written"):
        read(tier, lease, backend, backend.new_stream())
    with pytest.raises(ValueError, match=r"HostTier\.reserve: expected at least 1 byte, got 0"):
        tier.reserve(backend, 0)
