"""Wrappers of MindSpore cells: what only ``nn.Cell`` needs.

What a wrapper does on both frameworks is in ``core/activation_checkpoint/wrapper.py``. A wrapper of a cell has no parameters,
children, buffers, flags or state-dict hooks of its own: each of these is looked up in the wrapped cell. What it does own is
what its call needs: its hooks, and whether MindSpore records a graph for it.

Note: names of parameters
    A MindSpore parameter carries its full name, and a parent that gets a child renames the child's parameters after its
    own place. A wrapper that replaces a child deep in a model would thereby cut off everything above that parent, and
    parameters of different layers would end up with the same name. So a name that already ends with what it would be
    given is kept.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Final

from mindspore import Parameter, ParameterTuple, nn

from hyper_parallel.backends.mindspore.checkpointing import checkpoint, swap
from hyper_parallel.backends.mindspore.graph_mode import eager_only
from hyper_parallel.backends.mindspore.saved_tensors import TensorPolicy
from hyper_parallel.backends.mindspore.tensor_adapter import TENSORS
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint import wrapper
from hyper_parallel.platform.mindspore import compat

__all__ = ["ActivationWrapper", "CheckpointWrapper", "FuncCell", "SwapWrapper", "checkpoint_wrapper", "swap_wrapper"]


class FuncCell(wrapper.FunctionModule, nn.Cell):  # type: ignore[misc]
    """A plain callable as a cell."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn, auto_prefix=False)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.fn(*args, **kwargs)


_REGISTRIES: Final = ("_params", "_buffers", "_cells")


class ActivationWrapper(wrapper.ModuleWrapper, nn.Cell, is_base=True):  # type: ignore[misc]
    """The base of our wrappers: everything but ``construct``."""

    _wrapper_traits = wrapper.ModuleTraits(
        base=nn.Cell,
        noun="cell",
        from_function=FuncCell,
        registries=_REGISTRIES,
        shared=_REGISTRIES,
        looked_up=(
            *_REGISTRIES,
            "_params_list",
            "_primitives",
            "_lazy_non_persistent_buffers_set",
            "_lazy_state_dict_hooks",
            "_lazy_state_dict_pre_hooks",
            "_lazy_load_state_dict_pre_hooks",
            "_lazy_load_state_dict_post_hooks",
            "_lazy_user_parameters",
            "_auto_prefix",
            "_param_prefix",
            "_scope",
            "_phase",
            "cell_type",
            "training",
        ),
        registered=(Parameter, ParameterTuple, nn.Cell, compat.Buffer),
        tensors=TENSORS,
    )

    def __init__(self, module: Any) -> None:
        if getattr(
            type(self).construct, "__isabstractmethod__", False
        ):  # a cell is made in C++, which does not check for that
            raise TypeError(f"{type(self).__name__}: cannot be made, because it is abstract; give it a construct()")
        super().__init__(module)
        self.__dict__["requires_grad"] = self._wrapped.requires_grad

    def _share(self) -> None:
        if self._own is not None:  # else each registry is looked up in the wrapped cell, which may replace it
            super()._share()

    @abc.abstractmethod
    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped cell in the wrapper's own way."""

    @property
    def unwrap_cell(self) -> Any:
        """The cell inside all wrappers of ours."""
        return self._innermost()

    def __getstate__(self) -> Any:
        compiled_half, _ = nn.Cell.__getstate__(self)
        return compiled_half, super().__getstate__()

    def __setstate__(self, state: Any) -> None:
        compiled_half, attributes = state
        nn.Cell.__bases__[0].__setstate__(self, compiled_half)
        self.__dict__.clear()
        super().__setstate__(attributes)

    # Methods that a cell class may override: the wrapped cell's own are called.

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        """Put ``prefix`` before the names of parameters that do not carry it yet (see "names of parameters")."""
        for cell in self._modules_inside():
            before = [(parameter, parameter.name) for parameter in cell.get_parameters(expand=recurse)]
            cell.update_parameters_name(prefix, recurse)
            if prefix == "":
                continue
            for parameter, name in before:
                if name.endswith(f".{parameter.name}"):
                    parameter.name = name

    def set_train(self, mode: bool = True) -> ActivationWrapper:
        """Set the mode of the wrapped cell."""
        for cell in self._modules_inside():
            cell.set_train(mode)
        return self

    def add_flags(self, **flags: Any) -> ActivationWrapper:
        """Give the wrapped cell these flags."""
        self._wrapped.add_flags(**flags)
        return self

    def add_flags_recursive(self, **flags: Any) -> ActivationWrapper:
        """Give the wrapped cell and its children these flags."""
        for cell in self._modules_inside():
            cell.add_flags_recursive(**flags)
        return self

    def get_flags(self) -> Any:
        """The wrapped cell's flags."""
        return self._wrapped.get_flags()

    def to_float(self, dst_type: Any) -> ActivationWrapper:
        """Let the wrapped cell compute in ``dst_type``."""
        for cell in self._modules_inside():
            cell.to_float(dst_type)
        return self

    def insert_param_to_cell(self, param_name: str, *args: Any, **kwargs: Any) -> None:
        """Give a parameter to the wrapper or the wrapped cell, as the rule says."""
        self._register("insert_param_to_cell", param_name, *args, **kwargs)

    def insert_child_to_cell(self, child_name: str, *args: Any, **kwargs: Any) -> None:
        """Give a child to the wrapper or the wrapped cell, as the rule says."""
        self._register("insert_child_to_cell", child_name, *args, **kwargs)

    def extend_repr(self) -> str:
        """What the wrapped cell shows of itself."""
        return str(self._wrapped.extend_repr())


class CheckpointWrapper(wrapper.CheckpointCalls, ActivationWrapper, is_plain=True):
    """Every call goes through a checkpoint function, ours unless another is given."""

    _checkpoint_function = checkpoint

    @eager_only
    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped cell under the checkpoint function."""
        return self._call_checkpointed(args, kwargs)


class SwapWrapper(wrapper.SwapCalls, ActivationWrapper, is_plain=True):
    """What the wrapped cell saves for backward goes to far memory and comes back in time."""

    _swap_function = swap

    @eager_only
    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped cell under the swap hooks."""
        if not compat.is_recording():
            return self._wrapped(*args, **kwargs)
        return self._call_swapped(args, kwargs)


def checkpoint_wrapper(module: Any, **keywords: Any) -> CheckpointWrapper:
    """See ``hyper_parallel.checkpoint_wrapper``."""
    wrapper.refuse_reentrant(keywords)
    return CheckpointWrapper(module, **keywords)


def swap_wrapper(
    module: Any, policy_fn: TensorPolicy | None = None, *, swap_config: SwapConfig | None = None
) -> SwapWrapper:
    """See ``hyper_parallel.swap_wrapper``."""
    return SwapWrapper(module, policy_fn, swap_config=swap_config)
