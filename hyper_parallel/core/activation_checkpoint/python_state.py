"""The Python state that a region's function finds and changes: remembered before forward, put back around a replay.

A replay runs the user's Python a second time. Without care it would find a list that is already popped, a counter that
is already raised, a random source that has already drawn, and it would change them once more.

1. When forward begins, the state in reach is remembered: attributes, the items of lists, dicts, sets and deques, random
   sources. Values are not copied, only what refers to them.
2. When forward has ended, of what was there before only what forward changed is held, and numbers and strings.
3. A replay begins with that state. When it ends the state of the moment before it is put back, also where forward changed nothing
   in the end: a replay may stop early, between a change and its opposite.

So forward's changes happen once, and a replay reads what forward read. In reach are the objects that :meth:`PythonState.remember`
is given and, four levels deep, what they refer to. Knows no framework: tensors and modules are left to the caller.
"""

from __future__ import annotations

import collections
import enum
import functools
import operator
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

__all__ = ["PythonState", "RandomSource", "objects_in"]

_MISSING: Final = object()
_DEEPEST: Final = 4
_MOST_OBJECTS: Final = 2000  # a graph of objects larger than this is not followed to its end
_VALUES: Final = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), slice, range, type, types.FunctionType,
     types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.CodeType}
)  # fmt: skip

_HELD: Final = frozenset({int, float, complex, bool, str, bytes, type(None)})
"""Values that are held although forward left them alone: they are small, and others may change them before the replay."""

Undo = Callable[[], None]


class RandomSource(Protocol):
    """How to read and set the state of one kind of random source."""

    def read(self, source: Any) -> Any:
        """The state, in a form that later draws do not change."""

    def write(self, source: Any, state: Any) -> None:
        """Continue from a state."""

    def is_same(self, one: Any, two: Any) -> bool:
        """Whether nothing was drawn between two states."""


class _Remembered(Protocol):
    def keep_changes(self) -> bool:
        """Hold no more of what forward left alone; False when there is nothing to do in a replay."""

    def put_back(self) -> Undo:
        """Put the remembered state in place; the answer restores what was there."""


class _Names:
    """The names of one object's ``__dict__``, of a module's, or the items of a dict."""

    __slots__ = ("_before", "_is_open", "_known", "_left_out", "_names")

    def __init__(self, names: dict[Any, Any], left_out: frozenset[str] = frozenset()) -> None:
        self._names = names
        self._left_out = left_out  # what these names hold is neither remembered nor put back
        self._before = dict(names)  # all of it; after forward, what a replay may find changed
        self._known: tuple[Any, ...] = ()  # after forward: the names that it found, in their order
        self._is_open = True

    def keep_changes(self) -> bool:
        if not self._is_open:
            return True
        self._is_open = False
        before, now = self._before, self._names
        if self._left_out:
            before.update((name, now[name]) for name in self._left_out if name in now)
        self._known = tuple(before)
        self._before = {
            name: value
            for name, value in before.items()
            if type(value) in _HELD or now.get(name, _MISSING) is not value
        }
        return True

    def put_back(self) -> Undo:
        names, now = self._names, dict(self._names)
        if self._is_open:
            wanted = dict(self._before)
        else:
            wanted = {name: self._before.get(name, now.get(name, _MISSING)) for name in self._known}
            if not all(name in now for name in self._known):
                wanted = {name: value for name, value in wanted.items() if value is not _MISSING}
        if self._left_out:
            wanted.update((name, now[name]) for name in self._left_out if name in now)
        if not _is_same(wanted, now):
            _restore(names, wanted)
        return functools.partial(self._return_to, now)

    def _return_to(self, now: dict[Any, Any]) -> None:
        if self._left_out:
            now.update((name, self._names[name]) for name in self._left_out if name in self._names)
        if not _is_same(now, self._names):
            _restore(self._names, now)


def _is_same(one: dict[Any, Any], two: dict[Any, Any]) -> bool:
    return (
        len(one) == len(two) and all(map(operator.is_, one, two)) and all(map(operator.is_, one.values(), two.values()))
    )


def _restore(names: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    """Make ``names`` equal to ``wanted``, in its order. A dict in use, such as a module's, is never emptied for that."""
    for name in [name for name in names if name not in wanted]:
        del names[name]
    is_ordered = all(map(operator.is_, names, wanted)) and len(names) == len(wanted)
    for name, value in wanted.items():
        if not is_ordered:
            names.pop(name, None)
            names[name] = value
        elif names[name] is not value:
            names[name] = value


class _Items:
    """The items of one list, set or deque."""

    __slots__ = ("_before", "_first", "_is_open", "_items")

    def __init__(self, items: Any) -> None:
        self._items = items
        self._before: tuple[Any, ...] | None = tuple(items)  # None: only their number is known, see ``_first``
        self._first = len(items)
        self._is_open = True

    def keep_changes(self) -> bool:
        if not self._is_open:
            return True
        self._is_open = False
        before, now = self._before, tuple(self._items)
        assert before is not None, "remembered before forward"
        is_kept = len(before) <= len(now) and all(map(operator.is_, before, now)) and not isinstance(self._items, set)
        if is_kept and not all(type(item) in _HELD for item in before):
            self._before = None  # forward changed none of them, and a step's tensors must not be held for that
        return True

    def put_back(self) -> Undo:
        items, now = self._items, tuple(self._items)
        _fill(items, now[: self._first] if self._before is None else self._before)
        return functools.partial(_fill, items, now)


def _fill(items: Any, wanted: tuple[Any, ...]) -> None:
    if len(items) == len(wanted) and all(map(operator.is_, items, wanted)):
        return
    items.clear()
    if isinstance(items, set):
        items.update(wanted)
    else:
        items.extend(wanted)


_DICTS: Final = frozenset({dict, collections.defaultdict, collections.OrderedDict})
_SEQUENCES: Final = frozenset({list, set, collections.deque})


class _Draws:
    """One random source."""

    __slots__ = ("_before", "_how", "_source")

    def __init__(self, source: Any, how: RandomSource) -> None:
        self._source = source
        self._how = how
        self._before = how.read(source)

    def keep_changes(self) -> bool:
        return not self._how.is_same(self._before, self._how.read(self._source))

    def put_back(self) -> Undo:
        now = self._how.read(self._source)
        self._how.write(self._source, self._before)
        return lambda: self._how.write(self._source, now)


class _PythonRandom:
    """``random``'s own functions, and ``random.Random``."""

    def read(self, source: Any) -> Any:
        return source.getstate()

    def write(self, source: Any, state: Any) -> None:
        source.setstate(state)

    def is_same(self, one: Any, two: Any) -> bool:
        return bool(one == two)


class _NumpyStream:
    """``numpy.random``'s own functions, and ``numpy.random.RandomState``."""

    def read(self, source: Any) -> Any:
        return source.get_state()

    def write(self, source: Any, state: Any) -> None:
        source.set_state(state)

    def is_same(self, one: Any, two: Any) -> bool:  # (name, keys, position, has_gauss, gauss)
        return bool(one[0] == two[0] and one[2:] == two[2:] and one[1].tobytes() == two[1].tobytes())


class _NumpyGenerator:
    """``numpy.random.Generator``."""

    def read(self, source: Any) -> Any:
        return source.bit_generator.state

    def write(self, source: Any, state: Any) -> None:
        source.bit_generator.state = state

    def is_same(self, one: Any, two: Any) -> bool:
        return repr(one) == repr(two)


_PYTHON_RANDOM: Final = _PythonRandom()
_NUMPY_STREAM: Final = _NumpyStream()
_NUMPY_GENERATOR: Final = _NumpyGenerator()


def _random_source_of(value: Any) -> RandomSource | None:
    package = type(value).__module__.partition(".")[0]
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else _PYTHON_RANDOM
    if package == "numpy":
        numpy_random = sys.modules["numpy"].random
        if isinstance(value, numpy_random.Generator):
            return _NUMPY_GENERATOR
        if isinstance(value, numpy_random.RandomState):
            return _NUMPY_STREAM
    return None


def _is_of_python(kind: type) -> bool:
    """Whether an object is the standard library's: an event, a lock, a queue or a logger is not a model's state."""
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind not in _OPEN


_OPEN: Final = frozenset({types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap})
"""Classes of the standard library whose objects hold what a model puts there."""


@functools.lru_cache(maxsize=256)
def _slots_of(kind: type) -> tuple[str, ...]:
    """The names that the classes of an object keep in slots."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        for name in names:
            mangled = (
                f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            )
            if isinstance(vars(base).get(mangled), types.MemberDescriptorType):
                found.append(mangled)
    return tuple(found)


class _Slots:
    """The names that an object keeps in slots."""

    __slots__ = ("_before", "_is_open", "_names", "_object")

    def __init__(self, value: Any, names: tuple[str, ...]) -> None:
        self._object = value
        self._names = names
        self._before = self._now()  # all of them; after forward, what a replay may find changed
        self._is_open = True

    def _now(self) -> dict[str, Any]:
        return {name: getattr(self._object, name, _MISSING) for name in self._names}

    def values(self) -> tuple[Any, ...]:
        return tuple(value for value in self._before.values() if value is not _MISSING)

    def keep_changes(self) -> bool:
        if self._is_open:
            self._is_open = False
            now = self._now()
            self._before = {
                name: value for name, value in self._before.items() if value is not now[name] or type(value) in _HELD
            }
        return True

    def put_back(self) -> Undo:
        now = self._now()
        self._fill(self._before)
        return functools.partial(self._fill, now)

    def _fill(self, wanted: dict[str, Any]) -> None:
        for name, value in wanted.items():
            if value is not _MISSING:
                object.__setattr__(self._object, name, value)
            elif getattr(self._object, name, _MISSING) is not _MISSING:
                object.__delattr__(self._object, name)


class PythonState:
    """What was remembered of one forward."""

    def __init__(self, *, keeps_random_state: bool = True) -> None:
        self._keeps_random_state = keeps_random_state  # False: random sources go on from where they are
        self._remembered: list[_Remembered] = []
        self._seen: dict[int, Any] = {}  # holds the objects while it exists, so that an id names one of them

    def remember(self, values: Iterable[Any], *, is_foreign: Callable[[Any], bool], depth: int = 0) -> None:
        """Remember the state of these objects and of what they refer to.

        ``is_foreign`` says which are tensors, modules and other objects that the caller looks after; they are not opened. It is
        not kept: a method of the caller's would make a cycle that lives until a collection.
        """
        for value in values:
            kind = type(value)
            if kind in _VALUES or depth > _DEEPEST or len(self._remembered) >= _MOST_OBJECTS:
                continue
            if kind is tuple:
                self.remember(value, is_foreign=is_foreign, depth=depth)
            elif id(value) not in self._seen and not is_foreign(value):
                self._seen[id(value)] = value
                inner = self._remember_object(value, kind)
                self.remember(inner, is_foreign=is_foreign, depth=depth + 1)

    def _remember_object(self, value: Any, kind: type) -> tuple[Any, ...]:
        """Remember one object; the answer is what it refers to."""
        if kind in _DICTS:
            self._remembered.append(_Names(value))
            return tuple(value.values())
        if kind in _SEQUENCES:
            self._remembered.append(_Items(value))
            return tuple(value)
        source = _random_source_of(value)
        if source is not None:
            if self._keeps_random_state:
                self._remembered.append(_Draws(value, source))
            return ()
        if isinstance(value, type | enum.Enum) or _is_of_python(kind):
            return ()
        return (*self._remember_slots(value, kind), *self._remember_dict(value))

    def _remember_slots(self, value: Any, kind: type) -> tuple[Any, ...]:
        slots = _slots_of(kind)
        if not slots:
            return ()
        state = _Slots(value, slots)
        self._remembered.append(state)
        return state.values()

    def _remember_dict(self, value: Any) -> tuple[Any, ...]:
        names = getattr(value, "__dict__", None)
        if type(names) is not dict:
            return ()
        self._remembered.append(_Names(names))
        return tuple(names.values())

    def remember_names(self, names: dict[str, Any], *, left_out: frozenset[str] = frozenset()) -> None:
        """Remember the names of one ``__dict__`` but those in ``left_out``, and nothing that they refer to."""
        self._remembered.append(_Names(names, left_out))

    def remember_items(self, items: Any) -> None:
        """Remember the items of one list, dict or set, and nothing that they refer to."""
        self._remembered.append(_Names(items) if isinstance(items, dict) else _Items(items))

    def remember_source(self, source: Any, how: RandomSource) -> None:
        """Remember a random source of a framework."""
        if self._keeps_random_state and id(source) not in self._seen:
            self._seen[id(source)] = source
            self._remembered.append(_Draws(source, how))

    def remember_global_draws(self) -> None:
        """Remember the streams of ``random`` and ``numpy.random``."""
        self.remember_source(random, _PYTHON_RANDOM)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self.remember_source(numpy.random, _NUMPY_STREAM)

    def keep_changes(self) -> None:
        """Forward has ended: hold no more of what it left alone."""
        self._remembered = [state for state in self._remembered if state.keep_changes()]
        self._seen = {}

    def put_back(self) -> Undo:
        """Put the remembered state in place for a replay; the answer restores what was there before."""
        undone: list[Undo] = []
        try:
            for state in self._remembered:
                undone.append(state.put_back())
        except BaseException:
            _undo(undone)
            raise
        return lambda: _undo(undone)


def _undo(undone: list[Undo]) -> None:
    while undone:
        undone.pop()()


def objects_in(function: Any, is_module: Callable[[Any], bool]) -> Iterator[Any]:
    """The modules and objects that a function can reach without a global name."""
    if is_module(function):
        yield function
        return
    if isinstance(function, functools.partial):
        yield from objects_in(function.func, is_module)
        yield from function.args
        yield from function.keywords.values()
        return
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield owner
    is_ours = str(getattr(function, "__module__", "")).startswith("hyper_parallel.")
    for cell in getattr(getattr(function, "__func__", function), "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if callable(value) and not is_module(value):
            yield from objects_in(value, is_module)
        elif not is_ours or is_module(value):
            yield value
