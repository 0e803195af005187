"""Wrappers that leave no trace.

A wrapper takes a module's place in the tree. It *shares* the module's own dictionaries of parameters, buffers, children
and hooks of the state dict, and keeps the module itself outside of them. So names, ``state_dict``, ``.to()``, loading,
``deepcopy`` and pickling are those of the wrapped module, without a prefix that would have to be stripped somewhere.
Attributes that the wrapper does not own are read from, and written to, the wrapped module.

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

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.call_keywords import (
    CHECKPOINT_SETTINGS,
    SWAP_SETTINGS,
    keep_apart,
    parameter_names,
)
from hyper_parallel.platform.torch import compat
from hyper_parallel.platform.torch.activation_checkpoint.checkpointing import checkpoint, swap
from hyper_parallel.platform.torch.activation_checkpoint.saved_tensors import TensorPolicy

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.fn(*args, **kwargs)


class ActivationWrapper(nn.Module, abc.ABC):
    """The base of our wrappers: everything but ``forward``."""

    _wrapped: nn.Module
    _OWN = frozenset({"_wrapped", "_settings", "_compiled_call_impl", "forward"})

    def __init__(self, module: nn.Module | Callable[..., Any]) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            if not callable(module):
                raise TypeError(f"{type(self).__name__}: expected a module or a callable, got {module!r}")
            module = FuncModule(module)
        self.__dict__["_wrapped"] = module
        self.__dict__.pop("training", None)
        self._share()
        compat.share_composable_state(module, self)

    def _share(self) -> None:
        for name in _SHARED:
            self.__dict__[name] = self._wrapped.__dict__[name]

    @abc.abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module in the wrapper's own way."""

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

    # What the wrapper does not own is the wrapped module's.

    def __getattr__(self, name: str) -> Any:
        if name in ("_wrapped", "__deepcopy__"):
            # not born yet (unpickling asks before there is anything); a copy is a copy of the wrapper
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN or name == "__class__" or name.startswith("_fsdp") or name in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self._wrapped, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._wrapped)})

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
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> ActivationWrapper:
        self._wrapped._apply(fn, recurse)
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

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._wrapped._load_from_state_dict(*args, **kwargs)

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        replica.__dict__["_wrapped"] = self._wrapped._replicate_for_data_parallel()
        replica._share()
        return replica

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()


def _reborn(kind: type[ActivationWrapper]) -> ActivationWrapper:
    """An empty wrapper for pickle and copy to fill."""
    return kind.__new__(kind)


class CheckpointWrapper(ActivationWrapper):
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
        checkpoint_fn, keywords, taken = self._settings
        region, kwargs = keep_apart(self._wrapped, kwargs, taken)
        return checkpoint_fn(region, *args, **keywords, **kwargs)


class SwapWrapper(ActivationWrapper):
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module under the swap hooks."""
        policy_fn, swap_config = self._settings
        if not torch.is_grad_enabled():
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
