"""Files that we make while we work are their owner's alone, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.core.activation_checkpoint.far import disk_file
from hyper_parallel.core.activation_checkpoint.far.disk_file import SwapFile
from hyper_parallel.platform.base.weight_files import replacing

_LIMIT_S = 600


@pytest.fixture
def _open_mask() -> Any:
    """A careless user's: every new file is readable and writable by everybody, unless its maker says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def _mode(fd: int) -> int:
    return stat.S_IMODE(os.fstat(fd).st_mode)


@pytest.mark.usefixtures("_open_mask")
def test_a_swap_file_is_private_and_nameless(tmp_path: Path) -> None:
    file = SwapFile(tmp_path)
    try:
        assert _mode(file._fd) == 0o600
        assert os.listdir(tmp_path) == []
    finally:
        file.close()


@pytest.mark.usefixtures("_open_mask")
def test_a_swap_file_is_private_where_it_must_have_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_nameless_files(self: SwapFile) -> tuple[int, str]:
        return self._open_named(os.O_RDWR | os.O_CLOEXEC)

    def no_unlink(path: str) -> None:
        raise PermissionError(1, "this file system keeps names")

    monkeypatch.setattr(SwapFile, "_open", no_nameless_files)
    with monkeypatch.context() as patch:
        patch.setattr(disk_file.os, "unlink", no_unlink)
        file = SwapFile(tmp_path)
    try:
        assert _mode(file._fd) == 0o600
        (name,) = os.listdir(tmp_path)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    finally:
        file.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("_open_mask")
def test_a_weight_file_is_private_until_it_is_whole(tmp_path: Path) -> None:
    with replacing(tmp_path / "w") as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        temporary.write_bytes(b"whole")
    assert os.listdir(tmp_path) == ["w"]


KILLED = """
    import os, signal, sys
    import torch
    import hyper_parallel as hp
    hp.configure(tiers=("disk",), disk_path=sys.argv[1], min_bytes=0, tail_bytes=0, window_bytes=0)
    x = torch.randn(512, 512, requires_grad=True)
    loss = hp.swap(lambda x: x.sin().cos().sin(), x).sum()
    assert hp.stats().swapped_out_bytes > 0
    assert any(os.path.realpath(f"/proc/self/fd/{fd}").startswith(sys.argv[1]) for fd in os.listdir("/proc/self/fd"))
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGABRT"])
def test_nothing_is_left_of_a_process_that_was_killed(tmp_path: Path, name: str) -> None:
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": "torch", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == -getattr(signal, name), done.stderr
    assert os.listdir(tmp_path) == []
