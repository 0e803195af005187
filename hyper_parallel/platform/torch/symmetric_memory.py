"""Memory that every rank of a group can address, where the device has it."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.errors import UnsupportedMemberError
from hyper_parallel.platform.torch.compat import symmetric_memory, symmetric_memory_backend
from hyper_parallel.platform.torch.device import accelerator_type

__all__ = ["SymmetricMemoryHandler"]


def _why_unavailable() -> str | None:
    device = accelerator_type()
    if device is None:
        return "this process has no accelerator, and host memory is not symmetric memory"
    if symmetric_memory() is None:
        return "this build of torch has no symmetric memory"
    if symmetric_memory_backend(device) is None:
        return f"torch has no symmetric-memory backend for {device}"
    return None


class SymmetricMemoryHandler:
    """torch's symmetric memory behind two calls: allocate, then meet the other ranks of the group."""

    def __init__(self) -> None:
        self.reason = _why_unavailable()
        """Why there is none, or None when there is."""

    def is_available(self) -> bool:
        """Whether the other calls work here."""
        return self.reason is None

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        """A tensor that :meth:`rendezvous` can open to the other ranks."""
        target = torch.device(accelerator_type() or "cpu") if device is None else torch.device(device)
        result: torch.Tensor = self._memory("empty").empty(*size, dtype=dtype, device=target)
        return result

    def rendezvous(self, tensor: torch.Tensor, group: Any = None) -> Any:
        """Open ``tensor`` to the ranks of ``group`` (None: the world); every one of them must call."""
        memory = self._memory("rendezvous")
        return memory.rendezvous(tensor, torch.distributed.group.WORLD if group is None else group)

    def _memory(self, call: str) -> Any:
        if self.reason is not None:
            raise UnsupportedMemberError(
                member=f"get_symmetric_memory_handler().{call}",
                platform="TorchPlatform",
                reason=self.reason,
                instead="ask is_available() first, and use the collectives (all_gather_into_tensor ...) without it",
            )
        return symmetric_memory()
