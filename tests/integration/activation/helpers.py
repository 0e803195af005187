"""What several test files need: the same step with and without the engine, and whether anything is left of a graph."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import hyper_parallel as hp
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.record import Record

__all__ = [
    "collector_off",
    "count_of",
    "engines",
    "gradients",
    "live_records",
    "run_in_threads",
    "same_gradients",
    "step_gradients",
    "storage_ref",
]


def step_gradients(
    model: nn.Module, *inputs: Any, loss: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> list[Any]:
    """One step: the gradients of all parameters and inputs, and the output."""
    model.zero_grad()
    for value in inputs:
        value.grad = None
    out = model(*inputs)
    (out.pow(2).mean() if loss is None else loss(out)).backward()
    return [*gradients(model), *(value.grad for value in inputs if value.requires_grad), out.detach()]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same_gradients(one: list[Any], two: list[Any]) -> None:
    """Bitwise."""
    assert len(one) == len(two)
    for index, (left, right) in enumerate(zip(one, two)):
        if left is None or right is None:
            assert left is right, f"tensor {index}: only one of them exists"
            continue
        assert torch.equal(left, right), f"tensor {index} differs by {(left - right).abs().max().item()}"


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collector: what dies inside dies because nobody refers to it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def engines() -> list[Engine]:
    return list(hp.SwapManager()._engines.values())


def live_records() -> list[weakref.ref[Record]]:
    return [weakref.ref(record) for engine in engines() for record in engine.live_records()]


def storage_ref(tensor: torch.Tensor) -> StorageWeakRef:
    """``expired()`` says whether the bytes are gone."""
    return StorageWeakRef(tensor.untyped_storage())


def count_of(events: list[tuple[str, int]], what: str, nbytes: int | None = None) -> int:
    """How often the schedule did something."""
    return sum(1 for name, size in events if name == what and (nbytes is None or size == nbytes))


def run_in_threads(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own, all at once; raises the first error."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
