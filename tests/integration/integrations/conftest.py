"""One thread, the torch platform, quiet trainers, and an empty engine for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers.utils import logging

from hyper_parallel import SwapManager
from hyper_parallel.platform.platform import get_torch_platform


@pytest.fixture(autouse=True)
def fresh_engine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Bitwise comparisons need one thread: the order of a parallel sum is not fixed. No plan outlives its test."""
    monkeypatch.setenv("HYPER_PARALLEL_PLAN_STORE", str(tmp_path_factory.mktemp("plans")))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "WANDB_DISABLED", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")
    get_torch_platform()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    SwapManager().reset()
    yield
    SwapManager().reset()
    torch.set_num_threads(threads)
