"""What host memory a process may use, read from trees of files as kernels and containers lay them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.core.activation_checkpoint.far.process_memory import (
    available_memory_bytes,
    default_host_limit_bytes,
)

GIB = 2**30
UNLIMITED_V1 = "9223372036854771712"


@pytest.fixture
def machine(tmp_path: Path):
    def put(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    put("proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 5 kB\nMemAvailable: {48 * GIB // 1024} kB\n")
    return tmp_path, put


def version_2(put, path: str) -> None:
    put("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n")
    put("proc/self/cgroup", f"0::{path}\n")


def version_1(put, path: str) -> None:
    put(
        "proc/self/mountinfo",
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    )
    put("proc/self/cgroup", f"4:memory:{path}\n1:cpu:/elsewhere\n")


def test_without_groups_it_is_what_the_machine_has_available(machine) -> None:
    root, _ = machine
    assert available_memory_bytes(root=root) == 48 * GIB


def test_version_2_walks_up_to_the_smallest_limit(machine) -> None:
    root, put = machine
    version_2(put, "/pod/container")
    put("sys/fs/cgroup/pod/container/memory.max", "max\n")
    put("sys/fs/cgroup/pod/memory.max", f"{16 * GIB}\n")
    assert available_memory_bytes(root=root) == 16 * GIB
    put("sys/fs/cgroup/pod/container/memory.high", f"{8 * GIB}\n")
    assert available_memory_bytes(root=root) == 8 * GIB


def test_what_the_group_uses_is_gone_but_its_page_cache_is_not(machine) -> None:
    root, put = machine
    version_2(put, "/job")
    put("sys/fs/cgroup/job/memory.max", f"{16 * GIB}\n")
    put("sys/fs/cgroup/job/memory.current", f"{10 * GIB}\n")
    put("sys/fs/cgroup/job/memory.stat", f"anon {6 * GIB}\ninactive_file {3 * GIB}\nactive_file {GIB}\n")
    assert available_memory_bytes(root=root) == 10 * GIB


def test_version_1_walks_up_and_knows_its_word_for_unlimited(machine) -> None:
    root, put = machine
    version_1(put, "/docker/abc")
    put("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", UNLIMITED_V1)
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED_V1)
    assert available_memory_bytes(root=root) == 48 * GIB
    put("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", str(4 * GIB))
    assert available_memory_bytes(root=root) == 4 * GIB
    put("sys/fs/cgroup/memory/docker/memory.usage_in_bytes", str(5 * GIB))
    assert available_memory_bytes(root=root) == 0


def test_inside_a_container_the_mount_point_holds_the_limit(machine) -> None:
    root, put = machine
    version_1(put, "/kubepods/pod1/only-visible-outside")
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", str(2 * GIB))
    assert available_memory_bytes(root=root) == 2 * GIB


def test_another_controllers_path_is_not_the_memory_path(machine) -> None:
    root, put = machine
    version_1(put, "/mine")
    put("sys/fs/cgroup/memory/elsewhere/memory.limit_in_bytes", str(GIB))
    assert available_memory_bytes(root=root) == 48 * GIB


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_the_default_is_half_shared_by_the_processes_of_this_machine(
    machine, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], share: int
) -> None:
    root, _ = machine
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert default_host_limit_bytes(root=root) == 24 * GIB // share
    assert default_host_limit_bytes(3, root=root) == 8 * GIB


def test_this_machine_answers_something_plausible() -> None:
    assert 2**26 < available_memory_bytes() < 2**50
