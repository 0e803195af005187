"""Buffers that begin where a file can be read straight into them."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
import torch

from hyper_parallel.backends.torch.devices import HostBackend
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.far.disk_file import BLOCK_BYTES, SwapFile, aligned_memory, residue_of
from hyper_parallel.core.activation_checkpoint.far.memory import FarMemory
from hyper_parallel.core.activation_checkpoint.far.tier import Lease

from .backend import TorchBackend, random_bytes
from .tier_calls import lend, read, write

MIB = 2**20


@pytest.fixture
def bounced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what was read through a buffer in between."""
    sizes: list[int] = []
    real = SwapFile._read_bounced

    def read_bounced(self: SwapFile, offset: int, view: memoryview) -> None:
        sizes.append(len(view))
        real(self, offset, view)

    monkeypatch.setattr(SwapFile, "_read_bounced", read_bounced)
    return sizes


def round_trip(memory: FarMemory, backend: HostBackend, source: torch.Tensor, *, placed: bool) -> torch.Tensor:
    lease = memory.reserve(backend, len(source))
    assert isinstance(lease, Lease), lease
    memory.write(lease, source, backend=backend, stream=None, ready=None).wait()
    target = memory.allocate(backend, lease) if placed else backend.allocate(lease.nbytes)
    memory.read(lease, target, backend=backend, stream=None, ready=None).wait()
    memory.release(lease, None)
    return target


@pytest.mark.parametrize("residue", [0, 1, 64, 448, 4032])
def test_a_load_is_read_in_place_wherever_its_source_lay(tmp_path: Path, bounced: list[int], residue: int) -> None:
    memory, backend = FarMemory(SwapConfig(tiers=("disk",), disk_path=str(tmp_path))), HostBackend()
    block = random_bytes(3 * MIB, seed=31)
    start = (residue - block.data_ptr()) % BLOCK_BYTES
    source = block[start : start + 2 * MIB + 77]
    target = round_trip(memory, backend, source, placed=True)
    assert target.data_ptr() % BLOCK_BYTES == residue
    assert torch.equal(target, source)
    assert bounced == []
    memory.close()


def test_any_other_place_is_served_through_a_buffer(tmp_path: Path, bounced: list[int]) -> None:
    memory, backend = FarMemory(SwapConfig(tiers=("disk",), disk_path=str(tmp_path))), HostBackend()
    if not SwapFile(tmp_path).is_direct:
        pytest.skip("this file system has no direct I/O, so every place is as good as any other")
    block = random_bytes(3 * MIB, seed=32)
    start = (1 - block.data_ptr()) % BLOCK_BYTES
    source = block[start : start + 2 * MIB]
    assert torch.equal(round_trip(memory, backend, source, placed=False), source)
    assert bounced == [2 * MIB - BLOCK_BYTES]
    memory.close()


def test_before_its_bytes_were_written_a_lease_has_no_wish(tmp_path: Path) -> None:
    memory, backend = FarMemory(SwapConfig(tiers=("disk",), disk_path=str(tmp_path))), HostBackend()
    lease = memory.reserve(backend, MIB)
    assert isinstance(lease, Lease)
    assert memory.allocate(backend, lease).shape == (MIB,)
    memory.release(lease, None)
    memory.close()


def test_the_storage_itself_begins_there() -> None:
    flat = HostBackend().allocate_at(5 * MIB + 3, residue_bytes=1088)
    assert (flat.storage_offset(), flat.untyped_storage().nbytes()) == (0, 5 * MIB + 3)
    assert flat.untyped_storage().data_ptr() % BLOCK_BYTES == 1088
    assert HostBackend().allocate_at(100, residue_bytes=64).shape == (100,)


def test_dropped_buffers_leave_the_process() -> None:
    process, backend = psutil.Process(), HostBackend()
    gc.collect()
    before = process.memory_info().rss
    buffers = [backend.allocate(8 * MIB).fill_(1) for _ in range(8)]
    assert process.memory_info().rss > before + 56 * MIB
    del buffers
    assert process.memory_info().rss < before + 8 * MIB


def test_a_default_device_and_a_mode_are_none_of_its_business() -> None:
    with torch.device("meta"), torch._subclasses.FakeTensorMode():
        flat = HostBackend().allocate(2 * MIB)
    assert (type(flat), flat.device.type) == (torch.Tensor, "cpu")


def test_a_host_without_room_says_so() -> None:
    with pytest.raises(MemoryError, match="the host refused 4611686018427387904 bytes"):
        aligned_memory(2**62)


def test_staging_buffers_read_what_any_other_wrote(make_tier, bounced: list[int]) -> None:
    tier, backend = make_tier(), TorchBackend()
    source = random_bytes(40 * MIB + 5, seed=33)
    lease = lend(tier, backend, len(source))
    write(tier, lease, source, backend).wait()
    for _ in range(3):
        target, completion = read(tier, lease, backend)
        completion.wait()
        assert torch.equal(target, source)
    assert set(lease.extent.phases.values()) == {0}
    assert bounced == []
    pool = tier._staging[type(backend), backend.name]
    pairs = [pool._pairs.get_nowait() for _ in range(tier._workers.num_workers)]
    assert {residue_of(backend.host_view(buffer.flat)) for pair in pairs for buffer in pair} == {0}
