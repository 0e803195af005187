"""Weights in parts: saved by rows, loaded by columns, and on half of the ranks. The same file on torch and on MindSpore.

    torchrun --nproc-per-node 4 -m examples.sharded_checkpoint
    msrun --worker_num 4 --local_worker_num 4 examples/sharded_checkpoint.py

Every rank writes what it holds into a file of its own. Who loads reads one file after the other and keeps what its own layout
wants, so that no rank ever holds the whole.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.platform import ParameterLayout, get_platform

ROWS, COLUMNS = 16, 8
WHOLE = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
platform = get_platform()


def parameter_with(layout: ParameterLayout) -> Any:
    zeros = platform.new_zero_parameter((ROWS, COLUMNS), platform.str_to_dtype("float32"), True, platform.device())
    return platform.set_layout_into_parameter(zeros, layout)


def shared_folder() -> Path:
    folders = [None] * platform.get_world_size()
    platform.all_gather_object(folders, tempfile.mkdtemp() if platform.get_rank() == 0 else None)
    return Path(folders[0])


def loaded(folder: Path, number: int) -> Any:
    return platform.load_checkpoint(folder / f"part-{number}.safetensors")["weight"]


platform.init_process_group()
rank, size = platform.get_rank(), platform.get_world_size()
folder = shared_folder()

weight = parameter_with(ParameterLayout(mesh={"tp": size}, dims=("tp", None)))
platform.load_into_param(weight, platform.tensor(WHOLE))
part = platform.get_param_local_data(weight)
assert tuple(part.shape) == (ROWS // size, COLUMNS)
platform.save_checkpoint({"weight": part}, folder / f"part-{rank}.safetensors")
platform.barrier()

by_columns = parameter_with(ParameterLayout(mesh={"tp": size}, dims=(None, "tp")))
pieces = [platform.chunk(loaded(folder, number), 1, COLUMNS // size, rank) for number in range(size)]
platform.update_param_data(by_columns, platform.cat(pieces, 0))
found = platform.tensor_to_numpy(platform.get_param_local_data(by_columns))
assert np.array_equal(found, np.split(WHOLE, size, 1)[rank])

few = tuple(range(size // 2))
if rank in few:
    on_few = parameter_with(ParameterLayout(mesh={"tp": len(few)}, dims=("tp", None), ranks=few))
    platform.update_param_data(on_few, platform.cat([loaded(folder, 2 * rank), loaded(folder, 2 * rank + 1)], 0))
    found = platform.tensor_to_numpy(platform.get_param_local_data(on_few))
    assert np.array_equal(found, np.split(WHOLE, len(few))[rank])

platform.barrier()
if rank == 0:
    shutil.rmtree(folder)
print(f"rank {rank} of {size}: wrote {part.shape[0]} rows, read {COLUMNS // size} columns of all rows", flush=True)
platform.destroy_process_group()
