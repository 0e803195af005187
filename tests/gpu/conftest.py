"""A CUDA device or a failure that says so; deterministic kernels; copy streams that are late on purpose.

Theory of operation
-------------------
A missing order between streams shows only when the device is in the wrong moment. So the host is made to run ahead of
compute (a sleep kernel before the test), and every copy waits a random while on its own stream (a sleep kernel before
it). Fresh memory is filled with NaN by torch's deterministic mode. What is read too early is then wrong, not lucky.
"""

from __future__ import annotations

import os

# Before CUDA starts: cuBLAS is deterministic with fixed workspaces only.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.backends.torch.devices import AcceleratorBackend
from hyper_parallel.platform.platform import get_torch_platform

# The scenarios of the CPU suite run here unchanged.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

HERE = Path(__file__).parent
COMPUTE_LAG_CYCLES = 4_000_000  # about two milliseconds
COPY_LAGS_CYCLES = (0, 0, 30_000, 400_000)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only ``-m gpu`` (or any expression that names gpu) runs these tests."""
    if "gpu" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if item.path.is_relative_to(HERE)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.path.is_relative_to(HERE)]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """A machine without the device is a failed run, not a skipped one."""
    if pyfuncitem.path.is_relative_to(HERE) and not torch.cuda.is_available():
        pytest.fail(
            f"{pyfuncitem.name} needs a CUDA device: torch {torch.__version__} says that none is available here. "
            "Run `make test-gpu` on a machine with an NVIDIA GPU and a CUDA build of torch.",
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def fresh_engine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Deterministic kernels, an empty engine, small settings; nothing left on the device afterwards, and no plan."""
    monkeypatch.setenv("HYPER_PARALLEL_PLAN_STORE", str(tmp_path_factory.mktemp("plans")))
    get_torch_platform()
    hp.configure(None)
    hp.SwapManager().reset()
    settings = hp.SwapConfig(min_bytes=0, tail_bytes=0, window_bytes=2048, prefetch_bytes=2048)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    with hp.configure(settings):
        yield
    torch.use_deterministic_algorithms(was_deterministic)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    hp.configure(None)
    hp.SwapManager().reset()


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Every copy waits a while on its own stream, by a seed that is the test's name."""
    if not torch.cuda.is_available():
        return
    lags = random.Random(request.node.name)
    copy_all = AcceleratorBackend.copy_all

    def late_copies(self: AcceleratorBackend, copies: Any, stream: Any) -> None:
        for copy in copies:
            cycles = lags.choice(COPY_LAGS_CYCLES)
            if cycles:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(cycles)
            copy_all(self, [copy], stream)

    monkeypatch.setattr(AcceleratorBackend, "copy_all", late_copies)


@pytest.fixture
def compute_lags() -> None:
    """The host runs ahead: what it queues now runs milliseconds later."""
    if torch.cuda.is_available():
        torch.cuda._sleep(COMPUTE_LAG_CYCLES)
