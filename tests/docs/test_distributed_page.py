"""The page about distributed training is one script: two processes run it, as its reader does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .blocks import ROOT, blocks_of

PAGE = "docs/distributed.md"
END = """
gradients = [parameter.grad for parameter in stage.submod.parameters()]
assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
print(f"rank {dist.get_rank()} is done\\n", end="", flush=True)  # one write: both ranks have one output
dist.destroy_process_group()
# Without the end of the interpreter, where threads of torch now and then abort a process after a second DDP step.
import os
os._exit(0)
"""


def test_the_page_runs_on_two_processes() -> None:
    blocks = [block for block in blocks_of(PAGE, (ROOT / PAGE).read_text()) if block.needs.startswith("two processes")]
    assert len(blocks) == 4
    Path("train.py").write_text("\n".join(block.text for block in blocks) + END)
    environment = os.environ | {"HYPER_PARALLEL_PLATFORM": "torch", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 is done", "rank 1 is done"]
