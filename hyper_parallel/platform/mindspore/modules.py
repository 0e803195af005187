"""Modules and parameters on MindSpore: each member calls the module that implements it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import mindspore
from mindspore import mint, nn

from hyper_parallel.platform.base.modules import ModuleMembers
from hyper_parallel.platform.base.unsupported import class_or_instance_method, class_property
from hyper_parallel.platform.mindspore import checkpoint_files, gradients, initialization, parameters, state_dict
from hyper_parallel.platform.mindspore.groups import MindSporeGroupMembers, my_rank
from hyper_parallel.platform.mindspore.tensors import MindSporeTensorMembers, dtype_of

__all__ = ["MindSporeModuleMembers"]


def _first_of(hooks: Any, handle: Any) -> Any:  # OrderedDict of hooks; a HookHandle
    # MindSpore's backward hooks know no `prepend`; their order is that of this dict.
    hooks.move_to_end(handle.handle_id, last=False)
    return handle


class MindSporeModuleMembers(ModuleMembers):
    """Modules and parameters."""

    @staticmethod
    def get_op_name(func: Any) -> str:
        """``"Add"`` for the op that a dispatch mode sees and for the primitive; a function's own name otherwise."""
        if isinstance(func, functools.partial):
            return MindSporeModuleMembers.get_op_name(func.func)
        if isinstance(func, str):
            return func.partition(".")[0]
        name = getattr(func, "name", None)
        if not isinstance(name, str):
            name = getattr(func, "__name__", type(func).__name__)
        return str(name)

    @staticmethod
    def get_cell_construct(cell: Any) -> Callable[..., Any]:
        """The bound ``construct``."""
        construct: Callable[..., Any] = cell.construct
        return construct

    @staticmethod
    def get_cells_and_names(cell: Any) -> list[tuple[str, Any]]:
        """Every cell under ``cell`` with its dotted name, the root first under ``""``."""
        return list(cell.cells_and_names())

    @staticmethod
    def parameters_dict(cell: Any) -> dict[str, Any]:
        """Every parameter under its dotted name; a tied one under its first."""
        return dict(cell.parameters_and_names())

    @class_or_instance_method
    def search_parameter_by_name(cls, cell: Any, param_name: str) -> Any:
        """The parameter of that dotted name, or None; each name of a tied parameter finds it."""
        return parameters.find(cell, cls._plain_parameter_name(param_name))

    @class_or_instance_method
    def update_parameter_by_name(cls, cell: Any, result: tuple[str, Any], new_param: Any) -> bool:
        """Put ``new_param`` wherever the parameter of that name is held, ties included; whether it was found."""
        if not isinstance(new_param, mindspore.Parameter):
            raise TypeError(
                f"update_parameter_by_name: a cell holds mindspore.Parameter, not {type(new_param).__name__}; wrap it"
            )
        old = None if result is None else cls.search_parameter_by_name(cell, result[0])
        return old is not None and parameters.replace_everywhere(cell, old, new_param) > 0

    @staticmethod
    def set_layout_into_parameter(param: Any, layout: Any) -> Any:
        """Give the parameter a ``mindspore.parallel.Layout`` and leave it this rank's part; returns the parameter."""
        return parameters.set_layout(param, layout, my_rank(), MindSporeGroupMembers.get_world_size())

    @staticmethod
    def get_param_local_shape(param: Any) -> tuple[int, ...]:
        """The shape of what this rank holds."""
        return tuple(param.shape)

    @staticmethod
    def get_param_local_data(param: Any) -> Any:
        """What this rank holds, detached, sharing memory."""
        return parameters.local_data(param)

    @staticmethod
    def update_param_data(param: Any, data: Any) -> None:
        """Let ``param`` use ``data`` from now on, without a copy; a sharded one takes its local part."""
        parameters.set_data(param, data)

    @staticmethod
    def load_into_param(param: Any, data: Any) -> None:
        """Copy ``data`` into a plain, meta or sharded parameter; the object stays the same."""
        parameters.fill(param, data)

    @staticmethod
    def get_param_type_size(param: Any) -> int:
        """Bytes of one element."""
        return int(param.itemsize)

    @staticmethod
    def new_zero_parameter(param_shape: Any, param_type: Any, requires_grad: bool, device: Any) -> Any:
        """A parameter of zeros."""
        dtype = dtype_of(param_type, member="new_zero_parameter")
        data = MindSporeTensorMembers.zeros(param_shape, dtype=dtype, device=device)
        return mindspore.Parameter(data, requires_grad=requires_grad)

    @staticmethod
    def _materialise_parameters(module: Any) -> None:
        initialization.materialise(module)

    @staticmethod
    def is_linear_module(module: Any) -> bool:
        """Whether ``module`` is ``nn.Dense``, ``mint.nn.Linear`` or made from one."""
        return isinstance(module, nn.Dense | mint.nn.Linear)

    @staticmethod
    def is_embedding_module(module: Any) -> bool:
        """Whether ``module`` is ``nn.Embedding``, ``mint.nn.Embedding`` or made from one."""
        return isinstance(module, nn.Embedding | mint.nn.Embedding)

    @staticmethod
    def register_full_backward_hook(module: Any, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Call ``hook(module, grad_input, grad_output)`` after the cell's backward; removable."""
        handle = module.register_backward_hook(hook)
        return _first_of(module._backward_hook, handle) if prepend else handle

    @staticmethod
    def register_full_backward_pre_hook(module: Any, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Call ``hook(module, grad_output)`` before the cell's backward; removable."""
        handle = module.register_backward_pre_hook(hook)
        return _first_of(module._backward_pre_hook, handle) if prepend else handle

    @staticmethod
    def get_model_state_dict(model: Any, *, options: Any = None) -> dict[str, Any]:
        """Parameters and persistent buffers; a full state dict gathers what has a layout, so every rank must call."""
        return state_dict.get_model_state_dict(model, options, my_rank())

    @staticmethod
    def save_checkpoint(cell: Any, file_path: Any, ckpt_format: str = "safetensors") -> None:
        """Write a cell's state, or a dict of tensors, so that an interrupted save leaves the old file whole."""
        checkpoint_files.save(cell, file_path, ckpt_format)

    @staticmethod
    def load_checkpoint(file_path: Any, ckpt_format: str = "safetensors") -> dict[str, Any]:
        """Read a dict of tensors onto the host; a file never runs code."""
        return checkpoint_files.load(file_path, ckpt_format)

    @staticmethod
    def clip_grad_norm_(
        parameters: Any | Iterable[Any],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        """Scale the gradients on ``parameter.grad`` in place; ``foreach`` chooses nothing, there is one way here."""
        return gradients.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    @class_property
    def meta_device(self) -> str:
        """The device whose tensors have a shape and no bytes."""
        return "meta"

    @staticmethod
    def init_on_device(device: Any, include_buffers: bool = False) -> AbstractContextManager[None]:
        """A context: parameters of cells built inside, by this thread, are made on ``device``."""
        return initialization.init_on_device(device, include_buffers)
