"""A folder of plans that were fitted before, so that a restart of the same training plans nothing.

A file of the store is a plan's own file (``Plan.save``); its name is made of everything that the plan depends on: the
model, the shapes of the step, the device, the releases, the settings and the budget. Anything that differs makes another
name, and then the plan is made anew. A file is used only if it says itself that it was made for all of this, and if what
lies on the device between two steps is as it was; a file that cannot be read is ignored with one warning.

In a distributed run only the first rank reads and writes; the other ranks get its plan.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from hyper_parallel.config import show_bytes
from hyper_parallel.errors import PlanError, PlanWarning
from hyper_parallel.planner.backend import AppliedPlan, Model, PlannerBackend, Step
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.step_identity import FittedStep, StepIdentity

__all__ = ["DEFAULT", "PlanStore", "Store", "fit_with_store"]

Store: TypeAlias = bool | str | os.PathLike[str] | None
DEFAULT: Final = "default"
_LOGGER: Final = logging.getLogger("hyper_parallel.planner")
_OTHER_BASE: Final = 0.01  # of the budget: a larger change of what is there between steps asks for another plan
_MORE_MEMORY: Final = 1.05  # a share that is this much more bytes than before asks for another plan


class PlanStore:
    """One folder of plans."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, store: Store, *, who: str = "fit_memory") -> PlanStore | None:
        """The store that a person named; None for none."""
        if store is None or store is False:
            return None
        if store is True or store == DEFAULT:
            return cls(_default_folder())
        if not isinstance(store, str | os.PathLike) or not os.fspath(store):
            raise TypeError(
                f"{who}: store is a folder for plans, True for the one in the user's cache, or None for no store; got {store!r}"
            )
        folder = Path(store)
        if os.path.isfile(folder):
            raise ValueError(f"{who}: store {str(folder)!r} is a file; name a folder, which is made if it is not there")
        return cls(folder)

    def path_of(self, identity: StepIdentity) -> Path:
        """The file for this identity."""
        return self.folder / f"plan-{identity.key()}.json"

    def load(self, identity: StepIdentity, budget_bytes: int) -> Plan | None:
        """The plan that was fitted to the same; None where there is none that can be used."""
        path = self.path_of(identity)
        if not os.path.exists(path):
            return None
        try:
            plan = Plan.load(path)
        except PlanError as error:
            _warn(f"{path} is ignored, and the plan is made anew: {error}")
            return None
        if plan.fitted is None or plan.fitted.facts != identity.facts:
            _warn(f"{path} is ignored, and the plan is made anew: it is a plan for something else than its name says.")
            return None
        reason = _why_not(plan, plan.fitted, identity, budget_bytes)
        if reason:
            _LOGGER.info("hyper_parallel: %s is not used, and the plan is made anew: %s", path, reason)
            return None
        return plan

    def save(self, plan: Plan, identity: StepIdentity) -> None:
        """Write a plan; a store that cannot be written does not stop a training."""
        path = self.path_of(identity)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            plan.save(path)
        except (OSError, ValueError) as error:
            _warn(f"the plan could not be kept in {path}: {error}. It is in use; the next start plans again.")


def _why_not(plan: Plan, fitted: FittedStep, identity: StepIdentity, budget_bytes: int) -> str:
    """Why a plan for the same facts does not fit the memory of now; empty where it does."""
    more = identity.base_bytes - fitted.base_bytes
    if abs(more) > _OTHER_BASE * budget_bytes:
        return f"{show_bytes(identity.base_bytes)} lie on the device between two steps, and {show_bytes(fitted.base_bytes)} did"
    peak = max(plan.predicted_peak_bytes, fitted.measured.peak_bytes) + max(0, more)
    if peak > budget_bytes:
        return f"its peak of {show_bytes(peak)} is above the {show_bytes(budget_bytes)} of now"
    if budget_bytes > _MORE_MEMORY * plan.budget_bytes:
        return f"it was made for {show_bytes(plan.budget_bytes)}, and there are {show_bytes(budget_bytes)} now"
    return ""


def _default_folder() -> Path:
    """``HYPER_PARALLEL_PLAN_STORE``, else a folder in the user's cache (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    named = os.environ.get("HYPER_PARALLEL_PLAN_STORE")
    if named:
        return Path(named)
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise ValueError(
            f"fit_memory: there is no default store, because {error}; name a folder: store=... or HYPER_PARALLEL_PLAN_STORE"
        ) from None
    return Path(cache) / "hyper_parallel" / "plans"


def _warn(text: str) -> None:
    warnings.warn(f"fit_memory: {text}", PlanWarning, stacklevel=4)


def fit_with_store(
    store: PlanStore,
    backend: PlannerBackend,
    model: Model,
    step: Step,
    *,
    blocks: str | Sequence[str] | None,
    budget_bytes: int,
    question: Sequence[str],
    search: Callable[[], AppliedPlan],
) -> AppliedPlan:
    """Apply the plan that was fitted to this very step before; where there is none, ``search`` for one and keep it.

    ``question``: what else the answer depends on, in words: the budget as it was written, the settings of the search.
    """
    ranks = backend.world()
    identity = _identity(backend, model, step, blocks, question, ranks)
    if identity is None:
        return search()
    is_first = ranks is None or ranks.rank == 0
    plan = store.load(identity, budget_bytes) if is_first else None
    if ranks is not None:
        plan = ranks.gather(plan)[0]
    if plan is not None and plan.fitted is not None:
        applied = backend.apply_plan(model, plan)
        applied.measured = plan.fitted.measured
        applied.stored_at = str(store.path_of(identity))
        _LOGGER.info("hyper_parallel: nothing was planned; the plan is the one of %s", applied.stored_at)
        return applied
    applied = search()
    if is_first and applied.measured is not None:
        fitted = FittedStep(facts=identity.facts, base_bytes=identity.base_bytes, measured=applied.measured)
        store.save(dataclasses.replace(applied.plan, fitted=fitted), identity)
    return applied


def _identity(
    backend: PlannerBackend,
    model: Model,
    step: Step,
    blocks: str | Sequence[str] | None,
    question: Sequence[str],
    ranks: Any,  # planner.fit.World | None
) -> StepIdentity | None:
    """The identity of this fit on all ranks; None where a rank could not run the step for it."""
    failure: Exception | None = None
    mine: StepIdentity | None = None
    try:
        mine = backend.identify_step(model, step, blocks=blocks)
    except Exception as error:  # the other ranks wait for this rank's identity
        failure = error
    if mine is not None:
        mine = dataclasses.replace(mine, facts=(*mine.facts, *question))
    rows = [(mine, None)] if ranks is None else ranks.gather((mine, None if failure is None else repr(failure)))
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(rows):
        if text is not None:
            raise PlanError(f"fit_memory: rank {rank} failed, so this one stops too: {text}")
    known = [one for one, _ in rows if one is not None]
    return StepIdentity.of_ranks(known) if len(known) == len(rows) else None
