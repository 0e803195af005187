"""What a user asks for in one line, and putting it on a model. Every adapter ends here.

The options
-----------
``"boundary"``, ``"attention"``, ``"elementwise"``, ``"auto"``: presets of :mod:`hyper_parallel.planner.rules`.
``"swap"``: whatever the blocks save for backward leaves. ``"recompute"``: the blocks are run again.
A mapping of rules, a :class:`~hyper_parallel.planner.plan.Plan`, or a policy ``policy(ctx, op, *args, **kwargs)``.
``budget="20GiB"``, ``"90%"`` or ``"auto"`` instead: a plan is made and measured, for which a step must be run (the trainers'
adapters know theirs). ``store``: a folder of plans, so that a restart plans nothing (see ``hp.fit_memory``); the trainers'
callbacks use the one in the user's cache unless told ``store=None``.

A model's own gradient checkpointing is switched off while it is treated, and on again by ``remove()``: two of them
would decide about the same values, and the user asked for this one.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from hyper_parallel.core.activation_checkpoint.statistics import SwapStats
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import PlanError
from hyper_parallel.planner.backend import Applied, Model, Step
from hyper_parallel.planner.budget import check_budget
from hyper_parallel.planner.fit import apply_plan, fit_memory
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.plan_store import PlanStore, Store
from hyper_parallel.planner.rules import PRESETS, RuleSet, apply_rules

__all__ = ["Treated", "Treatment", "What", "apply"]

What: TypeAlias = str | Mapping[str, str] | Plan | Callable[..., Any]
DEFAULT: Final = "boundary"  # the least memory that is known to work without a measurement
WORDS: Final = (*PRESETS, "swap", "recompute")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Treatment:
    """The options of one line, checked before any model is touched."""

    what: What | None = None
    budget: int | str | None = None
    blocks: str | Sequence[str] | None = None
    store: Store = None  # with a budget: where plans are kept, as in ``fit_memory``

    def __post_init__(self) -> None:
        PlanStore.of(self.store, who="hyper_parallel")
        if self.budget is not None:
            if self.what is not None:
                raise ValueError(
                    f"hyper_parallel: {self.what!r} and budget={self.budget!r} both say what to do; give one of them"
                )
            check_budget(self.budget)
        elif self.what is None:
            object.__setattr__(self, "what", DEFAULT)
        elif isinstance(self.what, str) and self.what not in WORDS:
            close = difflib.get_close_matches(self.what, WORDS, n=2)
            raise ValueError(
                f"hyper_parallel: unknown treatment {self.what!r}; known are {', '.join(WORDS)}"
                f"{'; did you mean ' + ' or '.join(close) + '?' if close else ''}"
            )
        elif isinstance(self.what, Mapping):
            RuleSet.read(self.what)
        elif not isinstance(self.what, str | Plan) and not callable(self.what):
            raise TypeError(
                f"hyper_parallel: expected one of {', '.join(WORDS)}, a mapping of rules, a Plan, a policy, or budget=...; "
                f"got {self.what!r}"
            )

    def put_on(self, model: Model, step: Step | None = None) -> Applied:
        """Put it on one model; on failure the model is as before."""
        if self.budget is not None:
            if step is None:
                raise PlanError(
                    f"hyper_parallel: a budget ({self.budget}) is kept by running the step and measuring it, and no step was "
                    "given. Pass step=..., a callable that runs one forward and backward, or choose a preset instead: "
                    f"{', '.join(PRESETS)}"
                )
            return fit_memory(model, step, self.budget, blocks=self.blocks, store=self.store)
        if isinstance(self.what, Plan):
            return apply_plan(model, self.what)
        if self.what == "recompute":
            return apply_rules(model, {"*::*": "recompute"}, blocks=self.blocks)
        if isinstance(self.what, Mapping) or (isinstance(self.what, str) and self.what in PRESETS):
            return apply_rules(model, self.what, blocks=self.blocks)
        from hyper_parallel.integrations.regions import WithPolicy, replace_blocks, swapped

        region = swapped if self.what == "swap" else WithPolicy(self.what)
        return replace_blocks(model, region, blocks=self.blocks)


class Treated:
    """A treatment on one or more models; a context manager whose end, or ``remove()``, takes it off again."""

    def __init__(self, treatment: Treatment, models: Sequence[Model], step: Step | None = None) -> None:
        self._paused: list[Any] = []  # modules whose own gradient checkpointing was on
        self._handles: list[Applied] = []
        try:
            for model in models:
                self._pause_own_checkpointing(model)
                self._handles.append(treatment.put_on(model, step))
        except BaseException:
            self.remove()
            raise
        self._before = SwapManager().stats()

    @property
    def applied(self) -> tuple[Applied, ...]:
        """What was applied to each model; empty once it was removed."""
        return tuple(self._handles)

    def stats(self) -> SwapStats:
        """What the engine counted since it was applied to all models."""
        return SwapManager().stats().since(self._before)

    def summary(self) -> str:
        """A line for each model: by how much memory fell, and what that cost."""
        return "\n".join(handle.summary() for handle in self._handles)

    def remove(self) -> None:
        """Put the models back as they were; nothing happens the second time."""
        self._remove_handles()
        while self._paused:
            self._paused.pop().gradient_checkpointing = True

    def _remove_handles(self) -> None:
        """Take the treatment off. The models' own gradient checkpointing stays off."""
        while self._handles:
            self._handles.pop().remove()

    def _pause_own_checkpointing(self, model: Model) -> None:
        for module in getattr(model, "modules", tuple)():
            if module.__dict__.get("gradient_checkpointing") is True:
                module.gradient_checkpointing = False
                self._paused.append(module)

    def __enter__(self) -> Treated:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def apply(
    model: Model,
    what: What | None = None,
    *,
    budget: int | str | None = None,
    blocks: str | Sequence[str] | None = None,
    step: Step | None = None,
    store: Store = None,
) -> Treated:
    """Treat a model; the options are those of the module's docstring, ``boundary`` when none is given.

    Raises:
        ValueError, TypeError: options that cannot be read.
        PlanError: the model has no repeated blocks, a rule matches nothing, a budget without a step.
        BudgetTooSmallError: no plan keeps the budget.
    """
    return Treated(Treatment(what=what, budget=budget, blocks=blocks, store=store), [model], step)
