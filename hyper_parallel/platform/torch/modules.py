"""Modules and parameters on torch: each member calls the module that implements it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from hyper_parallel.platform.base.modules import ModuleMembers
from hyper_parallel.platform.base.unsupported import class_or_instance_method, class_property
from hyper_parallel.platform.torch import checkpoint_files, gradients, initialization, parameters, state_dict
from hyper_parallel.platform.torch.compat import DTensor
from hyper_parallel.platform.torch.device import accelerator_type
from hyper_parallel.platform.torch.tensors import dtype_of

__all__ = ["TorchModuleMembers"]


class TorchModuleMembers(ModuleMembers):
    """Modules and parameters."""

    @staticmethod
    def get_op_name(func: Any) -> str:
        """``"add"`` for every overload of ``aten.add``, for ``torch.add`` and for ``"aten::add.Tensor"``."""
        if isinstance(func, functools.partial):
            return TorchModuleMembers.get_op_name(func.func)
        if isinstance(func, torch._ops.OpOverload):
            func = func.overloadpacket
        name = func if isinstance(func, str) else getattr(func, "__name__", type(func).__name__)
        return str(name).rpartition("::")[2].removeprefix("aten.").partition(".")[0]

    @staticmethod
    def get_cell_construct(cell: torch.nn.Module) -> Callable[..., Any]:
        """The bound ``forward``."""
        return cell.forward

    @staticmethod
    def get_cells_and_names(cell: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        """Every module under ``cell`` with its dotted name, the root first under ``""``."""
        return list(cell.named_modules())

    @staticmethod
    def parameters_dict(cell: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """Every parameter under its dotted name."""
        return dict(cell.named_parameters())

    @class_or_instance_method
    def search_parameter_by_name(cls, cell: torch.nn.Module, param_name: str) -> torch.nn.Parameter | None:
        """The parameter of that dotted name, or None; each name of a tied parameter finds it."""
        return dict(cell.named_parameters(remove_duplicate=False)).get(cls._plain_parameter_name(param_name))

    @class_or_instance_method
    def update_parameter_by_name(cls, cell: torch.nn.Module, result: tuple[str, Any], new_param: Any) -> bool:
        """Put ``new_param`` wherever the parameter of that name is held, ties included; whether it was found."""
        if not isinstance(new_param, torch.nn.Parameter):
            raise TypeError(
                f"update_parameter_by_name: a module holds torch.nn.Parameter, not {type(new_param).__name__}; wrap it"
            )
        old = None if result is None else cls.search_parameter_by_name(cell, result[0])
        return old is not None and parameters.replace_everywhere(cell, old, new_param) > 0

    @staticmethod
    def set_layout_into_parameter(param: torch.Tensor, layout: Any) -> torch.nn.Parameter:
        """Shard the parameter over (mesh, placements) wherever it is held; returns the DTensor parameter."""
        return parameters.set_layout(param, layout)

    @staticmethod
    def get_param_local_shape(param: torch.Tensor) -> torch.Size:
        """The shape of what this rank holds."""
        return parameters.local_data(param).shape

    @staticmethod
    def get_param_local_data(param: torch.Tensor) -> torch.Tensor:
        """What this rank holds, detached, sharing memory."""
        return parameters.local_data(param)

    @staticmethod
    def update_param_data(param: torch.Tensor, data: torch.Tensor) -> None:
        """Let ``param`` use ``data`` from now on, without a copy; a sharded one takes its local part."""
        parameters.set_data(param, data)

    @staticmethod
    def load_into_param(param: torch.Tensor, data: torch.Tensor) -> None:
        """Copy ``data`` into a plain, meta or sharded parameter; the object stays the same."""
        parameters.fill(param, data)

    @staticmethod
    def get_param_type_size(param: torch.Tensor) -> int:
        """Bytes of one element."""
        return param.element_size()

    @staticmethod
    def new_zero_parameter(param_shape: Any, param_type: Any, requires_grad: bool, device: Any) -> torch.nn.Parameter:
        """A parameter of zeros."""
        dtype = dtype_of(param_type, member="new_zero_parameter")
        return torch.nn.Parameter(torch.zeros(param_shape, dtype=dtype, device=device), requires_grad=requires_grad)

    @staticmethod
    def _materialise_parameters(module: torch.nn.Module) -> None:
        initialization.materialise(module, torch.device(accelerator_type() or "cpu"))

    @staticmethod
    def is_linear_module(module: Any) -> bool:
        """Whether ``module`` is ``nn.Linear`` or made from it."""
        return isinstance(module, torch.nn.Linear)

    @staticmethod
    def is_embedding_module(module: Any) -> bool:
        """Whether ``module`` is ``nn.Embedding``, ``nn.EmbeddingBag`` or made from one."""
        return isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)

    @staticmethod
    def get_model_state_dict(model: torch.nn.Module, *, options: Any = None) -> dict[str, Any]:
        """Parameters and persistent buffers under the names the unwrapped model has."""
        return state_dict.get_model_state_dict(model, options)

    @staticmethod
    def save_checkpoint(cell: Any, file_path: Any, ckpt_format: str = "safetensors") -> None:
        """Write a module's state, or a dict of tensors, so that an interrupted save leaves the old file whole."""
        checkpoint_files.save(cell, file_path, ckpt_format)

    @staticmethod
    def load_checkpoint(file_path: Any, ckpt_format: str = "safetensors") -> dict[str, torch.Tensor]:
        """Read a dict of tensors onto the host; a file never runs code."""
        return checkpoint_files.load(file_path, ckpt_format)

    @staticmethod
    def clip_grad_norm_(
        parameters: Any | Iterable[Any],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scale gradients in place to a total norm of at most ``max_norm``; returns the norm before, a plain tensor."""
        return gradients.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    @class_or_instance_method
    def _micro_batch_piece(cls, tensor: torch.Tensor, dim: int, size: int, index: int) -> torch.Tensor:
        piece: torch.Tensor = super()._micro_batch_piece(tensor, dim, size, index)
        if isinstance(piece, DTensor) and isinstance(tensor, DTensor):
            # Slicing a sharded dim gathers it; the rows of a micro-batch are those of the whole batch, then laid out
            # as the batch was, so that plain and sharded arguments of one call stay in step.
            return piece.redistribute(tensor.device_mesh, tensor.placements)
        return piece

    @class_property
    def meta_device(self) -> torch.device:
        """The device whose tensors have a shape and no bytes."""
        return torch.device("meta")

    @staticmethod
    def init_on_device(device: Any, include_buffers: bool = False) -> AbstractContextManager[None]:
        """A context: parameters of modules built inside, by this thread, are made on ``device``."""
        return initialization.init_on_device(device, include_buffers)
