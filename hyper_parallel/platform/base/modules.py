"""The Platform members about modules and parameters: names, parameters and defaults, and what needs no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hyper_parallel.errors import UnsupportedMemberError
from hyper_parallel.platform.base.micro_batch import MicroBatch
from hyper_parallel.platform.base.unsupported import class_or_instance_method, class_property, needs_framework

__all__ = ["ModuleMembers"]


def _own_method(module: Any, name: str) -> Callable[..., Any]:
    """The module's own method, which serves the member of the same name."""
    method: Callable[..., Any] | None = getattr(module, name, None)
    if method is None:
        raise UnsupportedMemberError(
            member=name,
            platform="Platform",
            reason=f"{type(module).__name__} has no method {name}()",
            instead=f"override {name} in the platform of this framework, or give a module that has the method",
        )
    return method


class ModuleMembers:
    """Modules and parameters. ``Any`` stands for a framework's module (torch) or cell (MindSpore) and parameter."""

    @staticmethod
    def get_op_name(func: Any) -> str:
        """The op's name, the same for every overload: ``"add"``, not ``"add.Tensor"``."""
        raise needs_framework("get_op_name")

    @staticmethod
    def get_cell_construct(cell: Any) -> Callable[..., Any]:
        """The bound forward of a module."""
        raise needs_framework("get_cell_construct")

    @staticmethod
    def get_cells_and_names(cell: Any) -> list[tuple[str, Any]]:
        """Every module under ``cell`` with its dotted name, the root first under ``""``."""
        raise needs_framework("get_cells_and_names")

    @staticmethod
    def parameters_dict(cell: Any) -> dict[str, Any]:
        """Every parameter under its dotted name."""
        raise needs_framework("parameters_dict")

    @staticmethod
    def _plain_parameter_name(name: str) -> str:
        """``name`` as a path from the root module; users write it as they see it in code, from ``self``."""
        return name.removeprefix("self.")

    @staticmethod
    def search_parameter_by_name(cell: Any, param_name: str) -> Any:
        """The parameter of that dotted name, or ``None``."""
        raise needs_framework("search_parameter_by_name")

    @staticmethod
    def update_parameter_by_name(cell: Any, result: tuple[str, Any], new_param: Any) -> bool:
        """Put ``new_param`` where ``result``, a (dotted name, parameter), is; whether there was such a place."""
        raise needs_framework("update_parameter_by_name")

    @staticmethod
    def set_layout_into_parameter(param: Any, layout: Any) -> Any:
        """Give a parameter its layout, a ``ParameterLayout`` or the framework's own; returns the parameter.

        A second layout is ``ValueError``.
        """
        raise needs_framework("set_layout_into_parameter")

    @staticmethod
    def get_param_local_shape(param: Any) -> Any:
        """The shape of what this rank holds."""
        raise needs_framework("get_param_local_shape")

    @staticmethod
    def get_param_local_data(param: Any) -> Any:
        """What this rank holds, without autograd history."""
        raise needs_framework("get_param_local_data")

    @staticmethod
    def update_param_data(param: Any, data: Any) -> None:
        """Let ``param`` use ``data`` from now on, without a copy."""
        raise needs_framework("update_param_data")

    @staticmethod
    def load_into_param(param: Any, data: Any) -> None:
        """Copy ``data`` into ``param``, which may be plain, on the meta device or sharded."""
        raise needs_framework("load_into_param")

    @staticmethod
    def get_param_type_size(param: Any) -> int:
        """Bytes of one element of ``param``."""
        raise needs_framework("get_param_type_size")

    @staticmethod
    def new_zero_parameter(param_shape: Any, param_type: Any, requires_grad: bool, device: Any) -> Any:
        """A parameter of zeros."""
        raise needs_framework("new_zero_parameter")

    @class_or_instance_method
    def init_parameters(cls, module: Any, stage_index: int) -> None:
        """Materialise the lazily initialised parameters of a pipeline stage."""
        if module is None:
            raise ValueError("init_parameters: module must be the module of a pipeline stage; got None")
        if stage_index is None or isinstance(stage_index, bool) or not isinstance(stage_index, int) or stage_index < 0:
            raise ValueError(
                f"init_parameters: stage_index must be a pipeline stage, 0 or greater; got {stage_index!r}"
            )
        cls._materialise_parameters(module)

    @class_or_instance_method
    def _materialise_parameters(cls, module: Any) -> None:
        """Run ``init_data()`` of every parameter that says ``has_init``; other ways of being lazy override this."""
        for parameter in cls.parameters_dict(module).values():
            if getattr(parameter, "has_init", False):
                parameter.init_data()

    @staticmethod
    def is_linear_module(module: Any) -> bool:
        """Whether ``module`` is a linear layer."""
        raise needs_framework("is_linear_module")

    @staticmethod
    def is_embedding_module(module: Any) -> bool:
        """Whether ``module`` is an embedding."""
        raise needs_framework("is_embedding_module")

    @staticmethod
    def register_forward_pre_hook(
        module: Any, hook: Callable[..., Any], prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """Call ``hook(module, args)``, or ``hook(module, args, kwargs)``, before forward; removable."""
        register = _own_method(module, "register_forward_pre_hook")
        return register(hook, prepend=prepend, with_kwargs=with_kwargs)

    @staticmethod
    def register_full_backward_hook(module: Any, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Call ``hook(module, grad_input, grad_output)`` after the module's backward; removable."""
        return _own_method(module, "register_full_backward_hook")(hook, prepend=prepend)

    @staticmethod
    def register_full_backward_pre_hook(module: Any, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Call ``hook(module, grad_output)`` before the module's backward; removable."""
        return _own_method(module, "register_full_backward_pre_hook")(hook, prepend=prepend)

    @staticmethod
    def get_model_state_dict(model: Any, *, options: Any = None) -> dict[str, Any]:
        """The model's state under the names the unwrapped model has; see ``StateDictOptions`` for the options."""
        raise needs_framework("get_model_state_dict")

    @staticmethod
    def save_checkpoint(cell: Any, file_path: Any, ckpt_format: str = "safetensors") -> None:
        """Write a module's state, or a dict of tensors, so that an interrupted save leaves the old file whole."""
        raise needs_framework("save_checkpoint")

    @staticmethod
    def load_checkpoint(file_path: Any, ckpt_format: str = "safetensors") -> dict[str, Any]:
        """Read a dict of tensors; a file never runs code."""
        raise needs_framework("load_checkpoint")

    @staticmethod
    def clip_grad_norm_(
        parameters: Any | Iterable[Any],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        """Scale gradients in place so that their total norm is at most ``max_norm``; returns the norm before."""
        raise needs_framework("clip_grad_norm_")

    @class_or_instance_method
    def micro_batch(
        cls,
        micro_batch_num: int,
        args_batch_dim: Sequence[int | None] | None = None,
        kwargs_batch_dim: Mapping[str, int | None] | None = None,
    ) -> MicroBatch:
        """A decorator that splits a function's inputs and returns the list of its outputs; see ``MicroBatch``."""
        return MicroBatch(
            platform=cls,
            micro_batch_num=micro_batch_num,
            args_batch_dim=args_batch_dim,
            kwargs_batch_dim=kwargs_batch_dim,
        )

    @class_or_instance_method
    def _micro_batch_piece(cls, tensor: Any, dim: int, size: int, index: int) -> Any:
        """Piece ``index`` of a batch; a framework with sharded tensors gives the piece the layout of the whole."""
        return cls.chunk(tensor, dim, size, index)  # type: ignore[attr-defined]

    @class_property
    def meta_device(self) -> Any:
        """The device whose tensors have a shape and no bytes."""
        raise needs_framework("meta_device")

    @staticmethod
    def init_on_device(device: Any, include_buffers: bool = False) -> AbstractContextManager[Any]:
        """A context: parameters of modules built inside, by this thread, are made on ``device``."""
        raise needs_framework("init_on_device")
