"""What a framework-neutral test cannot say in Platform members: making tensors, taking gradients, joining a world.

A test is written once against the Platform and an :class:`Adapter`. A new framework joins the suite by one subclass
here and one entry in ``ADAPTERS``.
"""

from __future__ import annotations

import abc
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from hyper_parallel.platform.platform import Platform

COLLECTIVE_TIMEOUT_S: Final = 200


class Adapter(abc.ABC):
    """One framework, as the tests need it."""

    name: ClassVar[str]
    can_rejoin: ClassVar[bool]
    """Whether a process may leave the world and join another one."""
    gradient_dtype: ClassVar[str]
    """The widest dtype in which the framework's collectives run; gradients are compared in it."""
    tolerance: ClassVar[float]

    @property
    @abc.abstractmethod
    def platform(self) -> Platform:
        """The platform under test; not cached as the platform of the process."""

    @abc.abstractmethod
    def tensor(self, array: Any, dtype: str | None = None, requires_grad: bool = False) -> Any:
        """A tensor with its own memory; the dtype is the array's unless named."""

    @abc.abstractmethod
    def numpy(self, tensor: Any) -> np.ndarray:
        """The values of a tensor."""

    @abc.abstractmethod
    def value_and_gradients(self, function: Callable[..., Any], *arrays: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        """The value of a scalar function of tensors, and its gradient for each of them, as numpy arrays.

        Arrays of floating dtype become tensors of their dtype. A gradient that does not exist is zeros.
        """

    def gradients(self, function: Callable[..., Any], *arrays: Any) -> list[np.ndarray]:
        """The gradients alone."""
        return self.value_and_gradients(function, *arrays)[1]

    @abc.abstractmethod
    def join(self, rank: int, size: int, meeting_place: Path) -> None:
        """Join a world on this machine; ``meeting_place`` is a path that all its ranks share and nobody else uses."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Leave the world and drop all groups."""


class TorchAdapter(Adapter):
    """torch on the CPU, over gloo."""

    name = "torch"
    can_rejoin = True
    gradient_dtype = "float64"
    tolerance = 1e-12

    def __init__(self) -> None:
        import torch

        from hyper_parallel.platform.torch.platform import TorchPlatform

        self._torch = torch
        self._platform = TorchPlatform()

    @property
    def platform(self) -> Platform:
        return self._platform

    def tensor(self, array: Any, dtype: str | None = None, requires_grad: bool = False) -> Any:
        made = self._torch.tensor(np.asarray(array), dtype=None if dtype is None else getattr(self._torch, dtype))
        return made.requires_grad_() if requires_grad else made

    def numpy(self, tensor: Any) -> np.ndarray:
        detached = tensor.detach().cpu()
        is_bfloat16 = detached.dtype == self._torch.bfloat16
        return np.array((detached.float() if is_bfloat16 else detached).numpy(), copy=True)

    def value_and_gradients(self, function: Callable[..., Any], *arrays: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        tensors = [self.tensor(array) for array in arrays]
        wanted = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]
        value = function(*tensors)
        grads = self._torch.autograd.grad(value, wanted, allow_unused=True)
        found = [np.zeros(tuple(t.shape)) if g is None else self.numpy(g) for t, g in zip(wanted, grads)]
        return self.numpy(value), found

    def join(self, rank: int, size: int, meeting_place: Path) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._torch.set_num_threads(1)
        store = self._torch.distributed.FileStore(str(meeting_place), size)
        self._platform.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        )

    def leave(self) -> None:
        self._platform.destroy_process_group()


class MindSporeAdapter(Adapter):
    """MindSpore on the CPU, eager, over mccl."""

    name = "mindspore"
    can_rejoin = False
    gradient_dtype = "float64"
    tolerance = 1e-12

    def __init__(self) -> None:
        import mindspore

        from hyper_parallel.platform.mindspore.platform import MindSporePlatform

        # The asynchronous pipeline is slower on few cores, and reports an error at some later op.
        mindspore.runtime.launch_blocking()
        self._mindspore = mindspore
        self._platform = MindSporePlatform()

    @property
    def platform(self) -> Platform:
        return self._platform

    def tensor(self, array: Any, dtype: str | None = None, requires_grad: bool = False) -> Any:
        kind = None if dtype is None else getattr(self._mindspore, "bool_" if dtype == "bool" else dtype)
        made = self._mindspore.Tensor(np.array(array, copy=True))
        made = made if kind is None or made.dtype == kind else made.to(kind)
        if requires_grad:
            made.requires_grad_()
        return made

    def numpy(self, tensor: Any) -> np.ndarray:
        is_bfloat16 = tensor.dtype == self._mindspore.bfloat16
        with self._mindspore._no_grad():
            return np.array((tensor.to(self._mindspore.float32) if is_bfloat16 else tensor).asnumpy(), copy=True)

    def value_and_gradients(self, function: Callable[..., Any], *arrays: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        tensors = [self.tensor(array) for array in arrays]
        wanted = tuple(place for place, tensor in enumerate(tensors) if tensor.is_floating_point())
        try:
            value, grads = self._mindspore.value_and_grad(function, wanted)(*tensors)
        except Exception:
            from hyper_parallel.platform.mindspore.compat import end_failed_gradient

            end_failed_gradient()
            raise
        grads = grads if isinstance(grads, tuple) else (grads,)
        return self.numpy(value), [self.numpy(grad) for grad in grads]

    def join(self, rank: int, size: int, meeting_place: Path) -> None:
        import mindspore.mint.distributed as dist

        limit = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        store = dist.TCPStore("127.0.0.1", _shared_port(meeting_place, rank), size, rank == 0, limit)
        self._platform.init_process_group(store=store, rank=rank, world_size=size, timeout=limit)

    def leave(self) -> None:
        self._platform.destroy_process_group()


def _shared_port(meeting_place: Path, rank: int) -> int:
    """A port of this machine that rank 0 finds free and tells the others through the meeting place."""
    note = meeting_place.with_suffix(".port")
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        note.with_suffix(".part").write_text(str(port))
        note.with_suffix(".part").rename(note)
        return port
    deadline = time.monotonic() + COLLECTIVE_TIMEOUT_S
    while not note.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank}: rank 0 has not written {note}")
        time.sleep(0.01)
    return int(note.read_text())


ADAPTERS: Final[Mapping[str, type[Adapter]]] = {"torch": TorchAdapter, "mindspore": MindSporeAdapter}
_made: dict[str, Adapter] = {}


def adapter_named(name: str) -> Adapter:
    """The one adapter of that framework in this process."""
    if name not in ADAPTERS:
        raise ValueError(f"--platform: unknown platform {name!r}; known are {', '.join(ADAPTERS)}")
    if name not in _made:
        _made[name] = ADAPTERS[name]()
    return _made[name]
