"""One thread, the torch platform, and an empty engine for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hyper_parallel import SwapManager
from hyper_parallel.platform.platform import get_torch_platform


@pytest.fixture(autouse=True)
def fresh_engine() -> Iterator[None]:
    """Bitwise comparisons need one thread: the order of a parallel sum is not fixed."""
    get_torch_platform()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    SwapManager().reset()
    yield
    SwapManager().reset()
    torch.set_num_threads(threads)
