"""What the model's device can give to this process, and the optimizer states that are still to come."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

from hyper_parallel.backends.torch.planner.blocks import device_of, require_module
from hyper_parallel.backends.torch.planner.meters import Meter, meter_for
from hyper_parallel.planner.budget import DeviceMemory

__all__ = ["device_memory", "memory_of", "optimizers_of"]

_KNOWN: Final = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adam, torch.optim.AdamW)
_USUAL_STATES: Final = 2  # of Adam and AdamW: two values for each parameter


def device_memory(model: Any, *, who: str) -> DeviceMemory:
    """What the device of this model can give to this process; an error for a model on the CPU."""
    require_module(model, who)
    return memory_of(model, meter_for(device_of(model, who), who=who))


def memory_of(model: nn.Module, meter: Meter) -> DeviceMemory:
    """The same, where the meter is known."""
    return DeviceMemory(
        device=meter.device_name,
        available_bytes=meter.capacity_bytes(),
        expected_state_bytes=_expected_state_bytes(model),
    )


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Every optimizer that holds one of the model's parameters."""
    mine = set(map(id, model.parameters()))
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.optim.Optimizer)
        and any(id(parameter) in mine for group in getattr(thing, "param_groups", ()) for parameter in group["params"])
    ]


def _expected_state_bytes(model: nn.Module) -> int:
    """Bytes that the first optimizer step will make for parameters whose optimizer has no state for them yet.

    Where no optimizer holds the model's parameters yet, Adam's two values for each trained parameter are expected.
    """
    trained = {id(parameter): parameter for parameter in model.parameters() if parameter.requires_grad}
    optimizers = optimizers_of(model)
    if not optimizers:
        return _USUAL_STATES * _local_bytes(trained.values())
    # A wrapper around an optimizer (Accelerate's) is one too: of two that hold a parameter, the class that is known counts.
    expected: dict[int, int] = {}
    for optimizer in sorted(optimizers, key=lambda one: isinstance(one, _KNOWN)):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in trained:
                    has_state = bool(optimizer.state.get(parameter))
                    states = 0 if has_state else _states_of(optimizer, group)
                    expected[id(parameter)] = states * _local_bytes([parameter])
    return sum(expected.values())


def _states_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    """How many values as large as a parameter this optimizer keeps for it; for an unknown class, as many as Adam."""
    if isinstance(optimizer, torch.optim.SGD):
        return int(bool(group.get("momentum")))
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 + bool(group.get("momentum")) + bool(group.get("centered"))
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return _USUAL_STATES + bool(group.get("amsgrad"))
    return _USUAL_STATES


def _local_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes on this rank: a sharded parameter counts with its own part."""
    return sum(getattr(parameter, "_local_tensor", parameter).nbytes for parameter in parameters)
