"""The device on which parameters are created, and giving values to parameters that were created without any.

MindSpore's own device context is process-wide and takes buffers too, so it cannot serve ``init_on_device``. Cells have a
hook for the registration of buffers, but none for that of parameters: every parameter is registered by
``Cell.insert_param_to_cell``, which is replaced while a context is open. Hook and replacement act only on a thread that is
inside a context. The last context that closes removes the hook and restores MindSpore's method. Initialisers are kept,
unrun, for ``init_parameters``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, Final

import mindspore

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device import device_name
from hyper_parallel.platform.mindspore.parameters import drop_initialiser, fill, is_meta

__all__ = ["init_on_device", "materialise"]

_INITIALISER: Final = "_hyper_parallel_initialiser"
"""The attribute in which a parameter created on the meta device keeps the initialiser that its cell gave it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Birthplace:
    device: str
    include_buffers: bool

    def move(self, tensor: Any) -> None:
        """Put a tensor on the device, keeping the object."""
        if str(tensor.device).lower().startswith(self.device.lower()):
            return
        if isinstance(tensor, mindspore.Parameter):
            if tensor.has_init:
                setattr(tensor, _INITIALISER, tensor.init_mode)
            tensor._update_data(tensor.to(self.device))
            drop_initialiser(tensor)
        else:
            raise TypeError(f"init_on_device: expected a parameter, got {type(tensor).__name__}")


class _Contexts(threading.local):
    """The contexts this thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Birthplace] = []


_contexts = _Contexts()
_lock = threading.Lock()
_originals: dict[str, Any] = {}
_open_contexts = 0


class _ThreadSwitch:
    """MindSpore's switch "run initialisers at once", thrown for the threads inside a context only."""

    def __init__(self, outside: bool) -> None:
        self._outside = outside

    def __get__(self, instance: Any, owner: type | None = None) -> bool:
        return self._outside and not _contexts.stack


def _insert_param(cell: Any, param_name: str, param: Any, *args: Any, **kwargs: Any) -> Any:
    if _contexts.stack and param is not None:
        _contexts.stack[-1].move(param)
    return _originals["insert_param_to_cell"](cell, param_name, param, *args, **kwargs)


def _move_buffer(cell: Any, name: str, tensor: Any) -> Any:
    if _contexts.stack and tensor is not None and _contexts.stack[-1].include_buffers:
        return tensor.to(_contexts.stack[-1].device)
    return None  # as it is


def _start_intercepting() -> None:
    global _open_contexts
    with _lock:
        _open_contexts += 1
        if _open_contexts > 1:
            return
        cell, parameter = mindspore.nn.Cell, mindspore.Parameter
        _originals["insert_param_to_cell"] = cell.insert_param_to_cell
        _originals["buffer_hook"] = compat.on_buffer_registration(_move_buffer)
        _originals["init_param"] = getattr(parameter, "init_param", True)
        cell.insert_param_to_cell = _insert_param
        parameter.init_param = _ThreadSwitch(_originals["init_param"])


def _stop_intercepting() -> None:
    global _open_contexts
    with _lock:
        _open_contexts -= 1
        if _open_contexts:
            return
        mindspore.nn.Cell.insert_param_to_cell = _originals["insert_param_to_cell"]
        _originals["buffer_hook"].remove()
        mindspore.Parameter.init_param = _originals["init_param"]


@contextlib.contextmanager
def init_on_device(device: Any, include_buffers: bool) -> Iterator[None]:
    """See ``Platform.init_on_device``. Nested contexts: the innermost decides."""
    place = _Birthplace(device=device_name(device, member="init_on_device"), include_buffers=include_buffers)
    _start_intercepting()
    _contexts.stack.append(place)
    try:
        yield
    finally:
        _contexts.stack.pop()
        _stop_intercepting()


def materialise(root: Any) -> None:  # mindspore.nn.Cell
    """Give every parameter without values those that its initialiser makes."""
    parameters = list(root.parameters_and_names())
    unknown = [name for name, p in parameters if is_meta(p) and getattr(p, _INITIALISER, None) is None]
    unknown += [name for name, value in root.state_dict().items() if _is_buffer(value) and is_meta(value)]
    if unknown:
        raise HyperParallelError(
            f"init_parameters: cannot give values to {unknown}; because they were not made by an initialiser; "
            f"fill them with load_into_param, or assign a new tensor"
        )
    for _, parameter in parameters:
        if is_meta(parameter):
            fill(parameter, getattr(parameter, _INITIALISER).init_data())
        elif parameter.has_init:
            parameter.init_data()


def _is_buffer(value: Any) -> bool:
    return isinstance(value, mindspore.Tensor) and not isinstance(value, mindspore.Parameter)
