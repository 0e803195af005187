"""One thread, the torch platform, an empty engine and an empty compiler for every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from hyper_parallel import SwapManager
from hyper_parallel.backends.torch import graph_regions
from hyper_parallel.platform.platform import get_torch_platform

# What torch's own compiler warns of while it traces and generates code is not ours; all else stays an error.
_COMPILER_WARNINGS = (
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:.torch.jit:DeprecationWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for warning in _COMPILER_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    get_torch_platform()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    counters.clear()
    SwapManager().reset()
    graph_regions._SAID.clear()  # the warning that is given once
    yield
    SwapManager().reset()
    torch.compiler.reset()
    torch.set_num_threads(threads)
