"""What a recomputed region reads beside its inputs: the part that does not depend on the framework.

A :class:`RegionStateBase` is the context of one forward. It finds the modules and objects in reach, notes their Python state
and the tensors that modules hold, and gives the context of a replay, in which all of that is as forward found it. In reach
are the modules and objects that the function is, is bound to or closes over, and those among its arguments.

An adapter says what its modules, tensors and random sources are, and which tensors must be copied because forward writes them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import Any

from hyper_parallel.core.activation_checkpoint.contexts import Replay
from hyper_parallel.core.activation_checkpoint.python_state import PythonState, RandomSource, objects_in
from hyper_parallel.errors import InPlaceChangeError

__all__ = ["Place", "RegionStateBase", "changed_in_place"]


def changed_in_place(where: str, label: str, op: Any) -> InPlaceChangeError:
    """The error of a replay whose op reads a tensor that is not as forward read it."""
    return InPlaceChangeError(
        f"{where}: cannot recompute, because {label}, which {op} reads, was changed in place after forward read it. "
        "Backward would use other values than forward did. Run backward before the change (an optimizer's step, a "
        "broadcast, an update of running values), or use hp.swap_wrapper here, which recomputes nothing."
    )


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

    @abc.abstractmethod
    def _is_module(self, value: Any) -> bool:
        """Whether this is a module of the framework."""

    @abc.abstractmethod
    def _children(self, module: Any) -> Iterable[Any]:
        """The modules that a module holds, or None for an empty place."""

    @abc.abstractmethod
    def _note_module(self, module: Any) -> None:
        """Note one module's own names and tensors."""

    @abc.abstractmethod
    def _take_tensor(self, value: Any) -> bool:
        """Whether this is a tensor, which the Python state leaves alone."""

    @abc.abstractmethod
    def _random_source_of(self, value: Any) -> RandomSource | None:
        """How to read the state of a random source of the framework."""

    @abc.abstractmethod
    def _is_left_alone(self, value: Any) -> bool:
        """Whether an object has no state that forward reads."""

    @abc.abstractmethod
    def _is_managed(self, tensor: Any) -> bool:
        """Whether somebody else exchanges the tensor of a place."""

    @abc.abstractmethod
    def _copied(self, tensor: Any, place: Place) -> Any:
        """A tensor of the same kind with the same bytes, for the same place."""

    # ------------------------------------------------------------------ forward

    def __enter__(self) -> None:
        """Forward begins."""
        roots, self._roots = self._roots, []
        self._note(roots)
        noted = 0
        while noted < len(self._modules):  # a function that a module holds may close over another one
            for module in tuple(self._modules.values())[noted:]:
                noted += 1
                self._note_module(module)

    def __exit__(self, *exc: object) -> None:
        """Forward has ended."""
        self._python.keep_changes()
        self._modules = {}

    def _note(self, values: Iterable[Any]) -> None:
        self._python.note(values, is_foreign=self._is_foreign)

    def _note_items(self, items: Any) -> None:
        """Note the items of one list, dict, set or deque of a module, and the modules among them."""
        self._python.note_items(items)
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
        source = self._random_source_of(value)
        if source is not None:
            self._python.note_source(value, source)
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
            now = place.names.get(place.key)
            if not self._is_managed(now) and not self._is_managed(place.tensor):
                before = place.bytes_before
                stand_in = place.tensor if before is None else self._copied(before, place)
                if stand_in is not now:
                    displaced.append((place.names, place.key, now))
                    place.names[place.key] = stand_in

        def undo() -> None:
            for names, key, now in reversed(displaced):
                names[key] = now
            for module, trained in switched:
                module.training = not trained
            undo_python()

        return undo
