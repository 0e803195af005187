"""What a recomputed region reads beside its inputs: the part that does not depend on the framework.

A :class:`RegionStateBase` is the context of one forward. It finds the modules and objects in reach, remembers their Python state
and the tensors that modules hold, and gives the context of a replay, in which all of that is as forward found it. In reach
are the modules and objects that the function is, is bound to or closes over, and those among its arguments.

An adapter says what its modules, tensors and random sources are, and which tensors must be copied because forward writes them.
"""

from __future__ import annotations

import abc
import collections
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final

from hyper_parallel.core.activation_checkpoint.contexts import Replay
from hyper_parallel.core.activation_checkpoint.python_state import PythonState, RandomSource, objects_in
from hyper_parallel.errors import InPlaceChangeError

__all__ = ["COPIED_BYTES", "SMALL_BYTES", "GeneratorSource", "Place", "RegionStateBase", "changed_in_place"]

COPIED_BYTES: Final = 16 << 20  # of the state of modules, per call of a region
_MISSING: Final = object()  # in place of a tensor that is no longer there
SMALL_BYTES: Final = 64 << 10  # a copy of a buffer of this size may be made or kept although forward does not write it


def changed_in_place(where: str, label: str, op: Any) -> InPlaceChangeError:
    """The error of a replay whose op reads a tensor that is not as forward read it."""
    return InPlaceChangeError(
        f"{where}: cannot recompute, because {label}, which {op} reads, was changed in place after forward read it. "
        "Backward would use other values than forward did. Run backward before the change (an optimizer's step, a "
        "broadcast, an update of running values), or use hp.swap_wrapper here, which recomputes nothing."
    )


class GeneratorSource:
    """A framework's class of random generators, as a :class:`RandomSource`. Its state is a tensor.

    ``hidden`` makes a context in which dispatch modes do not see the ops that read and write a state.
    """

    def __init__(
        self, hidden: Callable[[], AbstractContextManager[None]], are_equal: Callable[[Any, Any], bool]
    ) -> None:
        self._hidden = hidden
        self._are_equal = are_equal

    def read(self, source: Any) -> Any:
        """See :class:`RandomSource`."""
        with self._hidden():
            return source.get_state()

    def write(self, source: Any, state: Any) -> None:
        """See :class:`RandomSource`."""
        with self._hidden():
            source.set_state(state)

    def is_same(self, one: Any, two: Any) -> bool:
        """See :class:`RandomSource`."""
        with self._hidden():
            return self._are_equal(one, two)


class Place:
    """One tensor of a module: where it is, which one it was, and its bytes where forward writes them."""

    __slots__ = ("bytes_before", "key", "names", "owner", "tensor", "version")

    def __init__(self, owner: Any, names: dict[str, Any], key: str, tensor: Any) -> None:
        self.owner = owner
        self.names = names
        self.key = key
        self.tensor = tensor
        self.version = tensor._version
        self.bytes_before: Any = None  # a tensor; None where the replay gets the tensor itself

    def is_changed(self) -> bool:
        """Whether the tensor's version shows a change in place."""
        return bool(self.tensor._version != self.version)

    def is_written(self) -> bool:
        """Whether the place or its tensor was changed."""
        return self.is_changed() or self.names.get(self.key) is not self.tensor

    def label(self, kind: str) -> str:
        """The tensor as errors name it."""
        return f"the {kind} {self.key!r} of {type(self.owner).__name__}, {tuple(self.tensor.shape)} {self.tensor.dtype}"


class RegionStateBase(abc.ABC):
    """The state of one call of a region."""

    def __init__(self, where: str, function: Any, arguments: Iterable[Any], *, keeps_random_state: bool = True) -> None:
        self.where = where
        self._roots = [*objects_in(function, self._is_module), *arguments]
        self._python = PythonState(keeps_random_state=keeps_random_state)
        self._modules: dict[int, Any] = {}
        self._flags: list[tuple[Any, bool]] = []  # whether each module trained
        self._places: list[Place] = []

    # ------------------------------------------------------------------ what an adapter says

    module_class: ClassVar[type]
    tensor_class: ClassVar[type]
    generator_class: ClassVar[type]
    generators: ClassVar[RandomSource]  # how to read the state of a generator of the framework
    random_classes: ClassVar[tuple[type, ...]]  # random sources of Python and numpy that a module may hold
    packages_left_alone: ClassVar[frozenset[str]]  # objects of these packages have no state that forward reads
    packages_without_state: ClassVar[str]  # modules of these packages write no attribute in forward

    _remembered_classes: ClassVar[frozenset[type]]  # attributes of these classes are looked into

    def __init_subclass__(cls) -> None:
        containers = (list, dict, set, collections.deque)
        own = (cls.tensor_class, cls.generator_class)
        cls._remembered_classes = frozenset({*own, *cls.random_classes, *containers, types.FunctionType})

    @abc.abstractmethod
    def _children(self, module: Any) -> Iterable[Any]:
        """The modules that a module holds, or None for an empty place."""

    @abc.abstractmethod
    def _tables(self, module: Any) -> Iterable[dict[str, Any]]:
        """The tables in which a module holds its parameters and its buffers."""

    @abc.abstractmethod
    def _framework_names(self) -> frozenset[str]:
        """The attributes that every module has. They are not looked into."""

    def _names_left_out(self) -> frozenset[str]:
        """The attributes of a module that are neither remembered nor put back."""
        return frozenset()

    @abc.abstractmethod
    def _has_place(self, value: Any) -> bool:
        """Whether a value in a table is a tensor for which a stand-in can take the place."""

    @abc.abstractmethod
    def _is_copied_first(self, place: Place) -> bool:
        """Whether the bytes of a place are copied before forward, because forward may write them unseen."""

    def _take_tensor(self, value: Any) -> bool:
        """Whether this is a tensor, which the Python state leaves alone."""
        return isinstance(value, self.tensor_class)

    def _is_left_alone(self, value: Any) -> bool:
        """Whether an object has no state that forward reads."""
        return type(value).__module__.split(".")[0] in self.packages_left_alone

    def _is_managed(self, tensor: Any) -> bool:
        """Whether the tensor of a place is exchanged by others than the module."""
        return False

    @abc.abstractmethod
    def _copied(self, tensor: Any, place: Place) -> Any:
        """A tensor of the same kind with the same bytes, for the same place."""

    # ------------------------------------------------------------------ forward

    def __enter__(self) -> None:
        """Forward begins."""
        roots, self._roots = self._roots, []
        self._remember(roots)
        num_done = 0
        while num_done < len(self._modules):  # a function that a module holds may close over another one
            for module in tuple(self._modules.values())[num_done:]:
                num_done += 1
                self._remember_module(module)
        self._copy_first()

    def __exit__(self, *exc: object) -> None:
        """Forward has ended."""
        self._python.keep_changes()
        self._modules = {}

    def _copy_first(self) -> None:
        left = COPIED_BYTES
        for place in self._places:
            if self._is_copied_first(place):
                nbytes = place.tensor.nbytes
                if 0 < nbytes <= left:
                    left -= nbytes
                    place.bytes_before = self._copied(place.tensor, place)

    def _remember_module(self, module: Any) -> None:
        """Remember one module's own names and tensors."""
        is_wrapper = bool(self._behind(module))
        if not is_wrapper:
            self._flags.append((module, module.training))
        if not type(module).__module__.startswith(self.packages_without_state):
            self._remember_attributes(module)
        elif not is_wrapper:
            self._remember_tensor_attributes(module)
        for places in () if is_wrapper else self._tables(module):
            for key, value in places.items():
                if self._has_place(value):
                    self._places.append(Place(module, places, key, value))

    def _remember_attributes(self, module: Any) -> None:
        names, framework_names = module.__dict__, self._framework_names()
        self._python.remember_names(names, left_out=self._names_left_out())
        for key, value in names.items():
            kind = type(value)
            if kind not in self._remembered_classes or key in framework_names:
                continue
            if kind is self.tensor_class:
                if self._has_place(value):
                    self._places.append(Place(module, names, key, value))
            elif kind is types.FunctionType:
                self._remember(objects_in(value, self._is_module))
            elif kind is self.generator_class or kind in self.random_classes:
                self._remember((value,))
            else:
                self._remember_items(value)

    def _remember_tensor_attributes(self, module: Any) -> None:
        """Remember the tensors that others set as attributes of a framework's module, such as a weight in place of its own."""
        names = module.__dict__
        for key, value in names.items():
            if type(value) is self.tensor_class and self._has_place(value):
                self._places.append(Place(module, names, key, value))

    def _is_module(self, value: Any) -> bool:
        return isinstance(value, self.module_class)

    def _remember(self, values: Iterable[Any]) -> None:
        self._python.remember(values, is_foreign=self._is_foreign)

    def _remember_items(self, items: Any) -> None:
        """Remember the items of one list, dict, set or deque of a module, and the modules among them."""
        self._python.remember_items(items)
        for item in items.values() if isinstance(items, dict) else items:
            if self._is_module(item):
                self._take_modules(item)

    def _is_foreign(self, value: Any) -> bool:
        """Take over what the Python state must not look into."""
        if self._take_tensor(value):
            return True
        if self._is_module(value):
            self._take_modules(value)
            return True
        if isinstance(value, self.generator_class):
            self._python.remember_source(value, self.generators)
            return True
        return self._is_left_alone(value)

    def _take_modules(self, root: Any) -> None:
        stack = [root]
        while stack:
            module = stack.pop()
            if id(module) not in self._modules:
                self._modules[id(module)] = module
                stack.extend(child for child in self._behind(module) or self._children(module) if child is not None)

    def _behind(self, module: Any) -> list[Any]:
        """The modules that a wrapper of ours stands for. It has no children and no tensors but theirs."""
        hidden = (module.__dict__.get("_wrapped"), module.__dict__.get("_own"))
        return [value for value in hidden if self._is_module(value)]

    # ------------------------------------------------------------------ replay

    def replay(self) -> Replay:
        """The context of a replay: forward's state is in place while it runs."""
        return Replay(self)

    def put_back(self) -> Callable[[], None]:
        """Put forward's state in place. The answer restores what is there now."""
        undo_python = self._python.put_back()
        switched = [(module, trained) for module, trained in self._flags if module.training is not trained]
        for module, trained in switched:
            module.training = trained
        displaced: list[tuple[dict[str, Any], str, Any]] = []
        for place in self._places:
            now = place.names.get(place.key, _MISSING)
            if not self._is_managed(None if now is _MISSING else now) and not self._is_managed(place.tensor):
                before = place.bytes_before
                stand_in = place.tensor if before is None else self._copied(before, place)
                if stand_in is not now:
                    displaced.append((place.names, place.key, now))
                    place.names[place.key] = stand_in

        def undo() -> None:
            for names, key, now in reversed(displaced):
                if now is _MISSING:
                    names.pop(key, None)
                else:
                    names[key] = now
            for module, trained in switched:
                module.training = not trained
            undo_python()

        return undo
