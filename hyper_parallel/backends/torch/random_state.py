"""The random state before one op, kept so that a replay draws the same numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hyper_parallel.backends.torch.storages import tensors_in
from hyper_parallel.core.activation_checkpoint.region import Displaced

__all__ = ["RandomState", "Source"]

Source = torch.device | torch.Generator

_CPU = torch.device("cpu")


class RandomState:
    """The states of the generators that an op may draw from: a device's own, by its device, or one of the user's."""

    __slots__ = ("_states",)

    def __init__(self, states: dict[Source, Any]) -> None:
        self._states = states  # a byte tensor on CPU, whatever the device module gives elsewhere

    @classmethod
    def now(cls, args: Any, kwargs: dict[str, Any], *, is_opaque: bool) -> RandomState:
        """The state of the generator from which an op with these arguments draws.

        Torch's own ops draw where their first tensor is. An opaque one may draw wherever it has one, and on the host.
        """
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        if given and not is_opaque:
            return cls({generator: _state_of(generator) for generator in given})
        devices = [tensor.device for tensor in tensors_in([*args, *kwargs.values()] if is_opaque else args)]
        if not devices:  # a factory is told by keyword
            devices = [_indexed(torch.device(kwargs.get("device") or _CPU))]
        drawn = {*devices, _CPU} if is_opaque else {devices[0]}
        sources: list[Source] = [*given, *(device for device in drawn if device.type != "meta")]
        return cls({source: _state_of(source) for source in sources})

    @classmethod
    def of_devices(cls) -> RandomState:
        """The states of the generators of the host and of the current accelerator."""
        devices = [_CPU]
        if torch.accelerator.is_available():
            devices.append(_indexed(torch.device(torch.accelerator.current_accelerator() or _CPU)))
        return cls({device: _state_of(device) for device in devices})

    def restore(self, displaced: Displaced) -> None:
        """Put the generators back to it; how to undo that goes to ``displaced``, once for each of them."""
        for source, state in self._states.items():
            if source not in displaced:
                displaced[source] = functools.partial(_set_state, source, _state_of(source))
            _set_state(source, state)


def _indexed(device: torch.device) -> torch.device:
    """One generator has one name: ``cuda`` is the current device, by its number."""
    index: int | None = device.index
    if device.type in ("cpu", "meta") or index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _state_of(source: Source) -> Any:
    with torch._C._DisableTorchDispatch():
        if isinstance(source, torch.Generator):
            return source.get_state()
        if source.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(source).get_rng_state(source)


def _set_state(source: Source, state: Any) -> None:
    with torch._C._DisableTorchDispatch():
        if isinstance(source, torch.Generator):
            source.set_state(state)
        elif source.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(source).set_rng_state(state, source)
