"""The door: spill order, refusals by tier and reason, checksums."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.far.memory import FarMemory, Overflow
from hyper_parallel.core.activation_checkpoint.far.process_memory import default_host_limit_bytes
from hyper_parallel.core.activation_checkpoint.far.tier import Lease, Refusal
from hyper_parallel.errors import CorruptDataError, DiskTierError, HyperParallelError

from .backend import TorchBackend, random_bytes

MIB = 2**20
STAGING = 2 * (16 * MIB + 4096)  # what the disk tier takes of the host for a real device
BOTH = pytest.mark.parametrize("is_host_memory", [True, False], ids=["host", "device"])


@pytest.fixture
def open_memory():
    opened: list[FarMemory] = []

    def make(**fields) -> FarMemory:
        opened.append(FarMemory(SwapConfig(**fields)))
        return opened[-1]

    yield make
    for memory in opened:
        memory.close()


def lend(memory: FarMemory, backend: TorchBackend, nbytes: int) -> Lease:
    lease = memory.reserve(backend, nbytes)
    assert isinstance(lease, Lease), lease
    return lease


def write(memory: FarMemory, lease: Lease, source: torch.Tensor, backend: TorchBackend):
    return memory.write(lease, source, backend=backend, stream=backend.new_stream(), ready=backend.ready())


def read(memory: FarMemory, lease: Lease, backend: TorchBackend):
    target = backend.allocate(lease.nbytes)
    return target, memory.read(lease, target, backend=backend, stream=backend.new_stream(), ready=backend.ready())


def test_full_tiers_spill_to_the_next_and_every_refusal_is_counted(open_memory, tmp_path: Path) -> None:
    memory = open_memory(
        tiers=("pinned", "pageable", "disk"), host_limit=STAGING + 4 * MIB, disk_path=str(tmp_path), disk_limit=4 * MIB
    )
    backend = TorchBackend()
    wide = STAGING + 4 * MIB + 1
    answers = [memory.reserve(backend, nbytes) for nbytes in (4 * MIB, wide, 3 * MIB, 3 * MIB)]
    # The disk tier's staging took what was left of the host's share, so the pinned tier has no room for the last two.
    assert [answer.tier.name if isinstance(answer, Lease) else answer for answer in answers] == [
        "pinned",
        Refusal.OVER_LIMIT,
        "disk",
        Refusal.OVER_LIMIT,
    ]
    assert memory.overflows() == (
        Overflow(tier="pinned", reason=Refusal.OVER_LIMIT, count=3, nbytes=wide + 6 * MIB),
        Overflow(tier="pageable", reason=Refusal.OVER_LIMIT, count=3, nbytes=wide + 6 * MIB),
        Overflow(tier="disk", reason=Refusal.OVER_LIMIT, count=2, nbytes=wide + 3 * MIB),
    )
    assert [(one.name, one.live_bytes, one.refusals) for one in memory.statistics()] == [
        ("pinned", 4 * MIB, 3),
        ("pageable", 0, 3),
        ("disk", 3 * MIB, 2),
    ]


def test_memory_that_cannot_be_pinned_is_taken_pageable(open_memory) -> None:
    class NothingPinned(TorchBackend):
        def allocate_host(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
            if pinned:
                raise MemoryError("no page-locked memory left")
            return super().allocate_host(nbytes, pinned=pinned)

    memory, backend = open_memory(tiers=("pinned", "pageable"), host_limit=8 * MIB), NothingPinned()
    assert lend(memory, backend, MIB).tier.name == "pageable"
    assert memory.overflows() == (Overflow(tier="pinned", reason=Refusal.NO_SPACE, count=1, nbytes=MIB),)


def test_the_order_is_the_users(open_memory, tmp_path: Path) -> None:
    memory = open_memory(tiers=("disk", "pinned"), host_limit="1GiB", disk_path=str(tmp_path), disk_limit=MIB)
    backend = TorchBackend()
    assert [lend(memory, backend, MIB).tier.name for _ in range(2)] == ["disk", "pinned"]
    assert [one.name for one in memory.statistics()] == ["disk", "pinned"]


def test_host_tensors_go_to_the_disk_where_there_is_one(open_memory, tmp_path: Path) -> None:
    backend = TorchBackend(is_host_memory=True)
    memory = open_memory(tiers=("pinned", "disk"), host_limit="1GiB", disk_path=str(tmp_path), disk_limit=MIB)
    assert lend(memory, backend, MIB).tier.name == "disk"
    assert memory.reserve(backend, MIB) is Refusal.OVER_LIMIT
    assert [one.tier for one in memory.overflows()] == ["disk"]
    assert lend(open_memory(tiers=("pageable",), host_limit="1GiB"), backend, MIB).tier.name == "pageable"


def test_the_default_cap_is_half_of_what_this_process_may_use(open_memory) -> None:
    limit = open_memory().statistics()[0].limit_bytes
    assert limit is not None
    # Other processes take and give memory between the two readings.
    assert limit == pytest.approx(default_host_limit_bytes(), rel=0.2)


@BOTH
@pytest.mark.parametrize("tiers", [("pinned",), ("pageable",), ("disk",)])
def test_verified_bytes_come_back(open_memory, tmp_path: Path, tiers: tuple[str, ...], is_host_memory: bool) -> None:
    memory = open_memory(tiers=tiers, host_limit="1GiB", disk_path=str(tmp_path), verify=True)
    backend = TorchBackend(is_host_memory=is_host_memory)
    source = random_bytes(9 * MIB + 3, seed=1)
    lease = lend(memory, backend, len(source))
    write(memory, lease, source, backend)
    for _ in range(2):
        target, completion = read(memory, lease, backend)
        completion.order(backend.current_stream())
        completion.wait()
        assert completion.is_done()
        assert torch.equal(target, source)
    target.zero_()  # its owner may change it now; it is compared once
    completion.wait()
    memory.release(lease, completion)
    assert memory.statistics()[0].live_bytes == 0


@BOTH
def test_a_bit_that_flipped_in_the_file_is_found(open_memory, tmp_path: Path, is_host_memory: bool) -> None:
    memory = open_memory(tiers=("disk",), host_limit="1GiB", disk_path=str(tmp_path), verify=True)
    backend = TorchBackend(is_host_memory=is_host_memory)
    lease = lend(memory, backend, MIB)
    write(memory, lease, random_bytes(MIB, seed=2), backend).wait()
    lease.tier._workers.wait_until_idle()
    fd = lease.tier._file._fd
    byte = os.pread(fd, 1, 300_000)[0]
    os.pwrite(fd, bytes([byte ^ 4]), 300_000)
    _, completion = read(memory, lease, backend)
    pattern = r"disk: cannot return 1048576 bytes; because they are not those that were written \(checksum 0x"
    with pytest.raises(CorruptDataError, match=pattern):
        completion.order(backend.current_stream())
    with pytest.raises(CorruptDataError, match=pattern):
        completion.wait()
    os.pwrite(fd, bytes([byte]), 300_000)
    read(memory, lease, backend)[1].wait()


def test_a_bit_that_flipped_in_host_memory_is_found(open_memory) -> None:
    memory, backend = open_memory(tiers=("pinned",), host_limit="1GiB", verify=True), TorchBackend()
    lease = lend(memory, backend, MIB)
    write(memory, lease, random_bytes(MIB, seed=3), backend).wait()
    lease.extent.hosts[0][77] ^= 1
    _, completion = read(memory, lease, backend)
    with pytest.raises(CorruptDataError, match=r"pinned: cannot return 1048576 bytes.*check this machine's memory"):
        completion.order(backend.current_stream())


def test_without_verify_nothing_waits_on_the_host(open_memory) -> None:
    memory, backend = open_memory(tiers=("pinned",), host_limit="1GiB"), TorchBackend()
    lease = lend(memory, backend, MIB)
    write(memory, lease, random_bytes(MIB, seed=4), backend)
    _, completion = read(memory, lease, backend)
    completion.order(backend.current_stream())
    assert not backend.calls


def test_a_bad_directory_is_an_error_at_birth(open_memory, tmp_path: Path) -> None:
    with pytest.raises(DiskTierError, match=r"disk tier: cannot use .*nowhere; because it does not exist") as caught:
        open_memory(tiers=("disk",), disk_path=str(tmp_path / "nowhere"))
    assert isinstance(caught.value, HyperParallelError)
    assert isinstance(caught.value, OSError)


def test_the_first_failure_of_the_disk_is_kept_for_the_report(
    open_memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyper_parallel.core.activation_checkpoint.far.disk_file import SwapFile

    memory = open_memory(tiers=("disk",), host_limit="1GiB", disk_path=str(tmp_path))
    backend = TorchBackend(is_host_memory=True)
    lease = lend(memory, backend, MIB)
    assert memory.failure is None

    def write_at(self: SwapFile, offset: int, view: memoryview, phase: int) -> None:
        self._raise("write", len(view), offset, OSError(5, "Input/output error"))

    monkeypatch.setattr(SwapFile, "write_at", write_at)
    with pytest.raises(DiskTierError, match="Input/output error"):
        write(memory, lease, random_bytes(MIB, seed=5), backend).wait()
    assert "Input/output error" in str(memory.failure)
    assert memory.reserve(backend, MIB) is Refusal.NO_SPACE
