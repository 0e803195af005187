"""A cell's state under the names that the unwrapped cell has."""

from __future__ import annotations

from typing import Any

import mindspore

from hyper_parallel.platform.base.state_dict_options import StateDictOptions
from hyper_parallel.platform.mindspore.tensors import detached

__all__ = ["get_model_state_dict", "model_state_dict"]


def model_state_dict(cell: Any) -> dict[str, Any]:  # mindspore.nn.Cell
    """Parameters and persistent buffers, detached; tied names hold one and the same tensor."""
    state = dict(cell.state_dict())
    plain = {id(value): detached(value) for value in state.values() if isinstance(value, mindspore.Tensor)}
    return {name: plain.get(id(value), value) for name, value in state.items()}


def get_model_state_dict(cell: Any, options: Any, rank: int) -> dict[str, Any]:
    """See ``Platform.get_model_state_dict``; every tensor is whole, because MindSpore has no distributed tensor."""
    asked = StateDictOptions.read(options)
    if asked.full_state_dict and asked.cpu_offload and rank != 0:
        return {}
    state = model_state_dict(cell)
    if asked.ignore_frozen_params:
        frozen = [name for name, value in cell.state_dict().items() if _is_frozen(value)]
        state = {name: value for name, value in state.items() if name not in frozen}
    if asked.cpu_offload:
        moved = {id(value): _on_host(value) for value in state.values()}
        state = {name: moved[id(value)] for name, value in state.items()}
    return state


def _is_frozen(value: Any) -> bool:
    return isinstance(value, mindspore.Parameter) and not value.requires_grad


def _on_host(value: Any) -> Any:
    return value.to("CPU") if isinstance(value, mindspore.Tensor) and str(value.device) != "CPU" else value
