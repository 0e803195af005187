"""Ways of running the same step, each with a short name: what the demo and the benchmark compare."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from hyper_parallel.backends.planning.blocks import locations_of
from hyper_parallel.backends.planning.module_tree import BlockRef, Module, ModuleLocation
from hyper_parallel.backends.step_observation.framework import ObservedFramework
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.rules import PRESETS, RuleSet

__all__ = ["WAYS", "Way", "in_one_way"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """What is done to every block."""

    what: str
    wrap: Callable[[ObservedFramework, Module], Module] | None = None  # None: blocks stay as they are
    preset: str | None = None
    needs_plan: bool = False


def _recomputed(framework: ObservedFramework, module: Module) -> Module:
    return framework.checkpoint_wrapper(module)


def _swapped_inputs(framework: ObservedFramework, module: Module) -> Module:
    return framework.checkpoint_wrapper(module, swap_inputs=True)


def _swapped(framework: ObservedFramework, module: Module) -> Module:
    return framework.swap_wrapper(module)


WAYS: Final[Mapping[str, Way]] = MappingProxyType(
    {
        "none": Way(what="every activation stays"),
        "recompute": Way(what="checkpoint_wrapper(layer)", wrap=_recomputed),
        "inputs": Way(what="checkpoint_wrapper(layer, swap_inputs=True)", wrap=_swapped_inputs),
        "swap": Way(what="swap_wrapper(layer)", wrap=_swapped),
        **{name: Way(what=f'apply_rules(model, "{name}")', preset=name) for name in PRESETS if name != "auto"},
        "rules": Way(what='apply_rules(model, "auto")', preset="auto"),
        "auto": Way(what="fit_memory(model, step, budget)", needs_plan=True),
    }
)


@contextlib.contextmanager
def in_one_way(
    framework: ObservedFramework, model: Module, blocks: Sequence[BlockRef], name: str, plan: Plan | None = None
) -> Iterator[Any]:
    """Run the model in one way inside; it is as it was afterwards."""
    way = WAYS[name]
    if way.needs_plan:
        assert plan is not None, "a way that needs a plan is asked for with one"
        with framework.apply_plan(model, plan) as applied:
            yield applied
        return
    if way.preset is not None:
        with framework.apply_rules(
            model, RuleSet.read(way.preset), blocks=[block.name for block in blocks], step=None
        ) as applied:
            yield applied
        return
    locations: list[tuple[ModuleLocation, Module]] = []
    try:
        if way.wrap is not None:
            for block in blocks:
                wrapper = way.wrap(framework, block.module)
                for location in locations_of(framework.tree, model, block.module):
                    location.put(wrapper)
                    locations.append((location, block.module))
        yield None
    finally:
        for location, module in locations:
            location.put(module)
