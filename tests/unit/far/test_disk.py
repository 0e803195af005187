"""The disk tier: bytes come back whatever the alignment, nothing is left behind, and a failing disk loses nothing."""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import pytest
import torch

from hyper_parallel.core.activation_checkpoint.far import disk, disk_file
from hyper_parallel.core.activation_checkpoint.far.disk import DiskTier
from hyper_parallel.core.activation_checkpoint.far.disk_file import SwapFile
from hyper_parallel.core.activation_checkpoint.far.host import HostBudget
from hyper_parallel.core.activation_checkpoint.far.tier import Lease, Refusal
from hyper_parallel.errors import DiskTierError, FarMemoryError

from .backend import LIMIT_S, TorchBackend, random_bytes

MIB = 2**20
BOTH = pytest.mark.parametrize("is_host_memory", [True, False], ids=["host", "device"])


@pytest.fixture
def make_tier(tmp_path: Path):
    tiers: list[DiskTier] = []

    def make(limit: int | None = None, *, host_limit: int = 1024 * MIB, wait_limit_s: float = LIMIT_S) -> DiskTier:
        tier = DiskTier(str(tmp_path), limit_bytes=limit, budget=HostBudget(host_limit), wait_limit_s=wait_limit_s)
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        tier.close()


def lend(tier: DiskTier, backend: TorchBackend, nbytes: int) -> Lease:
    lease = tier.reserve(backend, nbytes)
    assert isinstance(lease, Lease), lease
    return lease


def write(tier: DiskTier, lease: Lease, source: torch.Tensor, backend: TorchBackend):
    return tier.write(lease, source, backend=backend, stream=backend.new_stream(), ready=backend.ready())


def read(tier: DiskTier, lease: Lease, backend: TorchBackend, target: torch.Tensor | None = None):
    target = backend.allocate(lease.nbytes) if target is None else target
    return target, tier.read(lease, target, backend=backend, stream=backend.new_stream(), ready=backend.ready())


def fail_pwritev(monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC) -> None:
    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk_file.os, "pwritev", pwritev)


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


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("shift_in", [0, 1, 64, 4095])
@pytest.mark.parametrize("shift_out", [0, 1, 64, 500])
def test_any_alignment_of_memory_is_written_and_read(
    tmp_path: Path, direct: bool, shift_in: int, shift_out: int
) -> None:
    file = SwapFile(tmp_path, direct=direct)
    file.grow(MIB)
    base = random_bytes(64 * 1024, seed=2)
    for nbytes in (3, 4096, 4600, 40_000):
        source = memoryview(base.numpy())[shift_in : shift_in + nbytes]
        phase = file.phase_of(source)
        file.write_at(8192, source, phase)
        target = memoryview(torch.zeros(64 * 1024, dtype=torch.uint8).numpy())[shift_out : shift_out + nbytes]
        file.read_at(8192, target, phase)
        assert target == source
    file.close()


def test_a_write_stays_inside_its_blocks(tmp_path: Path) -> None:
    file = SwapFile(tmp_path)
    file.grow(64 * 1024)
    guard = memoryview(random_bytes(4096, seed=3).numpy())
    guards = [(offset, file.phase_of(guard)) for offset in (0, 4096 + 12288)]
    for offset, phase in guards:
        file.write_at(offset, guard, phase)
    for shift in (0, 1, 64, 511):
        source = memoryview(random_bytes(20_000, seed=shift).numpy())[shift : shift + 12288]
        file.write_at(4096, source, file.phase_of(source))
        for offset, phase in guards:
            back = memoryview(bytearray(4096))
            file.read_at(offset, back, phase)
            assert back == guard
    file.close()


def test_scattered_room_gives_the_bytes_back_in_order(make_tier) -> None:
    tier, backend = make_tier(limit=3 * MIB), TorchBackend(is_host_memory=True)
    leases = [lend(tier, backend, MIB) for _ in range(3)]
    tier.release(leases[0], None)
    tier.release(leases[2], None)
    scattered = lend(tier, backend, 2 * MIB - 5)
    assert len(scattered.place.spans) == 2
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


# ---------------------------------------------------------------- the file


def test_the_file_is_private_and_has_no_name(make_tier, tmp_path: Path) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=True)
    lend(tier, backend, MIB)
    status = os.fstat(tier._file._fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []


def refuse_nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def open_(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode)

    monkeypatch.setattr(disk_file.os, "open", open_)


def test_without_nameless_files_it_is_unlinked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_nameless(monkeypatch)
    file = SwapFile(tmp_path)
    status = os.fstat(file._fd)
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    assert list(tmp_path.iterdir()) == []
    file.close()


def keep_names(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_nameless(monkeypatch)

    def unlink(path: str) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(disk_file.os, "unlink", unlink)


def test_a_file_that_keeps_its_name_is_removed_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        keep_names(patch)
        file = SwapFile(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [os.path.basename(file.path)]
        assert str(os.getpid()) in file.path
        assert disk_file.remove_leftovers(str(tmp_path)) == []  # its owner lives
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_dead_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(LIMIT_S)
    leftover = tmp_path / f"hyper-parallel-{dead.pid}-123-{'0' * 16}.swap"
    reused_pid = tmp_path / f"hyper-parallel-{os.getpid()}-1-{'0' * 16}.swap"  # we did not start at tick 1
    foreign = tmp_path / "model.swap"
    locked = tmp_path / f"hyper-parallel-{dead.pid}-456-{'1' * 16}.swap"  # its owner lives where we cannot see it
    for path in (leftover, reused_pid, foreign, locked):
        path.touch()
    holder = os.open(locked, os.O_RDWR)
    assert disk_file._lock(holder)
    SwapFile(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {foreign.name, locked.name}
    os.close(holder)


KILLED = """
    import os, sys
    sys.path.insert(0, {unit!r})
    from far.backend import TorchBackend, random_bytes
    from hyper_parallel.core.activation_checkpoint.far import disk_file
    from hyper_parallel.core.activation_checkpoint.far.disk import DiskTier
    from hyper_parallel.core.activation_checkpoint.far.host import HostBudget
    if {named}:
        real_open = os.open
        def open_(path, flags, mode=0o777):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(95, "no nameless files here")
            return real_open(path, flags, mode)
        disk_file.os.open = open_
        def unlink(path):
            raise OSError(16, "no unlinking of open files here")
        disk_file.os.unlink = unlink
    tier = DiskTier({directory!r}, limit_bytes=None, budget=HostBudget(2**30))
    backend = TorchBackend(is_host_memory=True)
    source = random_bytes(16 * 2**20, seed=0)
    print("writing", flush=True)
    while True:
        lease = tier.reserve(backend, len(source))
        done = tier.write(lease, source, backend=backend, stream=None, ready=backend.ready())
        tier.release(lease, done)
"""


@pytest.mark.parametrize("named", [False, True])
def test_killed_in_the_middle_of_a_write_leaves_nothing(tmp_path: Path, named: bool) -> None:
    unit = str(Path(__file__).parents[1])
    script = textwrap.dedent(KILLED).format(unit=unit, named=named, directory=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(LIMIT_S)
    process.stdout.close()
    assert len(list(tmp_path.iterdir())) == (1 if named else 0)
    SwapFile(tmp_path).close()  # the next start
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "because"), [("nowhere", "it does not exist"), ("file", "it is not a directory")])
def test_a_bad_directory_is_named(tmp_path: Path, name: str, because: str) -> None:
    (tmp_path / "file").touch()
    pattern = rf"disk tier: cannot use {re.escape(str(tmp_path / name))}; because {because}; set SwapConfig\.disk_path"
    with pytest.raises(DiskTierError, match=pattern):
        SwapFile(tmp_path / name)


def test_a_directory_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_(path: str, flags: int, mode: int = 0o777) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(disk_file.os, "open", open_)  # tests may run as root, whom no permission stops
    with pytest.raises(DiskTierError, match=rf"cannot make a file in {re.escape(str(tmp_path))}; because Permission"):
        SwapFile(tmp_path)


# ---------------------------------------------------------------- full and failing disks


def test_over_the_limit_is_an_answer_with_a_reason(make_tier) -> None:
    tier, backend = make_tier(limit=MIB), TorchBackend(is_host_memory=True)
    assert tier.reserve(backend, MIB + 1) is Refusal.OVER_LIMIT
    lend(tier, backend, MIB)
    assert tier.reserve(backend, 1) is Refusal.OVER_LIMIT
    statistics = tier.statistics()
    assert (statistics.refusals, statistics.held_bytes, statistics.limit_bytes) == (2, MIB, MIB)


def test_room_is_not_promised_where_the_file_system_has_none(make_tier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=True)
    monkeypatch.setattr(SwapFile, "free_bytes", lambda self: tier._reserve_bytes + 2 * MIB)
    assert tier.reserve(backend, 2 * MIB + 1) is Refusal.NO_SPACE
    lend(tier, backend, 2 * MIB)


def test_growth_that_fails_is_an_answer_with_a_reason(make_tier, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tier, backend = make_tier(), TorchBackend(is_host_memory=True)
    monkeypatch.setattr(disk_file, "_fallocate", no_space)
    assert tier.reserve(backend, MIB) is Refusal.NO_SPACE
    monkeypatch.undo()
    lend(tier, backend, MIB)


def test_a_file_system_that_cannot_set_blocks_aside_is_used_all_the_same(
    make_tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(disk_file, "_fallocate", unsupported)
    tier, backend = make_tier(), TorchBackend(is_host_memory=True)
    source = random_bytes(MIB, seed=11)
    lease = lend(tier, backend, MIB)
    write(tier, lease, source, backend)
    target, completion = read(tier, lease, backend)
    completion.wait()
    assert torch.equal(target, source)


@BOTH
def test_a_full_disk_is_named_and_the_bytes_stay_readable(
    make_tier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_host_memory: bool
) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=is_host_memory)
    source = random_bytes(20 * MIB + 77, seed=12)
    kept = source.clone()
    lease = lend(tier, backend, len(source))
    with monkeypatch.context() as patch:
        fail_pwritev(patch)
        completion = write(tier, lease, source, backend)
        tier._workers.wait_until_idle()
    assert completion.is_done()
    pattern = rf"disk tier: cannot write \d+ bytes at offset \d+ of {re.escape(str(tmp_path))}.*; because No space left"
    with pytest.raises(DiskTierError, match=pattern) as caught:
        completion.wait()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(DiskTierError, match=pattern):
        completion.order(backend.current_stream())
    del source
    for _ in range(2):
        target, loaded = read(tier, lease, backend)
        loaded.wait()
        assert torch.equal(target, kept)
    assert tier.reserve(backend, MIB) is Refusal.NO_SPACE  # it is not trusted with more
    assert tier.failure is caught.value
    tier.release(lease, loaded)
    assert tier.statistics().live_bytes == 0


def test_a_disk_that_fails_after_some_pieces_serves_the_rest_from_memory(
    make_tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, backend = make_tier(), TorchBackend()
    source = random_bytes(5 * disk.STAGING_BYTES, seed=13)
    lease = lend(tier, backend, len(source))
    real, calls = SwapFile.write_at, []

    def write_at(self: SwapFile, offset: int, view: memoryview, phase: int) -> None:
        calls.append(offset)
        if len(calls) > 2:
            self._raise("write", len(view), offset, OSError(errno.EIO, os.strerror(errno.EIO)))
        real(self, offset, view, phase)

    monkeypatch.setattr(SwapFile, "write_at", write_at)
    completion = write(tier, lease, source, backend)
    tier._workers.wait_until_idle()
    with pytest.raises(DiskTierError, match="because Input/output error"):
        completion.wait()
    assert len(lease.place.kept) == 3
    target, loaded = read(tier, lease, backend)
    loaded.wait()
    assert torch.equal(target, source)


LIMITED = """
    import os, resource, sys
    sys.path.insert(0, {unit!r})
    import torch
    from far.backend import TorchBackend, random_bytes
    from hyper_parallel.core.activation_checkpoint.far.disk import DiskTier
    from hyper_parallel.core.activation_checkpoint.far.host import HostBudget
    from hyper_parallel.core.activation_checkpoint.far.tier import Refusal
    from hyper_parallel.errors import DiskTierError
    tier = DiskTier({directory!r}, limit_bytes=None, budget=HostBudget(2**30))
    backend = TorchBackend(is_host_memory=True)
    source = random_bytes(4 * 2**20, seed=0)
    lease = tier.reserve(backend, len(source))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    print(tier.reserve(backend, 2**30))
    try:
        tier.write(lease, source, backend=backend, stream=None, ready=backend.ready()).wait()
    except DiskTierError as error:
        print(error)
    target = torch.zeros_like(source)
    tier.read(lease, target, backend=backend, stream=None, ready=backend.ready()).wait()
    print(torch.equal(target, source))
"""


def test_the_kernels_own_file_size_limit(tmp_path: Path) -> None:
    script = textwrap.dedent(LIMITED).format(unit=str(Path(__file__).parents[1]), directory=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    refusal, error, equal = done.stdout.splitlines()
    assert refusal == "Refusal.NO_SPACE"
    assert re.match(
        rf"disk tier: cannot write 4194304 bytes .* of {re.escape(str(tmp_path))}.*; because File too large", error
    )
    assert equal == "True"


@BOTH
def test_a_short_read_is_an_error(make_tier, is_host_memory: bool) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=is_host_memory)
    lease = lend(tier, backend, MIB)
    write(tier, lease, random_bytes(MIB, seed=14), backend).wait()
    tier._workers.wait_until_idle()
    os.ftruncate(tier._file._fd, 100_000)
    _, completion = read(tier, lease, backend)
    with pytest.raises(DiskTierError, match=r"cannot read 1048576 bytes .* because the file ended \d+ bytes early"):
        completion.wait()


@BOTH
def test_a_read_error_is_named_at_the_completion(
    make_tier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_host_memory: bool
) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=is_host_memory)
    lease = lend(tier, backend, MIB)
    write(tier, lease, random_bytes(MIB, seed=15), backend).wait()
    tier._workers.wait_until_idle()

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk_file.os, "preadv", preadv)
    _, completion = read(tier, lease, backend)
    with pytest.raises(DiskTierError, match=rf"cannot read .* of {re.escape(str(tmp_path))}.*; because Input/output"):
        completion.order(backend.current_stream())


def test_memory_the_disk_cannot_map_goes_through_the_page_cache(make_tier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=True)
    if not tier.is_direct:
        pytest.skip("this file system has no direct I/O")
    real = os.pwritev
    refused = []

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        if fd == tier._file._direct_fd:
            refused.append(offset)
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return real(fd, views, offset)

    monkeypatch.setattr(disk_file.os, "pwritev", pwritev)
    source = random_bytes(MIB, seed=16)
    lease = lend(tier, backend, MIB)
    write(tier, lease, source, backend).wait()
    target, completion = read(tier, lease, backend)
    completion.wait()
    assert refused
    assert torch.equal(target, source)


# ---------------------------------------------------------------- workers and closing


def test_dead_workers_are_noticed(make_tier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=True)
    monkeypatch.setattr(tier._workers, "_next", lambda: None)  # every worker ends at once
    completion = write(tier, lend(tier, backend, MIB), random_bytes(MIB, seed=17), backend)
    with pytest.raises(DiskTierError, match="because all its worker threads have ended"):
        completion.wait()


def test_a_disk_that_hangs_is_noticed(make_tier) -> None:
    tier, backend = make_tier(wait_limit_s=0.6), TorchBackend(is_host_memory=True)
    gate = backend.current_stream().hold()
    completion = write(tier, lend(tier, backend, MIB), random_bytes(MIB, seed=18), backend)
    with pytest.raises(DiskTierError, match=r"cannot wait longer for .* because nothing moved for 0\.6 s"):
        completion.wait()
    gate.fire()


def test_whatever_a_job_raises_reaches_its_waiter(make_tier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=True)

    def host_view(flat: torch.Tensor) -> memoryview:
        raise SystemExit("a very odd backend")

    lease = lend(tier, backend, MIB)
    monkeypatch.setattr(backend, "host_view", host_view)
    with pytest.raises(SystemExit, match="a very odd backend"):
        write(tier, lease, random_bytes(MIB, seed=19), backend).wait()
    monkeypatch.undo()
    with pytest.raises(DiskTierError, match="because their write never came so far"):
        read(tier, lease, backend)[1].wait()


def test_staging_counts_against_the_host_limit(make_tier) -> None:
    tier, backend = make_tier(host_limit=disk.STAGING_BYTES), TorchBackend()
    assert tier.reserve(backend, MIB) is Refusal.OVER_LIMIT
    lend(tier, TorchBackend(is_host_memory=True), MIB)  # needs no staging
    tier = make_tier()
    lend(tier, backend, MIB)
    assert tier._budget.held_bytes == sum(nbytes for nbytes, _ in backend.host_allocations) == 64 * MIB
    assert all(pinned for _, pinned in backend.host_allocations)


@BOTH
def test_close_keeps_the_bytes_of_leases_that_are_out(make_tier, is_host_memory: bool) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=is_host_memory)
    source = random_bytes(MIB, seed=20)
    lease = lend(tier, backend, MIB)
    write(tier, lease, source, backend)
    tier.close()
    target, completion = read(tier, lease, backend)
    completion.wait()
    assert torch.equal(target, source)
    tier._workers.wait_until_idle()
    fd = tier._file._fd
    tier.release(lease, completion)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    tier.close()
    assert not any(thread.is_alive() for thread in tier._workers._threads)
    assert tier._budget.held_bytes == 0
    with pytest.raises(FarMemoryError, match="disk: cannot lend 5 bytes; because this tier was closed"):
        tier.reserve(backend, 5)


def test_misuse_is_named(make_tier) -> None:
    tier, backend = make_tier(), TorchBackend(is_host_memory=True)
    with pytest.raises(FarMemoryError, match="cannot read a lease of 100 bytes; because nothing was written"):
        read(tier, lend(tier, backend, 100), backend)
    with pytest.raises(ValueError, match=r"DiskTier\.reserve: expected at least 1 byte, got -1"):
        tier.reserve(backend, -1)
