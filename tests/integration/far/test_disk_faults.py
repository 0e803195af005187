"""Full, failing and hanging disks: a clear error, and nothing lost."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from hyper_parallel.core.activation_checkpoint.far import disk, disk_file
from hyper_parallel.core.activation_checkpoint.far.disk_file import SwapFile
from hyper_parallel.core.activation_checkpoint.far.tier import Refusal
from hyper_parallel.errors import DiskTierError, FarMemoryError

from .backend import LIMIT_S, TorchBackend, random_bytes
from .tier_calls import lend, read, write

MIB = 2**20
BOTH = pytest.mark.parametrize("is_host_memory", [True, False], ids=["host", "device"])


def fail_pwritev(monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC) -> None:
    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk_file.os, "pwritev", pwritev)


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
    assert str(tier.failure) == str(caught.value)
    assert tier.failure is not None
    assert tier.failure.errno == errno.ENOSPC
    assert tier.failure.__traceback__ is None  # no frame, no batch
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
    assert len(lease.extent.kept) == 3
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
    tier._workers._wait_limit_s = LIMIT_S  # what moves from here on may take its time
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
    with pytest.raises(DiskTierError, match="because their write did not reach them"):
        read(tier, lease, backend)[1].wait()


def test_staging_counts_against_the_host_limit(make_tier) -> None:
    tier, backend = make_tier(host_limit=disk.STAGING_BYTES), TorchBackend()
    assert tier.reserve(backend, MIB) is Refusal.OVER_LIMIT
    lend(tier, TorchBackend(is_host_memory=True), MIB)  # needs no staging
    tier = make_tier()
    lend(tier, backend, MIB)
    # Two workers, two buffers each, and room to begin at a block.
    assert tier._budget.held_bytes == sum(nbytes for nbytes, _ in backend.host_allocations) == 2 * (16 * MIB + 4096)
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
