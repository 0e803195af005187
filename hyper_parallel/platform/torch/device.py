"""Which device this process computes on: whatever accelerator torch finds, the CPU otherwise.

Nothing is hard-wired to one vendor: ``torch.accelerator`` names the device, and ``torch.<device>`` serves it.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.errors import UnsupportedMemberError

__all__ = ["TorchDeviceMembers", "accelerator_type"]


def accelerator_type() -> str | None:
    """The type of the accelerator that is there and usable, or None."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


class TorchDeviceMembers:
    """The members beside the base that speak of the device."""

    @staticmethod
    def device_type() -> str:
        """``"cuda"``, ``"npu"``, ``"xpu"`` ..., or ``"cpu"``."""
        return accelerator_type() or "cpu"

    @staticmethod
    def device(index: int | None = None) -> torch.device:
        """A device of this process's type; without an index, the current one."""
        kind = accelerator_type()
        if kind is None:
            if index not in (None, 0):
                raise ValueError(f"device: cannot name cpu device {index}; because there is one; leave the index out")
            return torch.device("cpu")
        count = torch.accelerator.device_count()
        if index is None:
            index = torch.accelerator.current_device_index()
        if not 0 <= index < count:
            raise ValueError(
                f"device: cannot name {kind} device {index}; because there are {count}; "
                f"give an index between 0 and {count - 1}"
            )
        return torch.device(kind, index)

    @staticmethod
    def device_count() -> int:
        """How many devices of this process's type there are; the CPU is one."""
        return torch.accelerator.device_count() if accelerator_type() is not None else 1

    @staticmethod
    def get_device_handle() -> Any:
        """torch's module for the device: ``torch.cuda``, ``torch.npu``, ``torch.cpu`` ..."""
        kind = accelerator_type() or "cpu"
        handle = getattr(torch, kind, None)
        if handle is None:
            raise UnsupportedMemberError(
                member="get_device_handle",
                platform="TorchPlatform",
                reason=f"torch has no module named torch.{kind}",
                instead="import the package that registers this device before the first call",
            )
        return handle

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Seed the generators of the CPU and of every device."""
        torch.manual_seed(seed)

    @staticmethod
    def get_rng_state() -> torch.Tensor:
        """The random state of the current device, for :meth:`set_rng_state`."""
        if accelerator_type() is None:
            return torch.get_rng_state()
        state: torch.Tensor = TorchDeviceMembers.get_device_handle().get_rng_state()
        return state

    @staticmethod
    def set_rng_state(state: torch.Tensor) -> None:
        """Put the current device's random state back."""
        if accelerator_type() is None:
            torch.set_rng_state(state)
        else:
            TorchDeviceMembers.get_device_handle().set_rng_state(state)
