"""The private file: any alignment, no name, nothing left behind, bad directories named."""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from hyper_parallel.core.activation_checkpoint.far import disk_file
from hyper_parallel.core.activation_checkpoint.far.disk_file import SwapFile
from hyper_parallel.errors import DiskTierError

from .backend import LIMIT_S, TorchBackend, random_bytes
from .tier_calls import lend

MIB = 2**20


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
