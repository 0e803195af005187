"""What moved, or may move, between the torch releases we support (2.8 to 2.13). Tiny functions, no policy.

Whatever reaches below torch's public interface is here and nowhere else, so that a new release is one file's work.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DTensor", "set_local_tensor", "symmetric_memory", "symmetric_memory_backend"]

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor
else:  # pragma: no cover - a build without distributed has no sharded tensor to meet

    class DTensor(torch.Tensor):  # type: ignore[no-redef]
        """Stands in for the sharded tensor; nothing is an instance of it."""


def set_local_tensor(sharded: DTensor, local: torch.Tensor) -> None:
    """Let a DTensor use ``local`` as this rank's part; assigning to ``.data`` silently keeps the old part."""
    sharded._local_tensor = local


def symmetric_memory() -> Any:
    """torch's symmetric-memory module, or None where the build has none."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory


def symmetric_memory_backend(device_type: str) -> str | None:
    """The name of the symmetric-memory backend of a device; torch 2.8 cannot be asked, and has CUDA's alone."""
    memory = symmetric_memory()
    if memory is None:
        return None
    if not hasattr(memory, "get_backend"):
        return "CUDA" if device_type == "cuda" else None
    backend: str | None = memory.get_backend(device_type)
    return backend
