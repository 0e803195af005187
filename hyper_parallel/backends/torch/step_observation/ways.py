"""Ways of running the same step, each with a short name: what the demo and the benchmark compare."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from hyper_parallel.backends.torch.planner.blocks import BlockRef, ModuleLocation, locations_of
from hyper_parallel.backends.torch.planner.plan_regions import apply_plan
from hyper_parallel.backends.torch.planner.rule_regions import apply_rules
from hyper_parallel.backends.torch.wrappers import checkpoint_wrapper, swap_wrapper
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.rules import PRESETS, RuleSet

__all__ = ["WAYS", "Way", "in_one_way"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """What is done to every block."""

    what: str
    wrap: Callable[[nn.Module], nn.Module] | None = None  # None: blocks stay as they are
    preset: str | None = None
    needs_plan: bool = False


def _swapped_inputs(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module, swap_inputs=True)


WAYS: Final[Mapping[str, Way]] = MappingProxyType(
    {
        "none": Way(what="every activation stays"),
        "recompute": Way(what="checkpoint_wrapper(layer)", wrap=checkpoint_wrapper),
        "inputs": Way(what="checkpoint_wrapper(layer, swap_inputs=True)", wrap=_swapped_inputs),
        "swap": Way(what="swap_wrapper(layer)", wrap=swap_wrapper),
        **{name: Way(what=f'apply_rules(model, "{name}")', preset=name) for name in PRESETS if name != "auto"},
        "rules": Way(what='apply_rules(model, "auto")', preset="auto"),
        "auto": Way(what="fit_memory(model, step, budget)", needs_plan=True),
    }
)


@contextlib.contextmanager
def in_one_way(model: nn.Module, blocks: Sequence[BlockRef], name: str, plan: Plan | None = None) -> Iterator[Any]:
    """Run the model in one way inside; it is as it was afterwards."""
    way = WAYS[name]
    if way.needs_plan:
        assert plan is not None, "a way that needs a plan is asked for with one"
        with apply_plan(model, plan) as applied:
            yield applied
        return
    if way.preset is not None:
        with apply_rules(
            model, RuleSet.read(way.preset), blocks=[block.name for block in blocks], step=None
        ) as applied:
            yield applied
        return
    locations: list[tuple[ModuleLocation, nn.Module]] = []
    try:
        if way.wrap is not None:
            for block in blocks:
                wrapper = way.wrap(block.module)
                for location in locations_of(model, block.module):
                    location.put(wrapper)
                    locations.append((location, block.module))
        yield None
    finally:
        for location, module in locations:
            location.put(module)
