"""A cell's state under the names that the unwrapped cell has."""

from __future__ import annotations

from typing import Any

import mindspore

from hyper_parallel.platform.base.state_dict_options import StateDictOptions
from hyper_parallel.platform.mindspore.sharded import whole_values
from hyper_parallel.platform.mindspore.tensors import detached

__all__ = ["get_model_state_dict", "model_state_dict"]


def model_state_dict(cell: Any, *, is_full: bool) -> dict[str, Any]:  # mindspore.nn.Cell
    """Parameters and persistent buffers, detached; tied names hold one and the same tensor.

    Of a parameter with a layout: the whole where ``is_full``, else this rank's part.
    """
    state = dict(cell.state_dict())
    form = whole_values if is_full else detached
    unique = {id(value): value for value in state.values() if isinstance(value, mindspore.Tensor)}
    plain = {key: form(value) for key, value in unique.items()}
    return {name: plain.get(id(value), value) for name, value in state.items()}


def get_model_state_dict(cell: Any, options: Any, rank: int) -> dict[str, Any]:
    """See ``Platform.get_model_state_dict``; parameters with a layout are parts, and whole in a full state dict."""
    asked = StateDictOptions.read(options)
    # Every rank takes part in gathering, also one that keeps nothing.
    state = model_state_dict(cell, is_full=asked.full_state_dict)
    if asked.full_state_dict and asked.cpu_offload and rank != 0:
        return {}
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
