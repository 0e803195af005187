"""The device on which parameters are created, and giving values to parameters that were created without any.

``init_on_device`` uses torch's own registration hooks. They are process-wide by nature, so ours asks first whether the
thread that registers is inside a context of ours: other threads build their modules as always, and no attribute of
torch is replaced. The hooks are registered at the first use and stay: torch walks their dict while it registers a
parameter, so removing them while another thread registers would break that thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.platform.torch.compat import DTensor, become
from hyper_parallel.platform.torch.parameters import same_kind

__all__ = ["init_on_device", "materialise"]

_RESETS = ("reset_parameters", "_reset_parameters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Birthplace:
    device: torch.device
    include_buffers: bool
    # A parameter registered twice, under two names, must arrive as one; the originals are not kept alive.
    moved: WeakIdKeyDictionary = dataclasses.field(default_factory=WeakIdKeyDictionary)

    def is_home(self, tensor: torch.Tensor) -> bool:
        device = tensor.device
        return device.type == self.device.type and self.device.index in (None, device.index)

    def move(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """``tensor`` on the device, or None when it already is there."""
        if self.is_home(tensor):
            return None
        if tensor not in self.moved:
            self.moved[tensor] = _moved(tensor, self.device)
        arrived: torch.Tensor = self.moved[tensor]
        return arrived


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        # It has no data to move; where it will be made is written in it.
        kind: Any = type(tensor)
        remade: torch.Tensor = kind(requires_grad=tensor.requires_grad, device=device, dtype=tensor.data.dtype)
        return remade
    return same_kind(tensor, tensor.detach().to(device))


class _Contexts(threading.local):
    """The contexts this thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Birthplace] = []


_contexts = _Contexts()
_registration = threading.Lock()


def _on_parameter(module: torch.nn.Module, name: str, parameter: Any) -> Any:
    return _contexts.stack[-1].move(parameter) if _contexts.stack and parameter is not None else None


def _on_buffer(module: torch.nn.Module, name: str, buffer: Any) -> Any:
    if not _contexts.stack or buffer is None or not _contexts.stack[-1].include_buffers:
        return None
    return _contexts.stack[-1].move(buffer)


@contextlib.contextmanager
def init_on_device(device: Any, include_buffers: bool) -> Iterator[None]:
    """See ``Platform.init_on_device``. Nested contexts: the innermost decides."""
    place = _Birthplace(device=torch.device(device), include_buffers=include_buffers)
    with _registration:
        _register_hooks_once()
    _contexts.stack.append(place)
    try:
        yield
    finally:
        _contexts.stack.remove(place)


@functools.cache
def _register_hooks_once() -> None:
    register_module_parameter_registration_hook(_on_parameter)
    register_module_buffer_registration_hook(_on_buffer)


def materialise(module: torch.nn.Module, device: torch.device) -> None:
    """Give every meta parameter and buffer bytes on ``device`` and the values its module would have given it."""
    # Children first: a parent's reset may refine what it did to its children, as attention does.
    owners = [(name, owner) for name, owner in module.named_modules() if _meta_tensors(owner)]
    _refuse_what_has_no_values(module, owners)
    for _, owner in reversed(owners):
        missing = _meta_tensors(owner)
        if not missing:  # tied to a parameter that already came
            continue
        kept = [(tensor, tensor.detach().clone()) for tensor in _own_tensors(owner).values() if not tensor.is_meta]
        for key, tensor in missing.items():
            _give_bytes(owner, key, tensor, device)
        _reset_of(owner)()
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def _own_tensors(owner: torch.nn.Module) -> dict[str, torch.Tensor]:
    own = {**owner._parameters, **owner._buffers}
    return {key: tensor for key, tensor in own.items() if tensor is not None}


def _meta_tensors(owner: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in _own_tensors(owner).items() if _is_missing(tensor)}


def _is_missing(tensor: torch.Tensor) -> bool:
    return tensor.is_meta and not isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def _reset_of(owner: torch.nn.Module) -> Any:
    return next((getattr(owner, name) for name in _RESETS if callable(getattr(owner, name, None))), None)


def _refuse_what_has_no_values(module: torch.nn.Module, owners: list[tuple[str, torch.nn.Module]]) -> None:
    shapeless = [name for name, value in module.named_parameters() if isinstance(value, UninitializedParameter)]
    if shapeless:
        raise HyperParallelError(
            f"init_parameters: cannot materialise {shapeless}; because the first input decides their shapes; "
            f"run one forward on a small batch first"
        )
    unknown = [
        f"{name or type(owner).__name__} ({', '.join(_meta_tensors(owner))})"
        for name, owner in owners
        if _reset_of(owner) is None
    ]
    if unknown:
        raise HyperParallelError(
            f"init_parameters: cannot give values to {unknown}; because these modules have no reset_parameters(); "
            f"define it, or fill them with load_into_param"
        )


def _give_bytes(owner: torch.nn.Module, key: str, tensor: torch.Tensor, device: torch.device) -> None:
    home: Any = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else device
    made = same_kind(tensor, torch.empty_like(tensor.detach(), device=home))
    if key in owner._buffers:
        setattr(owner, key, made)
    else:
        # In place, so that tied weights and an optimiser made earlier see it too.
        become(tensor, made)
