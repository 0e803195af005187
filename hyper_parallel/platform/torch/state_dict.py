"""A model's state under the names that the unwrapped model has.

A wrapper is known by what it is, at the place where it is, never by a piece of a name: a user's own attribute called
``module`` keeps its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hyper_parallel.platform.base.state_dict_options import StateDictOptions
from hyper_parallel.platform.torch.compat import DTensor, wrapper_attribute

__all__ = ["get_model_state_dict", "model_state_dict", "plain_name"]


def _wrapped_paths(model: torch.nn.Module) -> dict[str, str]:
    """For each wrapper, the dotted path of what it wraps and the path of the wrapper itself."""
    paths: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        attribute = wrapper_attribute(module)
        if attribute is not None:
            paths[f"{name}.{attribute}" if name else attribute] = name
    return paths


def plain_name(name: str, wrapped: dict[str, str]) -> str:
    """``name`` without the wrappers' own steps; ``wrapped`` maps a wrapped module's path to its wrapper's."""
    steps: list[str] = []
    path = ""
    for step in name.split("."):
        path = f"{path}.{step}" if path else step
        if path not in wrapped:
            steps.append(step)
    return ".".join(steps)


def model_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers, detached, under plain names; tied names hold one and the same tensor."""
    wrapped = _wrapped_paths(model)
    state = model.state_dict(keep_vars=True)
    detached = {id(value): value.detach() for value in state.values() if isinstance(value, torch.Tensor)}
    return {plain_name(name, wrapped): detached.get(id(value), value) for name, value in state.items()}


def _frozen_names(model: torch.nn.Module) -> Iterator[str]:
    wrapped = _wrapped_paths(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            yield plain_name(name, wrapped)


def get_model_state_dict(model: torch.nn.Module, options: Any) -> dict[str, Any]:
    """See ``Platform.get_model_state_dict``."""
    asked = StateDictOptions.read(options)
    state = model_state_dict(model)
    if asked.ignore_frozen_params:
        for name in _frozen_names(model):
            state.pop(name, None)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_kept = not (asked.full_state_dict and asked.cpu_offload and distributed and torch.distributed.get_rank() != 0)
    result: dict[str, Any] = {}
    made: dict[int, Any] = {}
    for name, value in state.items():
        if id(value) not in made:
            # One tensor at a time: gathering all before offloading would need the whole model on the device.
            form = _asked_form(value, asked)
            made[id(value)] = form if is_kept else None
        if is_kept:
            result[name] = made[id(value)]
    return result


def _asked_form(value: Any, asked: StateDictOptions) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if asked.full_state_dict and isinstance(value, DTensor):
        value = value.full_tensor()
    return value.cpu() if asked.cpu_offload else value
