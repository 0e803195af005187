"""Wrappers that leave no trace.

A wrapper takes a cell's place in the tree. It has no parameters, children, buffers, flags or state-dict hooks of its own:
each of these is looked up in the wrapped cell, so that names, ``state_dict``, loading, ``deepcopy`` and pickling are
those of the wrapped cell, without a prefix that would have to be stripped somewhere. What it does own is what its call
needs: its hooks, and whether MindSpore records a graph for it. Which attributes a subclass owns says "the rule" in
``core/activation_checkpoint/own_attributes.py``.

Note: names of parameters
    A MindSpore parameter carries its full name, and a parent that gets a child renames the child's parameters after its
    own place. A wrapper that replaces a child deep in a model would thereby cut off everything above that parent, and
    parameters of different layers would end up with the same name. So a name that already ends with what it would be
    given is kept.

Note: the class
    Libraries find layers by ``isinstance``. So ``__class__`` answers with the wrapped cell's class, and ``isinstance``
    holds for both.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any, Final

from mindspore import Parameter, ParameterTuple, nn

from hyper_parallel.backends.mindspore.checkpointing import checkpoint, swap
from hyper_parallel.backends.mindspore.saved_tensors import TensorPolicy
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.call_keywords import (
    CHECKPOINT_SETTINGS,
    SWAP_SETTINGS,
    keep_apart,
    parameter_names,
)
from hyper_parallel.core.activation_checkpoint.own_attributes import Joined, OwnAttributes
from hyper_parallel.platform.mindspore import compat

__all__ = ["ActivationWrapper", "CheckpointWrapper", "FuncCell", "SwapWrapper", "checkpoint_wrapper", "swap_wrapper"]

_LOOKED_UP: Final = (
    "_params",
    "_cells",
    "_buffers",
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
)
"""What a new cell has and a wrapper must not: without it, it is found in the wrapped cell."""


class FuncCell(nn.Cell):  # type: ignore[misc]
    """A plain callable as a cell."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(auto_prefix=False)
        if not callable(fn):
            raise TypeError(f"FuncCell: expected a callable, got {fn!r}")
        self.fn = fn

    @property
    def _fn(self) -> Callable[..., Any]:
        """The callable, under its older name."""
        return self.fn

    @_fn.setter
    def _fn(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.fn(*args, **kwargs)


_REGISTRIES: Final = ("_params", "_buffers", "_cells")


class ActivationWrapper(OwnAttributes, nn.Cell):  # type: ignore[misc]
    """The base of our wrappers: everything but ``construct``."""

    _wrapped: Any  # mindspore.nn.Cell
    _own: Any  # mindspore.nn.Cell | None: what a subclass registers on itself; None on classes of ours
    _own_keys: dict[str, str]

    def __init__(self, module: Any) -> None:
        if getattr(type(self).construct, "__isabstractmethod__", False):  # a cell is made in C++, which does not look
            raise TypeError(f"{type(self).__name__}: cannot be made, because it is abstract; give it a construct()")
        if not isinstance(module, nn.Cell):
            if not callable(module):
                raise TypeError(f"{type(self).__name__}: expected a cell or a callable, got {module!r}")
            module = FuncCell(module)
        super().__init__()
        for name in _LOOKED_UP:
            self.__dict__.pop(name, None)
        self.__dict__["requires_grad"] = module.requires_grad
        self.__dict__["_own"] = None if type(self)._is_plain else nn.Cell()
        self.__dict__["_own_keys"] = {}
        self.__dict__["_wrapped"] = module
        self._share()

    def _share(self) -> None:
        if self._own is not None:
            for name in _REGISTRIES:
                self.__dict__[name] = Joined(getattr(self._wrapped, name), getattr(self._own, name), new_is_own=False)

    @abc.abstractmethod
    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped cell in the wrapper's own way."""

    @property
    def _ckpt_wrapped_module(self) -> Any:
        """The cell that this wrapper stands before, under its older name."""
        wrapped: Any = self.__dict__["_wrapped"]
        return wrapped

    @_ckpt_wrapped_module.setter
    def _ckpt_wrapped_module(self, module: Any) -> None:
        self.__dict__["_wrapped"] = module
        self._share()

    @property
    def unwrap_cell(self) -> Any:
        """The innermost cell that wrappers of ours stand before."""
        cell = self.__dict__["_wrapped"]
        return cell.unwrap_cell if isinstance(cell, ActivationWrapper) else cell

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """The wrapped cell's class (see "the class")."""
        cell = self.__dict__.get("_wrapped")
        return type(self) if cell is None else cell.__class__

    # What the wrapper does not own is the wrapped cell's.

    def __getattr__(self, name: str) -> Any:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is None:
            raise AttributeError(name)  # not born yet: MindSpore asks for `bprop`, pickle for more
        if self._own_keys and self._name_of(name) in self._own_keys:
            return getattr(self._own, self._own_keys[self._name_of(name)])
        return getattr(wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is None:
            object.__setattr__(self, name, value)
            return
        name = self._name_of(name)
        if self._has_setter(name):
            object.__setattr__(self, name, value)
        elif not self._owns(name):
            setattr(wrapped, name, value)
        elif self._own is not None and (
            isinstance(value, Parameter | ParameterTuple | nn.Cell | compat.Buffer) or name in self._own_keys
        ):
            self.__dict__.pop(name, None)
            setattr(self._own, self._key_for(name, self._is_taken), value)
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        name = self._name_of(name)
        if name in self.__dict__:
            object.__delattr__(self, name)
        elif name in self._own_keys:
            delattr(self._own, self._own_keys.pop(name))
        else:
            delattr(self._wrapped, name)

    def _is_taken(self, key: str) -> bool:
        return any(key in getattr(self._wrapped, registry) for registry in _REGISTRIES)

    def _place_of(self, name: str) -> tuple[Any, str]:
        """The cell in which ``name`` is registered, and under which key."""
        name = self._name_of(name)
        if self._own is None or not self._owns(name):
            return self._wrapped, name
        return self._own, self._key_for(name, self._is_taken)

    def _cells_inside(self) -> list[Any]:
        """The wrapped cell, and the one with what a subclass registered on itself."""
        return [self._wrapped] if self._own is None else [self._wrapped, self._own]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._own_keys, *dir(self._wrapped)})

    def __getitem__(self, key: Any) -> Any:
        return self._wrapped[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._wrapped[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._wrapped[key]

    def __len__(self) -> int:
        return len(self._wrapped)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._wrapped)

    def __contains__(self, key: Any) -> bool:
        return key in self._wrapped

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._wrapped!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reborn, (type(self),), self.__getstate__()

    def __getstate__(self) -> Any:
        base, own = super().__getstate__()
        return base, {name: value for name, value in own.items() if name not in _REGISTRIES}

    def __setstate__(self, state: Any) -> None:
        base, own = state
        nn.Cell.__bases__[0].__setstate__(self, base)  # the compiled half of a cell
        self.__dict__.clear()
        self.__dict__.update(own)
        self._share()

    # Where a cell class may have its own ways, it is asked for them.

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        """Put ``prefix`` before the names of parameters that do not carry it yet (see "names of parameters")."""
        for cell in self._cells_inside():
            before = [(parameter, parameter.name) for parameter in cell.get_parameters(expand=recurse)]
            cell.update_parameters_name(prefix, recurse)
            if prefix == "":
                continue
            for parameter, name in before:
                if name.endswith(f".{parameter.name}"):
                    parameter.name = name

    def set_train(self, mode: bool = True) -> ActivationWrapper:
        """Set the mode of the wrapped cell."""
        for cell in self._cells_inside():
            cell.set_train(mode)
        return self

    def add_flags(self, **flags: Any) -> ActivationWrapper:
        """Give the wrapped cell these flags."""
        self._wrapped.add_flags(**flags)
        return self

    def add_flags_recursive(self, **flags: Any) -> ActivationWrapper:
        """Give the wrapped cell and its children these flags."""
        for cell in self._cells_inside():
            cell.add_flags_recursive(**flags)
        return self

    def get_flags(self) -> Any:
        """The wrapped cell's flags."""
        return self._wrapped.get_flags()

    def to_float(self, dst_type: Any) -> ActivationWrapper:
        """Let the wrapped cell compute in ``dst_type``."""
        for cell in self._cells_inside():
            cell.to_float(dst_type)
        return self

    def insert_param_to_cell(self, param_name: str, *args: Any, **kwargs: Any) -> None:
        """Give a parameter to the wrapper or the wrapped cell, as the rule says."""
        cell, key = self._place_of(param_name)
        cell.insert_param_to_cell(key, *args, **kwargs)

    def insert_child_to_cell(self, child_name: str, *args: Any, **kwargs: Any) -> None:
        """Give a child to the wrapper or the wrapped cell, as the rule says."""
        cell, key = self._place_of(child_name)
        cell.insert_child_to_cell(key, *args, **kwargs)

    def register_buffer(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Give a buffer to the wrapper or the wrapped cell, as the rule says."""
        cell, key = self._place_of(name)
        cell.register_buffer(key, *args, **kwargs)

    def extend_repr(self) -> str:
        """What the wrapped cell says of itself."""
        return str(self._wrapped.extend_repr())

    def get_extra_state(self) -> Any:
        """The wrapped cell's extra state."""
        return self._wrapped.get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        """Hand it to the wrapped cell."""
        self._wrapped.set_extra_state(state)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        for cell in self._cells_inside():
            cell._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        unknown: list[list[str]] = []
        for cell in reversed(self._cells_inside()):
            unknown.append([])
            cell._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unknown[-1], error_msgs
            )
        unexpected_keys.extend(key for key in unknown[-1] if key in unknown[0])


def _reborn(kind: type[ActivationWrapper]) -> ActivationWrapper:
    """An empty wrapper for pickle and copy to fill."""
    return kind.__new__(kind)


class CheckpointWrapper(ActivationWrapper, is_plain=True):
    """Every call goes through a checkpoint function, ours unless another is given."""

    def __init__(self, module: Any, checkpoint_fn: Callable[..., Any] | None = None, **keywords: Any) -> None:
        super().__init__(module)
        function = checkpoint if checkpoint_fn is None else checkpoint_fn
        taken = CHECKPOINT_SETTINGS | parameter_names(function) | keywords.keys()
        self._settings = (function, keywords, taken)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped cell under the checkpoint function."""
        checkpoint_fn, keywords, taken = self._settings
        region, kwargs = keep_apart(self._wrapped, kwargs, taken)
        return checkpoint_fn(region, *args, **keywords, **kwargs)


class SwapWrapper(ActivationWrapper, is_plain=True):
    """What the wrapped cell saves for backward goes to far memory and comes back in time."""

    def __init__(
        self, mod: Any, policy_fn: TensorPolicy | None = None, *, swap_config: SwapConfig | None = None
    ) -> None:
        super().__init__(mod)
        self._settings = (policy_fn, swap_config)

    @property
    def policy_fn(self) -> TensorPolicy | None:
        """The tensor policy; a new one holds from the next call on."""
        policy: TensorPolicy | None = self._settings[0]
        return policy

    @policy_fn.setter
    def policy_fn(self, policy_fn: TensorPolicy | None) -> None:
        self._settings = (policy_fn, self._settings[1])

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped cell under the swap hooks."""
        policy_fn, swap_config = self._settings
        if not compat.is_recording():
            return self._wrapped(*args, **kwargs)
        region, kwargs = keep_apart(self._wrapped, kwargs, SWAP_SETTINGS)
        return swap(region, *args, policy_fn=policy_fn, swap_config=swap_config, **kwargs)


def checkpoint_wrapper(module: Any, **keywords: Any) -> CheckpointWrapper:
    """See ``hyper_parallel.checkpoint_wrapper``."""
    if keywords.get("use_reentrant"):
        raise ValueError("checkpoint_wrapper: use_reentrant=True is not supported; leave it out or give False")
    return CheckpointWrapper(module, **keywords)


def swap_wrapper(
    module: Any, policy_fn: TensorPolicy | None = None, *, swap_config: SwapConfig | None = None
) -> SwapWrapper:
    """See ``hyper_parallel.swap_wrapper``."""
    return SwapWrapper(module, policy_fn, swap_config=swap_config)
