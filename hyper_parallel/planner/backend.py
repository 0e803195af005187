"""What planning needs from a framework: blocks to find, steps to watch, wrappers to put in place. Nothing more.

The planner itself sees records only. The framework's part is in ``hyper_parallel.backends.<framework>.planner`` and is
imported at first use.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    from typing import Self  # not in 3.10

    from hyper_parallel.core.activation_checkpoint.statistics import SwapStats
    from hyper_parallel.planner.budget import DeviceMemory
    from hyper_parallel.planner.plan import Plan
    from hyper_parallel.planner.profile import Profile
    from hyper_parallel.planner.rules import OpTable, RuleSet
    from hyper_parallel.planner.saved import SavedTable
    from hyper_parallel.planner.shared_link import LinkProbe
    from hyper_parallel.planner.step_identity import StepIdentity
    from hyper_parallel.records.step_measure import StepMeasure

__all__ = [
    "Applied",
    "AppliedPlan",
    "AppliedRules",
    "Model",
    "PlannerBackend",
    "Step",
    "framework_in_use",
    "planner_backend",
]

Model: TypeAlias = Any  # torch.nn.Module | mindspore.nn.Cell
Step: TypeAlias = Callable[[], Any]  # one forward and backward


class Applied(Protocol):
    """What was applied to a model: rules, a plan or a treatment. The end of a ``with`` block, or ``remove()``, takes it off."""

    def __enter__(self) -> Self:
        """Nothing more is applied."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The same as :meth:`remove`."""

    def remove(self) -> None:
        """Put the model back as it was; nothing happens the second time."""

    def stats(self) -> SwapStats:
        """What the engine counted since it was applied."""

    def summary(self) -> str:
        """One line: by how much memory falls, and what that costs."""


class AppliedRules(Applied, Protocol):
    """Rules that were applied to a model."""

    def decided(self) -> Mapping[str, int]:
        """How many op instances each rule decided, by its pattern."""

    def num_undecided(self) -> int:
        """How many op instances no rule matched; they were recomputed."""


class AppliedPlan(Applied, Protocol):
    """A plan that was applied to a model."""

    plan: Plan
    measured: StepMeasure | None  # the step under this plan; None where ``fit_memory`` did not measure it
    history: tuple[Mapping[str, Any], ...]  # every plan that ``fit_memory`` measured
    device_bytes: int | None  # ``SwapConfig.device_bytes`` of its regions, where it was given
    stored_at: str | None  # the file of a store of plans that it came from, where nothing was planned

    @property
    def num_regions(self) -> int:
        """How many modules of the model are regions now."""

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the plan and what became of it: JSON for a name that ends in .json, text otherwise."""


class PlannerBackend(Protocol):
    """The framework's part of planning."""

    def apply_rules(
        self, model: Model, rules: RuleSet, *, blocks: str | Sequence[str] | None, step: Step | None
    ) -> AppliedRules:
        """Put regions that follow ``rules`` in the place of the model's blocks."""

    def list_ops(self, model: Model, step: Step, *, blocks: str | Sequence[str] | None) -> OpTable:
        """Every op that a rule can name, as one step ran it."""

    def list_saved(self, model: Model, step: Step) -> SavedTable:
        """What autograd saves in one step; leaves no trace."""

    def profile_memory(
        self,
        model: Model,
        step: Step,
        *,
        blocks: str | Sequence[str] | None,
        steps: int,
        is_guarded: bool = False,
        agrees: Callable[[bool], bool] = bool,
    ) -> Profile:
        """Run the step a few times and write down what it is made of."""

    def apply_plan(self, model: Model, plan: Plan, *, device_bytes: int | None = None) -> AppliedPlan:
        """Put the plan's regions in the place of the model's blocks."""

    def measure_step(
        self,
        model: Model,
        step: Step,
        *,
        steps: int,
        warmup: int = 2,
        is_guarded: bool = False,
        blocks: Sequence[str] = (),
    ) -> StepMeasure:
        """Peak and time of the model as it is now, after ``warmup`` steps; with the names of its blocks also by moment.

        Leaves no trace.
        """

    def guarded(self, model: Model, *, who: str) -> AbstractContextManager[None]:
        """One guard around many trial steps: at its end everything they changed is put back."""

    def device_memory(self, model: Model, *, who: str) -> DeviceMemory:
        """What the model's device can give to this process."""

    def link_probe(self, model: Model, *, who: str) -> LinkProbe:
        """Copies between the model's device and far memory, for their rate."""

    def identify_step(self, model: Model, step: Step, *, blocks: str | Sequence[str] | None) -> StepIdentity | None:
        """Run the step once and write down what a plan for it depends on; None where not even that fits."""

    def world(self) -> Any:
        """The ranks that must agree; None for one process."""


def framework_in_use() -> str:
    """``torch`` or ``mindspore``: the framework of the platform in use."""
    from hyper_parallel.platform.platform import PlatformType, get_platform

    return "torch" if get_platform().platform_type is PlatformType.PYTORCH else "mindspore"


def planner_backend() -> PlannerBackend:
    """The planner's adapter of the platform in use."""
    return cast(PlannerBackend, importlib.import_module(f"hyper_parallel.backends.{framework_in_use()}.planner"))
