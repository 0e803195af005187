"""Launching N real processes, running many checks in them, and giving each check its own verdict.

One job is one world: N processes, one list of checks. After every check each rank writes a verdict file and waits for
the others', so a failure stops the job at once and is never mistaken for the next check's. The checks that were left
are run in a new job. Every process carries a hard limit after which it prints its stacks and ends; the parent kills
what is still alive and shows all output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest

JOB_LIMIT_S: Final = 600
GRACE_S: Final = 60


class RankedJobs:
    """The verdicts of this session, by platform, world size and check."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self._verdicts: dict[tuple[str, int, str], str] = {}

    def require(self, platform_name: str, size: int, check: str) -> None:
        """Fail the calling test unless the check passed on every rank."""
        key = (platform_name, size, check)
        if key not in self._verdicts:
            self._run_all(platform_name, size)
        if key not in self._verdicts:
            pytest.fail(f"{check} was not collected as a check for {size} ranks on {platform_name}")
        if self._verdicts[key]:
            pytest.fail(self._verdicts[key], pytrace=False)

    def _run_all(self, platform_name: str, size: int) -> None:
        from .marks import check_id

        left = []
        for item in self._items:
            check = getattr(getattr(item, "function", None), "check", None)
            params = getattr(getattr(item, "callspec", None), "params", {})
            if check is not None and (params["platform_name"], params["ranks"]) == (platform_name, size):
                left.append(check_id(check))
        while left:
            verdicts = run_job(platform_name, size, left)
            for check, verdict in verdicts.items():
                self._verdicts[platform_name, size, check] = verdict
            left = left[len(verdicts) :]


def run_job(platform_name: str, size: int, checks: list[str]) -> dict[str, str]:
    """Run checks in one world until the first failure; check to "" or to what went wrong, in order, never empty."""
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_ranks_") as folder:
        place = Path(folder)
        (place / "job.json").write_text(json.dumps({"platform": platform_name, "size": size, "checks": checks}))
        is_late = _run_processes(place)
        return _read_verdicts(place, size, checks, is_late=is_late)


def _run_processes(place: Path) -> bool:
    """Run the job to its end, or kill all of it; whether it had to be killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", f"{__package__}.worker", str(place), str(JOB_LIMIT_S)]
    with (place / "output-launcher").open("wb") as output:
        launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        launcher.wait(JOB_LIMIT_S + GRACE_S)
    except subprocess.TimeoutExpired:
        return True
    finally:
        # Ranks whose launcher has ended end by themselves; a launcher that lives is killed with all its ranks.
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    return False


def _read_verdicts(place: Path, size: int, checks: list[str], *, is_late: bool) -> dict[str, str]:
    verdicts: dict[str, str] = {}
    for index, check in enumerate(checks):
        files = [place / f"verdict-{index}-{rank}" for rank in range(size)]
        troubles = []
        for rank, file in enumerate(files):
            text = file.read_text() if file.exists() else "no verdict: this rank did not finish the check"
            if text:
                troubles.append(f"---- rank {rank} of {size}: {text}")
        if not troubles:
            verdicts[check] = ""
            continue
        outputs = [f"---- {file.name}\n{file.read_text()[-4000:]}" for file in sorted(place.glob("output-*"))]
        late = [f"the processes were killed after {JOB_LIMIT_S + GRACE_S} s"] if is_late else []
        verdicts[check] = "\n".join([check, *late, *troubles, *outputs])
        break
    return verdicts
