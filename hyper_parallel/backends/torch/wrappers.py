"""Wrappers that leave no trace.

A wrapper takes a module's place in the tree. It *shares* the module's own dictionaries of parameters, buffers, children
and hooks of the state dict, and keeps the module itself outside of them. So names, ``state_dict``, ``.to()``, loading,
``deepcopy`` and pickling are those of the wrapped module, without a prefix that would have to be stripped somewhere.
Attributes that the wrapper does not own are read from, and written to, the wrapped module; which ones a subclass owns
says "the rule" in ``core/activation_checkpoint/own_attributes.py``.

Note: the class
    Libraries find layers by ``isinstance`` (transformers records hidden states that way, others choose what to shard). So
    ``__class__`` answers with the wrapped module's class, and ``isinstance`` holds for both. FSDP2 assigns ``__class__`` a
    new class made of its own and the one it read; the setter makes the same out of the wrapper's real class. Any other class
    is the wrapped module's.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hyper_parallel.backends.torch.checkpointing import checkpoint, swap
from hyper_parallel.backends.torch.saved_tensors import TensorPolicy
from hyper_parallel.backends.torch.tracing import is_exporting, node_of_trace, refuse_script
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.call_keywords import (
    CHECKPOINT_SETTINGS,
    SWAP_SETTINGS,
    keep_apart,
    parameter_names,
)
from hyper_parallel.core.activation_checkpoint.own_attributes import Joined, JoinedSet, OwnAttributes
from hyper_parallel.platform.torch import compat

__all__ = ["ActivationWrapper", "CheckpointWrapper", "FuncModule", "SwapWrapper", "checkpoint_wrapper", "swap_wrapper"]

_SHARED = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class FuncModule(nn.Module):
    """A plain callable as a module."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        if not callable(fn):
            raise TypeError(f"FuncModule: expected a callable, got {fn!r}")
        self.fn = fn

    @property
    def _fn(self) -> Callable[..., Any]:
        """The callable, under its older name."""
        return self.fn

    @_fn.setter
    def _fn(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.fn(*args, **kwargs)


_REGISTRIES = ("_parameters", "_buffers", "_modules")


class ActivationWrapper(OwnAttributes, nn.Module):
    """The base of our wrappers: everything but ``forward``."""

    _wrapped: nn.Module
    _own: nn.Module | None  # what a subclass registers on itself; None on classes of ours
    _own_keys: dict[str, str]
    _OWN = frozenset({"_wrapped", "_compiled_call_impl", "forward"})

    def __init__(self, module: nn.Module | Callable[..., Any]) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            if not callable(module):
                raise TypeError(f"{type(self).__name__}: expected a module or a callable, got {module!r}")
            module = FuncModule(module)
        self.__dict__["_wrapped"] = module
        self.__dict__["_own"] = None if type(self)._is_plain else nn.Module()
        self.__dict__["_own_keys"] = {}
        self.__dict__.pop("training", None)
        self._share()
        compat.share_composable_state(module, self)

    def _share(self) -> None:
        for name in _SHARED:
            theirs = self._wrapped.__dict__[name]
            if self._own is None:
                self.__dict__[name] = theirs
            elif isinstance(theirs, set):
                self.__dict__[name] = JoinedSet(theirs, self._own.__dict__[name])
            else:
                self.__dict__[name] = Joined(theirs, self._own.__dict__[name], new_is_own=name not in _REGISTRIES)

    @abc.abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module in the wrapper's own way."""

    @property
    def _ckpt_wrapped_module(self) -> nn.Module:
        """The module that this wrapper stands before, under its older name."""
        wrapped: nn.Module = self.__dict__["_wrapped"]
        return wrapped

    @_ckpt_wrapped_module.setter
    def _ckpt_wrapped_module(self, module: nn.Module) -> None:
        self.__dict__["_wrapped"] = module
        self._share()

    @property
    def wrapped_module(self) -> nn.Module:
        """The innermost module that wrappers of ours stand before."""
        module = self.__dict__["_wrapped"]
        return module.wrapped_module if isinstance(module, ActivationWrapper) else module

    @property
    def training(self) -> bool:
        """The wrapped module's mode; there is no other."""
        module = self.__dict__.get("_wrapped")
        return True if module is None else module.training

    @training.setter
    def training(self, mode: bool) -> None:
        module = self.__dict__.get("_wrapped")
        if module is not None:  # else torch's own constructor runs
            module.training = mode

    @property
    def __class__(self) -> type[Any]:
        """The wrapped module's class (see "the class")."""
        module = self.__dict__.get("_wrapped")
        return type(self) if module is None else module.__class__

    @__class__.setter
    def __class__(self, new: type[Any]) -> None:
        extra = tuple(base for base in new.__bases__ if base is not self._wrapped.__class__)
        if not extra or len(extra) == len(new.__bases__):
            self._wrapped.__class__ = new  # a parametrization comes or goes: that is a new class of the wrapped module
            return
        own = {name: value for name, value in vars(new).items() if name not in ("__dict__", "__weakref__")}
        object.__dict__["__class__"].__set__(self, type(new.__name__, (*extra, type(self)), own))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reborn, (type(self),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _SHARED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share()

    # What the wrapper does not own is the wrapped module's.

    def __getattr__(self, name: str) -> Any:
        if name in ("_wrapped", "_own", "_own_keys", "__deepcopy__"):
            # not born yet (unpickling asks before there is anything); a copy is a copy of the wrapper
            raise AttributeError(name)
        if self._own_keys and self._name_of(name) in self._own_keys:
            return getattr(self._own, self._own_keys[self._name_of(name)])
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_wrapped" not in self.__dict__:
            super().__setattr__(name, value)
            return
        name = self._name_of(name)
        if name in self._OWN or name == "__class__" or name.startswith("_fsdp") or self._has_setter(name):
            object.__setattr__(self, name, value)
        elif not self._owns(name):
            setattr(self._wrapped, name, value)
        elif self._own is not None and (
            isinstance(value, nn.Parameter | nn.Module | nn.Buffer) or self._is_registered(name)
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
        return any(key in self._wrapped.__dict__[registry] for registry in _REGISTRIES)

    def _is_registered(self, name: str) -> bool:
        key = self._own_keys.get(name)
        return key is not None and any(key in vars(self._own)[registry] for registry in _REGISTRIES)

    def _place_of(self, name: str) -> tuple[nn.Module, str]:
        """The module in which ``name`` is registered, and under which key."""
        name = self._name_of(name)
        if self._own is None or not self._owns(name):
            return self._wrapped, name
        return self._own, self._key_for(name, self._is_taken)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register it with the wrapper or the wrapped module, as the rule says."""
        module, key = self._place_of(name)
        module.register_parameter(key, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Register it with the wrapper or the wrapped module, as the rule says."""
        module, key = self._place_of(name)
        module.register_buffer(key, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Register it with the wrapper or the wrapped module, as the rule says."""
        parent, key = self._place_of(name)
        parent.add_module(key, module)

    def __prepare_scriptable__(self) -> nn.Module:
        refuse_script(self)
        return self

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._own_keys, *dir(self._wrapped)})

    def __getitem__(self, key: Any) -> Any:
        return self._wrapped[key]  # type: ignore[index]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._wrapped[key] = value  # type: ignore[operator]

    def __len__(self) -> int:
        return len(self._wrapped)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._wrapped)  # type: ignore[call-overload,no-any-return]

    def __contains__(self, key: Any) -> bool:
        return key in self._wrapped  # type: ignore[operator]

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._wrapped!r})"

    # Where a module class may have its own ways, they are asked for theirs.

    def train(self, mode: bool = True) -> ActivationWrapper:
        """Set the mode of the wrapped module."""
        self._wrapped.train(mode)
        if self._own is not None:
            self._own.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> ActivationWrapper:
        self._wrapped._apply(fn, recurse)
        if self._own is not None:
            self._own._apply(fn, recurse)
        self._share()
        return self

    def extra_repr(self) -> str:
        """What the wrapped module says of itself."""
        return self._wrapped.extra_repr()

    def get_extra_state(self) -> Any:
        """The wrapped module's extra state."""
        return self._wrapped.get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        """Hand it to the wrapped module."""
        self._wrapped.set_extra_state(state)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._wrapped._save_to_state_dict(destination, prefix, keep_vars)
        if self._own is not None:
            self._own._save_to_state_dict(destination, prefix, keep_vars)

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
        unknown_here: list[str] = []
        unknown_there: list[str] = []
        if self._own is not None:
            self._own._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unknown_here, error_msgs
            )
        self._wrapped._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unknown_there, error_msgs
        )
        unexpected_keys.extend(key for key in unknown_there if self._own is None or key in unknown_here)

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        replica.__dict__["_wrapped"] = self._wrapped._replicate_for_data_parallel()
        if self._own is not None:
            replica.__dict__["_own"] = self._own._replicate_for_data_parallel()
        replica._share()
        return replica


def _reborn(kind: type[ActivationWrapper]) -> ActivationWrapper:
    """An empty wrapper for pickle and copy to fill."""
    return kind.__new__(kind)


class CheckpointWrapper(ActivationWrapper, is_plain=True):
    """Every call goes through a checkpoint function, ours unless another is given."""

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        checkpoint_fn: Callable[..., Any] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(module)
        function = checkpoint if checkpoint_fn is None else checkpoint_fn
        taken = CHECKPOINT_SETTINGS | parameter_names(function) | keywords.keys()
        self._settings = (function, keywords, taken)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module under the checkpoint function."""
        node = node_of_trace(self, args, kwargs)
        if node is not None:
            return node
        if is_exporting():
            return self._wrapped(*args, **kwargs)
        checkpoint_fn, keywords, taken = self._settings
        region, kwargs = keep_apart(self._wrapped, kwargs, taken)
        return checkpoint_fn(region, *args, **keywords, **kwargs)


class SwapWrapper(ActivationWrapper, is_plain=True):
    """What the wrapped module saves for backward goes to far memory and comes back in time."""

    def __init__(
        self,
        mod: nn.Module | Callable[..., Any],
        policy_fn: TensorPolicy | None = None,
        *,
        swap_config: SwapConfig | None = None,
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module under the swap hooks."""
        node = node_of_trace(self, args, kwargs)
        if node is not None:
            return node
        policy_fn, swap_config = self._settings
        if is_exporting() or not torch.is_grad_enabled():
            return self._wrapped(*args, **kwargs)
        region, kwargs = keep_apart(self._wrapped, kwargs, SWAP_SETTINGS)
        return swap(region, *args, policy_fn=policy_fn, swap_config=swap_config, **kwargs)


def checkpoint_wrapper(module: nn.Module | Callable[..., Any], **keywords: Any) -> CheckpointWrapper:
    """See ``hyper_parallel.checkpoint_wrapper``."""
    if keywords.get("use_reentrant"):
        raise ValueError("checkpoint_wrapper: use_reentrant=True is not supported; leave it out or give False")
    return CheckpointWrapper(module, **keywords)


def swap_wrapper(
    module: nn.Module | Callable[..., Any],
    policy_fn: TensorPolicy | None = None,
    *,
    swap_config: SwapConfig | None = None,
) -> SwapWrapper:
    """See ``hyper_parallel.swap_wrapper``."""
    return SwapWrapper(module, policy_fn, swap_config=swap_config)
