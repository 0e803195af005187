"""The random state before one op, kept so that a replay can be put back in step."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["RandomState"]


class RandomState:
    """The state of the generator that an op draws from."""

    __slots__ = ("_device", "_state")

    def __init__(self, device: torch.device, state: Any) -> None:
        self._device = device
        self._state = state  # a byte tensor on CPU, whatever the device module gives elsewhere

    @classmethod
    def now(cls, args: Any) -> RandomState:
        """The state of the device on which an op with these arguments draws."""
        device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))
        with torch._C._DisableTorchDispatch():
            if device.type == "cpu":
                return cls(device, torch.get_rng_state())
            return cls(device, torch.get_device_module(device).get_rng_state(device))

    def restore(self) -> None:
        """Put the generator back to it."""
        with torch._C._DisableTorchDispatch():
            if self._device.type == "cpu":
                torch.set_rng_state(self._state)
            else:
                torch.get_device_module(self._device).set_rng_state(self._state, self._device)
