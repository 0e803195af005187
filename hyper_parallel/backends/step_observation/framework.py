"""What observing a step needs of a framework, beside its tree of modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

from hyper_parallel.backends.planning.module_tree import Module, ModuleTree
from hyper_parallel.planner.backend import AppliedPlan, AppliedRules, framework_in_use
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.rules import RuleSet

__all__ = ["ObservedFramework", "observed_framework"]


class ObservedFramework(Protocol):
    """One framework, as a step is observed on it."""

    name: str  # "torch", "mindspore"
    version: str
    rest: str  # what a peak is beside the named parts
    how_to_return_gradients: str  # what to do where a step shows no gradients
    how_to_repeat: str  # what to do where two steps give different gradients

    @property
    def tree(self) -> ModuleTree:
        """How modules lie in one another."""

    def require_model(self, model: Any, who: str) -> Module:
        """The model, or an error that says what was given instead."""

    def meter(self, model: Module) -> Any | None:  # planning's Meter
        """The meter of the model's device, a simulated one included; None where activations are in host memory."""

    def is_in_backward(self) -> bool:
        """Whether this thread runs inside a backward."""

    def on_backward(self, value: Any, callback: Callable[..., None]) -> None:
        """Call back once, with any arguments, when the first gradient of one of these tensors is there."""

    def gradients(self, model: Module, result: Any) -> Iterable[tuple[str, Any]]:
        """Names and gradients after a step that returned ``result``; nothing where the step shows none."""

    def bytes_of(self, gradient: Any) -> Any:  # what hashlib takes
        """The values of a gradient in host memory."""

    def peak_parts(self, model: Module, *, is_simulated: bool) -> dict[str, int]:
        """Bytes that are there during the whole step, by name."""

    def checkpoint_wrapper(self, module: Module, *, swap_inputs: bool = False) -> Module:
        """``hp.checkpoint_wrapper`` of the framework."""

    def swap_wrapper(self, module: Module) -> Module:
        """``hp.swap_wrapper`` of the framework."""

    def apply_plan(self, model: Module, plan: Plan) -> AppliedPlan:
        """``hp.apply_plan`` of the framework."""

    def apply_rules(self, model: Module, rules: RuleSet, *, blocks: Sequence[str], step: None) -> AppliedRules:
        """``hp.apply_rules`` of the framework."""


def observed_framework() -> ObservedFramework:
    """The framework of the platform in use."""
    module = importlib.import_module(f"hyper_parallel.backends.{framework_in_use()}.observed_framework")
    return cast(ObservedFramework, module.FRAMEWORK)
