"""What a framework-neutral test cannot say in Platform members: making tensors, taking gradients, joining a world.

A test is written once against the Platform and an :class:`Adapter`. A new framework joins the suite by one subclass
here and one entry in ``ADAPTERS``.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from hyper_parallel.platform.platform import Platform

COLLECTIVE_TIMEOUT_S: Final = 20


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


ADAPTERS: Final[Mapping[str, type[Adapter]]] = {"torch": TorchAdapter}
_made: dict[str, Adapter] = {}


def adapter_named(name: str) -> Adapter:
    """The one adapter of that framework in this process."""
    if name not in ADAPTERS:
        raise ValueError(f"--platform: unknown platform {name!r}; known are {', '.join(ADAPTERS)}")
    if name not in _made:
        _made[name] = ADAPTERS[name]()
    return _made[name]
