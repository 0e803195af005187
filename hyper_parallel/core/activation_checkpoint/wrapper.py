"""What the wrappers of both frameworks do in the same way.

A wrapper takes a module's place in the tree. It has no parameters, buffers or children that are not the wrapped module's:
names, ``state_dict``, loading, ``deepcopy`` and pickling are those of the wrapped module, without a prefix that would have
to be removed again. Attributes that the wrapper does not own are read from, and written to, the wrapped module; "the rule"
in ``own_attributes.py`` says which ones it owns.

A framework's ``wrappers.py`` gives its class of modules (:class:`ModuleTraits`), the method that a call reaches (``forward``
or ``construct``) and whatever else only that framework's modules have. "Module" here means ``torch.nn.Module`` or
``mindspore.nn.Cell``.

Note: the class
    Libraries find layers by ``isinstance`` (transformers records hidden states that way, others choose what to shard). So
    ``__class__`` is the wrapped module's class, and ``isinstance`` holds for both. FSDP2 assigns ``__class__`` a new class
    made of its own and the one it read; the setter makes the same out of the wrapper's real class. Any other class that is
    assigned becomes the wrapped module's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeAlias

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import TensorAdapter
from hyper_parallel.core.activation_checkpoint.call_keywords import (
    CHECKPOINT_SETTINGS,
    SWAP_SETTINGS,
    keep_apart,
    parameter_names,
)
from hyper_parallel.core.activation_checkpoint.own_attributes import OwnAttributes, joined
from hyper_parallel.core.activation_checkpoint.setting_checks import (
    check_swap_config,
    check_tensor_policy,
    check_wrapper_keywords,
    label_of,
)

__all__ = ["CheckpointCalls", "FunctionModule", "ModuleTraits", "ModuleWrapper", "SwapCalls", "refuse_reentrant"]

Module: TypeAlias = Any  # torch.nn.Module | mindspore.nn.Cell
TensorPolicy: TypeAlias = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleTraits:
    """What a wrapper must know of a framework's class of modules."""

    base: type
    """``torch.nn.Module`` or ``mindspore.nn.Cell``."""
    noun: str
    """What the framework calls a module, for errors."""
    from_function: Callable[[Callable[..., Any]], Module]
    """Makes a module of a plain callable."""
    registries: tuple[str, ...]
    """The attributes in which a module keeps its parameters, buffers and children."""
    shared: tuple[str, ...]
    """The attributes that a wrapper shares with the wrapped module; the registries are among them."""
    looked_up: tuple[str, ...]
    """What a new module has and a wrapper must not have: without it, it is read from the wrapped module."""
    registered: tuple[type, ...]
    """Values that a module registers when they are assigned to it."""
    tensors: TensorAdapter
    """What the framework knows of tensors and ops."""


class FunctionModule:
    """A plain callable as a module; comes before the framework's class of modules."""

    def __init__(self, fn: Callable[..., Any], **settings: Any) -> None:
        super().__init__(**settings)
        if not callable(fn):
            raise TypeError(f"{type(self).__name__}: expected a callable, got {fn!r}")
        self.fn = fn

    @property
    def _fn(self) -> Callable[..., Any]:
        """The callable, under its older name."""
        return self.fn

    @_fn.setter
    def _fn(self, fn: Callable[..., Any]) -> None:
        self.fn = fn


def _check_callable(who: str, module: Any, traits: ModuleTraits) -> None:
    """Refuse what cannot be one region's function: a class of modules, a container, any other value."""
    if isinstance(module, type) and issubclass(module, traits.base):
        name = module.__name__
        raise TypeError(f"{who}: {name} is a class of {traits.noun}s; wrap one that was made, such as {name}(...)")
    if isinstance(module, list | tuple | dict):
        kind = type(module).__name__
        raise TypeError(f"{who}: expected a {traits.noun} or a callable, got a {kind}; wrap each {traits.noun} in it")
    if not callable(module):
        raise TypeError(f"{who}: expected a {traits.noun} or a callable, got {module!r}")


class ModuleWrapper(OwnAttributes):
    """The base of every wrapper; comes before the framework's class of modules."""

    _wrapper_traits: ClassVar[ModuleTraits]
    _wrapped: Module
    _own: Module | None  # what a subclass registers on itself; None on classes of ours
    _own_keys: dict[str, str]

    def __init__(self, module: Module | Callable[..., Any]) -> None:
        traits = self._wrapper_traits
        if not isinstance(module, traits.base):
            _check_callable(type(self).__name__, module, traits)
            module = traits.from_function(module)
        super().__init__()
        for name in traits.looked_up:
            self.__dict__.pop(name, None)
        self.__dict__["_own"] = None if type(self)._is_plain else traits.base()
        self.__dict__["_own_keys"] = {}
        self.__dict__["_wrapped"] = module
        self._share()

    def _share(self) -> None:
        """Show what the wrapped module has, and beside it what a subclass registered on itself."""
        traits = self._wrapper_traits
        for name in traits.shared:
            theirs = getattr(self._wrapped, name)
            if self._own is not None:
                theirs = joined(theirs, getattr(self._own, name), new_is_own=name not in traits.registries)
            self.__dict__[name] = theirs

    @property
    def _ckpt_wrapped_module(self) -> Module:
        """The wrapped module, under its older name."""
        return self.__dict__["_wrapped"]

    @_ckpt_wrapped_module.setter
    def _ckpt_wrapped_module(self, module: Module) -> None:
        self.__dict__["_wrapped"] = module
        self._share()

    def _innermost(self) -> Module:
        """The module inside all wrappers of ours."""
        module = self.__dict__["_wrapped"]
        return module._innermost() if isinstance(module, ModuleWrapper) else module

    def _modules_inside(self) -> list[Module]:
        """The wrapped module, and the one with what a subclass registered on itself."""
        return [self._wrapped] if self._own is None else [self._wrapped, self._own]

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
        return _empty_wrapper, (type(self),), self.__getstate__()

    def __getstate__(self) -> Any:
        return {name: value for name, value in self.__dict__.items() if name not in self._wrapper_traits.shared}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        self._share()

    # What the wrapper does not own is the wrapped module's.

    def __getattr__(self, name: str) -> Any:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is None or name == "__deepcopy__":
            # The framework's constructor and unpickling read attributes before there is a wrapped module. And a copy of a
            # wrapper is a wrapper, also where the wrapped module's class has its own way to be copied.
            raise AttributeError(name)
        if self._own_keys and self._name_of(name) in self._own_keys:
            return getattr(self._own, self._own_keys[self._name_of(name)])
        return getattr(wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_wrapped" not in self.__dict__:
            super().__setattr__(name, value)
            return
        name = self._name_of(name)
        if self._is_set_on_wrapper(name):
            object.__setattr__(self, name, value)
        elif not self._owns(name):
            setattr(self._wrapped, name, value)
        elif self._own is not None and (
            isinstance(value, self._wrapper_traits.registered) or self._is_registered(name)
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

    def _is_set_on_wrapper(self, name: str) -> bool:
        """Whether an assignment to ``name`` is to the wrapper whatever the rule says."""
        return self._has_setter(name)

    def _is_taken(self, key: str) -> bool:
        return any(key in getattr(self._wrapped, registry) for registry in self._wrapper_traits.registries)

    def _is_registered(self, name: str) -> bool:
        return name in self._own_keys and hasattr(self._own, self._own_keys[name])

    def _register(self, method: str, name: str, *args: Any, **kwargs: Any) -> None:
        """Call a registering method of the wrapped module, or of the wrapper's own module, as the rule says."""
        module, key = self._wrapped, self._name_of(name)
        if self._own is not None and self._owns(key):
            module, key = self._own, self._key_for(key, self._is_taken)
        getattr(module, method)(key, *args, **kwargs)

    def register_buffer(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Register it with the wrapper or the wrapped module, as the rule says."""
        self._register("register_buffer", name, *args, **kwargs)

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

    # Methods that a module class may override: the wrapped module's own are called.

    def get_extra_state(self) -> Any:
        """The wrapped module's extra state."""
        return self._wrapped.get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        """Set the wrapped module's extra state."""
        self._wrapped.set_extra_state(state)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        for module in self._modules_inside():
            module._save_to_state_dict(*args, **kwargs)

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
        for module in reversed(self._modules_inside()):
            unknown.append([])
            module._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unknown[-1], error_msgs
            )
        unexpected_keys.extend(key for key in unknown[-1] if key in unknown[0])


def _empty_wrapper(kind: type[ModuleWrapper]) -> ModuleWrapper:
    """A wrapper without attributes, for pickle and copy to fill."""
    return kind.__new__(kind)


class CheckpointCalls:
    """Calls of the wrapped module go through a checkpoint function; comes before a framework's ``ActivationWrapper``."""

    _checkpoint_function: ClassVar[Callable[..., Any]]  # the framework's, where the constructor is given none
    _wrapped: Module

    def __init__(
        self,
        module: Module | Callable[..., Any],
        checkpoint_fn: Callable[..., Any] | None = None,
        **keywords: Any,
    ) -> None:
        if checkpoint_fn is None:  # else the keywords are those of another function
            tensors = self._wrapper_traits.tensors  # type: ignore[attr-defined]
            keywords = check_wrapper_keywords(module, keywords, tensors)
        super().__init__(module)  # type: ignore[call-arg]
        function = type(self)._checkpoint_function if checkpoint_fn is None else checkpoint_fn
        taken = CHECKPOINT_SETTINGS | parameter_names(function) | keywords.keys()
        self._settings = (function, keywords, taken)

    def _call_checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        checkpoint_fn, keywords, taken = self._settings
        region, kwargs = keep_apart(self._wrapped, kwargs, taken)
        return checkpoint_fn(region, *args, **keywords, **kwargs)


class SwapCalls:
    """Calls of the wrapped module go through a swap function; comes before a framework's ``ActivationWrapper``."""

    _swap_function: ClassVar[Callable[..., Any]]
    _wrapped: Module

    def __init__(
        self,
        mod: Module | Callable[..., Any],
        policy_fn: TensorPolicy | None = None,
        *,
        swap_config: SwapConfig | None = None,
    ) -> None:
        tensors = self._wrapper_traits.tensors  # type: ignore[attr-defined]
        check_tensor_policy(f"swap of {label_of(mod, tensors)}", policy_fn)
        check_swap_config("swap_wrapper", swap_config)
        super().__init__(mod)  # type: ignore[call-arg]
        self._settings = (policy_fn, swap_config)

    @property
    def policy_fn(self) -> TensorPolicy | None:
        """The tensor policy; a new one holds from the next call on."""
        return self._settings[0]

    @policy_fn.setter
    def policy_fn(self, policy_fn: TensorPolicy | None) -> None:
        self._settings = (policy_fn, self._settings[1])

    def _call_swapped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        policy_fn, swap_config = self._settings
        region, kwargs = keep_apart(self._wrapped, kwargs, SWAP_SETTINGS)
        return type(self)._swap_function(region, *args, policy_fn=policy_fn, swap_config=swap_config, **kwargs)


def refuse_reentrant(keywords: dict[str, Any]) -> None:
    """Raise where ``checkpoint_wrapper`` is asked for the reentrant way."""
    if keywords.get("use_reentrant"):
        raise ValueError("checkpoint_wrapper: use_reentrant=True is not supported; leave it out or give False")
