"""Every scenario of the CPU suite, under every kind of wrapper, with real streams and late copies."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# On the search path since conftest.py.
from activation import scenario as scenario_module
from activation import scenarios, scenarios_models, scenarios_values
from activation.kinds import KINDS, Kind
from activation.scenario import MAY_REFUSE, SCENARIOS, assert_same, run

import hyper_parallel as hp
from hyper_parallel.errors import InPlaceChangeError

pytestmark = pytest.mark.gpu

_MODULES = (scenario_module, scenarios, scenarios_models, scenarios_values)


@contextlib.contextmanager
def _everything_on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Factories make device tensors: in this thread, and inside every module on whatever thread replays it."""
    cpu_batch = scenario_module.batch
    call = torch.nn.Module.__call__

    @functools.wraps(cpu_batch)
    def device_batch(*args: Any, grad: bool = True, **kwargs: Any) -> torch.Tensor:
        with torch.device("cpu"):
            made = cpu_batch(*args, grad=False, **kwargs)
        return made.to("cuda").requires_grad_(grad)

    def call_on_the_device(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.device("cuda"):
            return call(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        for module in _MODULES:
            patch.setattr(module, "batch", device_batch)
        patch.setattr(torch.nn.Module, "__call__", call_on_the_device)
        with torch.device("cuda"):
            yield


@pytest.fixture(autouse=True, scope="module")
def oracle_of_this_device() -> Iterator[None]:
    """The oracle's memory is of one device: the CPU suite may run in the same process."""
    scenario_module.oracle.cache_clear()
    yield
    scenario_module.oracle.cache_clear()


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_bitwise(name: str, kind: Kind, monkeypatch: pytest.MonkeyPatch, compute_lags: None) -> None:
    with _everything_on_the_device(monkeypatch):
        with hp.configure(min_bytes=0, tail_bytes=0, window_bytes=300, prefetch_bytes=600):
            try:
                results = run(name, kind)
            except InPlaceChangeError:
                if name in MAY_REFUSE and kind.files_outputs:
                    return
                raise
        torch.cuda.synchronize()
        assert any(tensor is not None and tensor.is_cuda for tensor in results.values()), "ran on the CPU"
        assert_same(name, kind, results)
