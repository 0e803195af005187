"""The disk tier: bytes come back, in order, from a bounded queue, and room is reused only when nobody needs it."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

import pytest
import torch

from hyper_parallel.core.activation_checkpoint.far.disk import DiskTier
from hyper_parallel.core.activation_checkpoint.far.disk_file import SwapFile
from hyper_parallel.core.activation_checkpoint.far.host import HostBudget
from hyper_parallel.core.activation_checkpoint.far.tier import Lease, Refusal

from .backend import LIMIT_S, TorchBackend, random_bytes
from .tier_calls import lend, read, write

MIB = 2**20
BOTH = pytest.mark.parametrize("is_host_memory", [True, False], ids=["host", "device"])


@BOTH
@pytest.mark.parametrize("nbytes", [1, 511, 4096, 5000, MIB, 20 * MIB + 12345])
def test_bytes_come_back_any_number_of_times(make_tier, is_host_memory: bool, nbytes: int) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=is_host_memory)
    source = random_bytes(nbytes, seed=1)
    lease = lend(tier, backend, nbytes)
    write(tier, lease, source, backend).wait()
    for _ in range(2):
        target, completion = read(tier, lease, backend)
        completion.wait()
        assert torch.equal(target, source)
    statistics = tier.statistics()
    assert (statistics.written_bytes, statistics.read_bytes) == (nbytes, 2 * nbytes)


def test_scattered_room_gives_the_bytes_back_in_order(make_tier) -> None:
    tier, backend = make_tier(limit=3 * MIB), TorchBackend(is_host_memory=True)
    leases = [lend(tier, backend, MIB) for _ in range(3)]
    tier.release(leases[0], None)
    tier.release(leases[2], None)
    scattered = lend(tier, backend, 2 * MIB - 5)
    assert len(scattered.extent.ranges) == 2
    source = random_bytes(scattered.nbytes, seed=4)
    write(tier, scattered, source, backend)
    target, completion = read(tier, scattered, backend)
    completion.wait()
    assert torch.equal(target, source)


@BOTH
def test_a_read_before_the_write_began_starts_when_the_write_ended(make_tier, is_host_memory: bool) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=is_host_memory)
    gate = backend.current_stream().hold()
    source = torch.zeros(2 * MIB, dtype=torch.uint8)
    backend.current_stream().queue(lambda: source.fill_(9))
    lease = lend(tier, backend, len(source))
    written = write(tier, lease, source, backend)  # waits for the stream, in a worker
    reads = [read(tier, lease, backend) for _ in range(6)]  # more readers than workers
    assert not written.is_done()
    assert not any(completion.is_done() for _, completion in reads)
    gate.fire()
    for target, completion in reads:
        completion.wait()
        assert torch.equal(target, torch.full_like(target, 9))
    assert not any("MainThread" in name for name in backend.calls) or not is_host_memory


def test_the_caller_never_waits_for_ready_but_the_worker_does(make_tier) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=True)
    lease = lend(tier, backend, MIB)
    write(tier, lease, random_bytes(MIB, seed=5), backend).wait()
    read(tier, lease, backend)[1].wait()
    assert {name.split(" in ")[1][:-2] for name in backend.calls} == {"hyper_parallel disk"}


def test_a_consumer_stream_is_ordered_after_the_load(make_tier) -> None:
    tier, backend = make_tier(), TorchBackend()
    source = random_bytes(20 * MIB, seed=6)
    lease = lend(tier, backend, len(source))
    write(tier, lease, source, backend).wait()
    compute, incoming = backend.current_stream(), backend.new_stream()
    target, seen = backend.allocate(len(source)), []
    gate = incoming.hold()
    completion = tier.read(lease, target, backend=backend, stream=incoming, ready=backend.ready())
    # The stream stands still, so the pieces are queued only as far as there are buffers; another thread lets it go.
    timer = threading.Timer(0.2, gate.fire)
    timer.start()
    completion.order(compute)
    compute.queue(lambda: seen.append(torch.equal(target, source)))
    backend.record_event(compute).wait()
    timer.join()
    assert seen == [True]


def test_the_source_is_let_go_once_the_completion_is_done(make_tier) -> None:
    for is_host_memory in (True, False):
        tier, backend = make_tier(), TorchBackend(is_host_memory=is_host_memory)
        lease = lend(tier, backend, MIB)
        source = random_bytes(MIB, seed=7)
        storage = weakref.ref(source.untyped_storage())
        completion = write(tier, lease, source, backend)
        completion.wait()
        del source
        tier.close()  # all jobs have ended
        assert storage() is None
        tier.release(lease, completion)


def test_room_is_not_lent_again_while_a_worker_or_completion_needs_it(make_tier) -> None:
    tier, backend = make_tier(limit=MIB), TorchBackend(is_host_memory=True)
    gate = backend.current_stream().hold()
    lease = lend(tier, backend, MIB)
    source = random_bytes(MIB, seed=8)
    written = write(tier, lease, source, backend)
    target, loaded = read(tier, lease, backend)
    tier.release(lease, loaded)
    assert tier.reserve(backend, MIB) is Refusal.OVER_LIMIT
    gate.fire()
    written.wait()
    loaded.wait()
    assert torch.equal(target, source)
    tier._workers.wait_until_idle()
    lend(tier, backend, MIB)


def test_a_lease_released_before_its_write_began_is_not_written(make_tier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=True)
    written: list[int] = []
    real = SwapFile.write_at
    monkeypatch.setattr(
        SwapFile,
        "write_at",
        lambda self, offset, view, phase: (written.append(len(view)), real(self, offset, view, phase)),
    )
    gate = backend.current_stream().hold()
    busy = [lend(tier, backend, MIB) for _ in range(tier._workers.num_workers)]
    completions = [write(tier, lease, random_bytes(MIB, seed=9), backend) for lease in busy]
    unwanted = lend(tier, backend, 3 * MIB)
    completions.append(write(tier, unwanted, random_bytes(3 * MIB, seed=10), backend))
    tier.release(unwanted, completions[-1])
    gate.fire()
    for completion in completions:
        completion.wait()
    assert sorted(written) == [MIB] * len(busy)


def test_steady_steps_grow_the_file_no_more(make_tier) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=True)
    allocations = []
    for _ in range(3):
        leases = [lend(tier, backend, 3 * MIB + i) for i in range(30)]
        for lease in leases:
            write(tier, lease, backend.allocate(lease.nbytes), backend)
        for lease in reversed(leases):
            _, completion = read(tier, lease, backend)
            completion.wait()
            tier.release(lease, completion)
        tier._workers.wait_until_idle()
        allocations.append(tier.statistics().allocations)
    assert allocations[0] == allocations[1] == allocations[2]


def test_without_a_limit_the_processes_of_a_host_share_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SwapFile, "free_bytes", lambda self: 40 * MIB)
    monkeypatch.setattr(SwapFile, "total_bytes", lambda self: 80 * MIB)  # of which a twentieth is reserved
    backend = TorchBackend(is_host_memory=True)

    def most(limit_bytes: int | None, sharers: int) -> int:
        tier = DiskTier(str(tmp_path), limit_bytes=limit_bytes, budget=HostBudget(0), count_sharers=lambda: sharers)
        leases = []
        while isinstance(lease := tier.reserve(backend, MIB), Lease):
            leases.append(lease)
            if len(leases) == 36:
                break  # what is free is not counted down here
        assert tier.statistics().held_bytes <= max(len(leases), 1) * MIB or sharers == 1
        for lease in leases:
            tier.release(lease, None)
        tier.close()
        return len(leases)

    assert most(None, 1) == 36
    assert most(None, 2) == 18
    assert most(None, 4) == 9
    assert most(20 * MIB, 4) == 20, "a limit that is set is for each process"


def test_the_queue_is_bounded_in_bytes(make_tier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=True)
    tier._workers._queue_bytes = 4 * MIB
    gate = backend.current_stream().hold()
    accepted = []

    def produce() -> None:
        for i in range(16):
            accepted.append(write(tier, lend(tier, backend, MIB), torch.full((MIB,), i, dtype=torch.uint8), backend))

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert len(accepted) <= tier._workers.num_workers + 4
    gate.fire()
    thread.join(LIMIT_S)
    assert len(accepted) == 16
    for completion in accepted:
        completion.wait()


def test_eight_threads_of_random_load_keep_their_bytes_and_the_cap(make_tier) -> None:
    limit = 8 * MIB
    tier = make_tier(limit=limit)
    backends = [TorchBackend(name="cpu", is_host_memory=True), TorchBackend(name="device:0")]
    failures: list[object] = []

    def load(seed: int) -> None:
        try:
            backend = backends[seed % 2]
            for turn in range(25):
                source = random_bytes(1 + (seed * 7919 + turn * 104729) % (2 * MIB), seed=seed * 100 + turn)
                lease = tier.reserve(backend, len(source))
                if isinstance(lease, Refusal):
                    continue
                write(tier, lease, source, backend)
                target, completion = read(tier, lease, backend)
                completion.wait()
                tier.release(lease, completion)
                if not torch.equal(target, source):
                    failures.append((seed, turn))
                if tier.statistics().held_bytes > limit or os.fstat(tier._file._fd).st_size > limit:
                    failures.append("over the cap")
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=load, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert failures == []
    assert tier.statistics().live_bytes == 0
