"""The shapes that a module is called with: written down while a step is surveyed, watched while a plan is applied."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from hyper_parallel.backends.planning.framework import Framework
from hyper_parallel.backends.planning.module_tree import Module
from hyper_parallel.config import show_bytes
from hyper_parallel.errors import PlanWarning
from hyper_parallel.planner.step_inputs import InputShape, StepInputs

__all__ = ["InputWatch", "shapes_of"]


def shapes_of(
    framework: Framework, module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[InputShape, ...]:
    """Every tensor that a call gives to a module, by the name of its argument."""
    found: list[InputShape] = []
    for name, value in (*zip(_argument_names(framework, module), args), *kwargs.items()):
        found.extend(_shapes_in(framework, name, value))
    return tuple(found)


def _argument_names(framework: Framework, module: Module) -> Iterator[str]:
    """The names of the positional arguments of the module's forward, and numbers after the last."""
    try:
        parameters = inspect.signature(framework.forward_of(module)).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]  # a forward without a signature
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    yield from names
    at = len(names)
    while True:
        yield f"argument {at}"
        at += 1


def _shapes_in(framework: Framework, name: str, value: Any) -> Iterator[InputShape]:
    if framework.is_tensor(value):
        yield InputShape(name=name, shape=tuple(map(int, value.shape)), dtype=framework.dtype_name(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _shapes_in(framework, f"{name}[{key!r}]", item)
    elif isinstance(value, tuple | list):
        for at, item in enumerate(value):
            yield from _shapes_in(framework, f"{name}[{at}]", item)


class InputWatch:
    """A hook that warns, once, when a module is called with more than the plan was fitted on.

    In a copy of the model, or a pickled one, it does nothing.
    """

    framework: ClassVar[Framework]

    def __init__(self, inputs: StepInputs | None = None, budget_bytes: int = 0) -> None:
        self._inputs = inputs
        self._budget_bytes = budget_bytes
        self._handle: Any = None  # the framework's handle of a hook

    def put_on(self, model: Module) -> None:
        """Watch the module whose inputs are known."""
        assert self._inputs is not None, "an empty watch is only in copies"
        target = _module_at(self.framework, model, self._inputs.module)
        self._handle = target.register_forward_pre_hook(self, with_kwargs=True)

    def remove(self) -> None:
        """Watch no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at one call."""
        framework = self.framework
        if (
            self._inputs is None
            or not framework.is_recording()
            or framework.is_compiling()
            or framework.is_in_backward()
        ):
            return
        longer = self._inputs.longer_in(shapes_of(framework, module, args, kwargs))
        if not longer:
            return
        self._inputs = None  # once
        what = "; ".join(f"{given}, fitted on {fitted.shape}" for fitted, given in longer[:4])
        warnings.warn(
            f"{type(module).__name__}: this batch is longer than the one that its plan was fitted on: {what}. The plan does not "
            f"know what such a step takes, so it may need more than the budget of {show_bytes(self._budget_bytes)}. Fit on the "
            "longest batch of the training (a step that uses it), or pad to the fitted length. This is said once.",
            PlanWarning,
            stacklevel=2,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def _module_at(framework: Framework, model: Module, path: str) -> Module:
    """What is in the tree at this path: the module, or the wrapper in its place."""
    found = model
    for name in path.split(".") if path else ():
        child = framework.tree.children(found)[name]
        assert child is not None, "the plan's model has a module at this path"
        found = child
    return found
