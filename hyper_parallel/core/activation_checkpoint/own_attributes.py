"""Which attributes of a wrapper are its own, and which are the wrapped module's.

Note: the rule
    An attribute is the wrapper's own if one of these holds; any other assignment goes to the wrapped module.

    1. It is set while the wrapper is being made, that is, until the outermost ``__init__`` has returned.
    2. The wrapper's class names it: in its body, as an annotation, or by an assignment ``self.name = ...`` in one of its
       methods. Only classes below ``ActivationWrapper`` count.

    So ``self.scale = 2`` in a subclass stays on the wrapper, also around a module with a ``scale`` of its own and also
    when two such wrappers are nested. And what other code assigns to a wrapped layer (a trainer's
    ``layer.gradient_checkpointing = True``, PEFT's ``layer.q_proj = LoraLinear(...)``) reaches the module. The rule looks
    at the wrapper and the name, never at the caller.

Reading looks at the wrapper first and falls back to the wrapped module.

Note: own parameters, buffers and children
    They are kept in a separate module, so that the wrapped module does not get them, and are shown beside the wrapped
    module's own (:class:`Joined`): they train, move and are saved. The keys of the wrapped module never change. An own
    entry has its plain name as its key; where the wrapped module has an entry of that name already, its key has
    ``wrapper_`` in front. ``wrapper.name`` is the wrapper's own in either case.
"""

from __future__ import annotations

import abc
import dis
import inspect
from collections.abc import Callable, Iterator, MutableMapping
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar

from hyper_parallel.errors import ActivationError

__all__ = ["Joined", "JoinedSet", "OwnAttributes", "joined"]


class _MarksMade(abc.ABCMeta):
    """Marks every wrapper as made when its outermost ``__init__`` has returned (rule 1)."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        if isinstance(made, OwnAttributes):
            made.__dict__["_is_made"] = True
        return made


class OwnAttributes(metaclass=_MarksMade):
    """The rule above, for a wrapper class of either framework.

    A framework's ``ActivationWrapper`` is declared with ``is_base=True``: what it and its bases name is not a subclass's.
    """

    _is_plain: ClassVar[bool] = False  # a class of ours, whose instances own nothing but their settings
    _base_classes: ClassVar[frozenset[type]] = frozenset()
    _named: ClassVar[frozenset[str]] = frozenset()
    _is_made: bool = False

    def __init_subclass__(cls, *, is_base: bool = False, is_plain: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._is_plain = is_plain
        if is_base:
            cls._base_classes = frozenset(cls.__mro__)
        own = (kind for kind in cls.__mro__ if kind not in cls._base_classes)
        cls._named = frozenset(name for kind in own for name in _names_in(kind))

    def _owns(self, name: str) -> bool:
        """Whether an assignment to ``name`` is to the wrapper."""
        own = self.__dict__
        return not self._is_made or name in self._named or name in own or name in own.get("_own_keys", {})

    def _has_setter(self, name: str) -> bool:
        """Whether the wrapper's class has a property, or another descriptor that takes assignments, of that name."""
        return hasattr(type(inspect.getattr_static(type(self), name, None)), "__set__")

    def _name_of(self, name: str) -> str:
        """The attribute that a key stands for; any other name is its own."""
        keys: dict[str, str] = self.__dict__.get("_own_keys", {})
        if name in keys:
            return name
        return next((attribute for attribute, key in keys.items() if key == name), name)

    def _key_for(self, name: str, is_taken: Callable[[str], bool]) -> str:
        """The key of an own parameter, buffer or child, the same from its first registration on."""
        keys: dict[str, str] = self.__dict__["_own_keys"]
        if name not in keys:
            key = name
            while is_taken(key):
                key = f"wrapper_{key}"
            keys[name] = key
        return keys[name]


def _names_in(kind: type) -> set[str]:
    """What a class's body names: its entries, its annotations and what its functions assign through ``self``."""
    names = {name for name in (*vars(kind), *vars(kind).get("__annotations__", {})) if not name.startswith("__")}
    for value in vars(kind).values():
        parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
        for part in parts:
            function = inspect.unwrap(getattr(part, "__func__", part)) if callable(part) else None
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType) and code.co_argcount:
                names |= _assigned(code, code.co_varnames[0])
    return names


def _assigned(code: CodeType, me: str) -> set[str]:
    """The attributes of the local ``me`` that a function assigns, also in functions inside it.

    Python 3.13 gives the same as ``__static_attributes__`` of a class.
    """
    names: set[str] = set()
    found = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    for one, two, three in zip(found, found[1:], [*found[2:], found[-1]]):
        if not one.opname.startswith("LOAD_") or one.argval != me:
            continue
        if two.opname == "STORE_ATTR":
            names.add(two.argval)
        elif two.opname in ("COPY", "DUP_TOP") and three.opname == "LOAD_ATTR":  # self.name += ...
            names.add(three.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and me in constant.co_freevars:
            names |= _assigned(constant, me)
    return names


if TYPE_CHECKING:
    _Mapping = dict[Any, Any]
else:

    class _Mapping(MutableMapping, dict):
        """A dict whose every method goes through the five that a mapping must have."""


def joined(theirs: Any, own: Any, *, new_is_own: bool) -> Joined | JoinedSet:
    """A dict or a set of a module and the same one of the wrapper's own, read as one."""
    if isinstance(theirs, set):
        return JoinedSet(theirs, own)
    return Joined(theirs, own, new_is_own=new_is_own)


class Joined(_Mapping):
    """Two dicts of a module read as one: the wrapped module's, then the wrapper's own.

    Both may change at any time, so each read looks at both. It is an instance of ``dict``, and its contents as a dict are
    brought up to date at each read. A new key is the wrapped module's, or the wrapper's own with ``new_is_own``.
    """

    def __init__(self, theirs: MutableMapping[Any, Any], own: MutableMapping[Any, Any], *, new_is_own: bool) -> None:
        super().__init__()
        self._theirs = theirs
        self._own = own
        self._new_is_own = new_is_own
        self._sync()

    def _sync(self) -> None:
        clash = self._theirs.keys() & self._own.keys()
        if clash:
            raise ActivationError(
                f"ActivationWrapper: cannot show {', '.join(sorted(map(repr, clash)))}, because the wrapped module got an entry "
                "of that name after the wrapper's own. Give one of the two another name."
            )
        dict.clear(self)
        dict.update(self, self._theirs)
        dict.update(self, self._own)

    def _side_of(self, key: Any) -> MutableMapping[Any, Any]:
        if key in self._own or (self._new_is_own and key not in self._theirs):
            return self._own
        return self._theirs

    def __getitem__(self, key: Any) -> Any:
        return self._side_of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._side_of(key)[key] = value
        self._sync()

    def __delitem__(self, key: Any) -> None:
        del self._side_of(key)[key]
        self._sync()

    def __iter__(self) -> Iterator[Any]:
        self._sync()
        return iter([*self._theirs, *self._own])

    def __len__(self) -> int:
        return len(self._theirs) + len(self._own)

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> dict[Any, Any]:
        """A plain dict of both."""
        return dict(self.items())


class JoinedSet(set[str]):
    """Two sets of names read as one; the wrapped module's is the one that other code changes."""

    def __init__(self, theirs: set[str], own: set[str]) -> None:
        super().__init__(theirs | own)
        self._theirs = theirs
        self._own = own

    def __contains__(self, name: object) -> bool:
        return name in self._theirs or name in self._own

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs | self._own)

    def __len__(self) -> int:
        return len(self._theirs | self._own)

    def add(self, name: str) -> None:
        """Add it to the wrapped module's."""
        self._theirs.add(name)

    def discard(self, name: object) -> None:
        """Take it from the wrapped module's."""
        self._theirs.discard(name)
