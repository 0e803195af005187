"""What a recomputed region is known by over all its calls.

What one call has shown is relied on in the next: that its tape makes the same values, that no unseen kernel changes what it
keeps. Both depend on the code that runs, and code alone is not enough: ``checkpoint(lambda x: block(x), x)`` has one lambda for
all blocks, and a block with a fused kernel may run the same ops as one without.

A module is one region, whatever it is called with. A function is known by its code, by the modules that it can reach (its
closure, defaults, arguments, bound arguments, the object that it is a method of) and by the plain constants among them, such as
the number of a layer. All but the constants are referred to weakly.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

import torch

__all__ = ["RegionTable", "owner_of"]

_Known = TypeVar("_Known")

_CONSTANTS: Final = (bool, int, str, type(None))
_DEEPEST: Final = 6
_MOST_ITEMS: Final = 64  # of one container
_MOST_PARTS: Final = 512
_MOST_CONSTANTS: Final = 256  # of one function; behind them its calls are one region, whatever their constants
_ANY: Final = ("any",)
_FORWARD: Final = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})


def owner_of(function: Callable[..., Any]) -> Any:
    """The module whose method a region runs, or the function itself."""
    if isinstance(function, torch.nn.Module):  # which takes long to say that it has no such attribute
        return function
    return getattr(function, "__self__", function)


class _Branch(Generic[_Known]):
    """What is known of the regions whose first parts are the same."""

    def __init__(self) -> None:
        self.by_constants: dict[tuple[Any, ...], _Known] = {}
        self.branches: _ByIdentity[_Known] = _ByIdentity()  # by the next part


class _ByIdentity(Generic[_Known]):
    """Branches by objects that are referred to weakly. Objects are compared by identity: a module may define ``==``.

    Torch's table of this kind asks each key for an attribute that no module has, which takes a module a microsecond to say.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], _Branch[_Known]]] = {}

    def get(self, part: Any) -> _Branch[_Known] | None:
        """The branch of an object, if it has one."""
        found = self._known.get(id(part))
        return found[1] if found is not None and found[0]() is part else None

    def add(self, part: Any) -> _Branch[_Known]:
        """A new branch, for as long as the object lives. Raises ``TypeError`` where it cannot be referred to weakly."""
        key, table = id(part), weakref.ref(self)

        def forget(dead: weakref.ref[Any]) -> None:  # called before the memory of the object can be another one's
            living = table()
            if living is not None and (found := living._known.get(key)) is not None and found[0] is dead:
                del living._known[key]

        branch: _Branch[_Known] = _Branch()
        self._known[key] = (weakref.ref(part, forget), branch)
        return branch

    def parts(self) -> Iterator[Any]:
        """The objects that live."""
        for reference, _ in list(self._known.values()):
            part = reference()
            if part is not None:
                yield part


class RegionTable(Generic[_Known]):
    """One value for each region."""

    def __init__(self) -> None:
        self._root: _Branch[_Known] = _Branch()
        self._lock = threading.Lock()

    def find(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        new: Callable[[], _Known],
        *,
        is_stored: Callable[[Any], bool] = lambda _: True,
    ) -> _Known:
        """The value of the region that this call runs; made by ``new`` at its first call.

        ``is_stored`` answers for the region's owner: False makes a new value in every call. Raises ``TypeError`` where the
        function cannot be referred to weakly.
        """
        parts = _Parts(function, args, kwargs)
        with self._lock:
            branch = self._root
            for part in parts.referents:
                branch = branch.branches.get(part) or branch.branches.add(part)
            constants = tuple(parts.constants)
            if constants not in branch.by_constants and len(branch.by_constants) >= _MOST_CONSTANTS:
                constants = _ANY
            known = branch.by_constants.get(constants)
            if known is None:
                known = new()
                if is_stored(owner_of(function)):
                    branch.by_constants[constants] = known
            return known

    def of_module(self, module: torch.nn.Module) -> _Known | None:
        """The value of a module's forward, if it has one."""
        with self._lock:
            branch = self._root.branches.get(module)
            return None if branch is None else branch.by_constants.get(())

    def modules(self) -> list[torch.nn.Module]:
        """The modules that are regions."""
        with self._lock:
            return [part for part in self._root.branches.parts() if isinstance(part, torch.nn.Module)]


class _Parts:
    """What a call of a region is made of."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.referents: list[Any] = []
        self.constants: list[Any] = []
        self._num_left = _MOST_PARTS
        owner = owner_of(function)
        if isinstance(owner, torch.nn.Module):
            self.referents.append(owner)
            name = getattr(function, "__name__", None)
            if owner is not function and isinstance(function, types.MethodType) and name not in _FORWARD:
                self.constants.append(name)
            return
        if not self._add_code(function, 0):
            self.referents.append(function)
        self._add(args, 1)
        self._add(kwargs, 1)

    def _add_code(self, function: Any, depth: int) -> bool:
        """Add a function and what it can reach. False: it has no code in Python."""
        if isinstance(function, functools.partial):
            self._add_each((function.func, function.args, function.keywords), depth)
            return True
        if isinstance(function, types.MethodType):
            self._add_each((function.__func__, function.__self__), depth)
            return True
        if not isinstance(function, types.FunctionType):
            return False
        self.referents.append(function.__code__)
        self._add_each((_cells_of(function), function.__defaults__, function.__kwdefaults__), depth)
        return True

    def _add_each(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self._add(value, depth + 1)

    def _add(self, value: Any, depth: int) -> None:
        self._num_left -= 1
        if isinstance(value, torch.Tensor) or depth > _DEEPEST or self._num_left < 0:
            return
        if isinstance(value, _CONSTANTS):
            self.constants.append(value)
        elif isinstance(value, torch.nn.Module):
            self.referents.append(value)
        elif isinstance(value, list | tuple):
            self._add_each(value[:_MOST_ITEMS], depth)
        elif isinstance(value, dict):
            self._add_each(list(value.values())[:_MOST_ITEMS], depth)
        elif not self._add_code(value, depth) and _holds_modules(value):
            self.referents.append(value)


def _cells_of(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is filled later
            continue
    return found


def _holds_modules(value: Any) -> bool:
    """Whether it is an object such as a trainer. Other objects may be new in every step."""
    return any(isinstance(held, torch.nn.Module) for held in getattr(value, "__dict__", {}).values())
