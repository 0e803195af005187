"""This process and its neighbours: which host it runs on, how many of one job share that host, and which of them still run."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Process", "launched_local_processes", "start_ticks"]

# What launchers call the number of processes of this job on this machine.
_LOCAL_PROCESS_VARIABLES: Final = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)
_ENDED: Final = ("Z", "X")  # states of a process that has ended and was not waited for yet


class Process(NamedTuple):
    """One process, as others can name it and ask after it."""

    host: str  # equal for processes that share a machine's memory
    host_name: str  # for people
    pid_space: str  # equal for processes that see one another's numbers
    pid: int
    start_ticks: int  # tells it from a later process with the same number

    @classmethod
    def current(cls) -> Process:
        """The one that asks."""
        name, pid = socket.gethostname(), os.getpid()
        # Containers of one machine have names of their own and share its memory; they have its boot in common.
        boot = _read("/proc/sys/kernel/random/boot_id").strip()
        try:
            pid_space = os.readlink("/proc/self/ns/pid")
        except OSError:
            pid_space = name
        return cls(boot or name, name, f"{boot or name} {pid_space}", pid, start_ticks(pid))

    def has_ended(self, seen_from: Process) -> bool:
        """Whether it is known to have ended. False where ``seen_from`` cannot see it."""
        if self.pid_space != seen_from.pid_space or not self.start_ticks:
            return False
        return start_ticks(self.pid) != self.start_ticks


def launched_local_processes(environment: Mapping[str, str] | None = None) -> int | None:
    """How many processes the launcher started on this host for this job; None where it does not say."""
    environment = os.environ if environment is None else environment
    for name in _LOCAL_PROCESS_VARIABLES:
        text = environment.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return None


def start_ticks(pid: int) -> int:
    """When a process started, in ticks since boot; 0 for one that has ended."""
    try:
        # The name in parentheses may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in _ENDED else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
