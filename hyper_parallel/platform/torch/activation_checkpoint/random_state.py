"""The random state before one op, kept so that a replay can be put back in step."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.torch.activation_checkpoint.storages import tensors_in

__all__ = ["RandomState", "set_state"]

_CPU = torch.device("cpu")


class RandomState:
    """The states of the generators that an op may draw from."""

    __slots__ = ("_states",)

    def __init__(self, states: dict[torch.device, Any]) -> None:
        self._states = states  # a byte tensor on CPU, whatever the device module gives elsewhere

    @classmethod
    def now(cls, args: Any, kwargs: dict[str, Any], *, is_opaque: bool) -> RandomState:
        """The state of the device on which an op with these arguments draws.

        Torch's own ops draw where their first tensor is. An opaque one may draw wherever it has one, and on the host.
        """
        devices = [tensor.device for tensor in tensors_in([*args, *kwargs.values()] if is_opaque else args)]
        if not devices:  # a factory is told by keyword
            devices = [_indexed(torch.device(kwargs.get("device") or _CPU))]
        drawn = {*devices, _CPU} if is_opaque else {devices[0]}
        return cls({device: _state_of(device) for device in drawn if device.type != "meta"})

    def restore(self, displaced: dict[torch.device, Any]) -> None:
        """Put the generators back to it; what they were at goes to ``displaced``, once for each device."""
        for device, state in self._states.items():
            if device not in displaced:
                displaced[device] = _state_of(device)
            set_state(device, state)


def _indexed(device: torch.device) -> torch.device:
    """One generator has one name: ``cuda`` is the current device, by its number."""
    index: int | None = device.index
    if device.type in ("cpu", "meta") or index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _state_of(device: torch.device) -> Any:
    with torch._C._DisableTorchDispatch():
        return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_state(device: torch.device, state: Any) -> None:
    """Put the generator of a device to ``state``."""
    with torch._C._DisableTorchDispatch():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
