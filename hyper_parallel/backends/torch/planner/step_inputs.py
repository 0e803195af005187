"""The shapes that a torch module is called with; see ``backends/planning/step_inputs.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hyper_parallel.backends.planning import step_inputs
from hyper_parallel.backends.torch.planner.framework import TORCH
from hyper_parallel.planner.step_inputs import InputShape

__all__ = ["InputWatch", "shapes_of"]


def shapes_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[InputShape, ...]:
    """Every tensor that a call gives to a module, by the name of its argument."""
    return step_inputs.shapes_of(TORCH, module, args, kwargs)


class InputWatch(step_inputs.InputWatch):
    """A hook on a torch module."""

    framework = TORCH
