"""``doctor``, started on two ranks by torch's launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from .launch import LIMIT_S

ROOT = Path(__file__).resolve().parents[3]


def test_the_first_rank_says_what_each_gets_while_all_copy(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    doctor = ["-m", "hyper_parallel.cli", "doctor", "--json", "--disk-path", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HYPER_PARALLEL_PLATFORM": "torch", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *launcher, *doctor],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    machine = json.loads(ended.stdout)["machine"]  # of one rank: two answers are no JSON
    assert machine["local_ranks"] == 2
    assert machine["shared_link"]["ranks"] == 2
    assert all(rate > 0 for rate in machine["shared_link"].values())
    assert list(tmp_path.iterdir()) == []
