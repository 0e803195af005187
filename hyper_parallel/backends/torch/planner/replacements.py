"""Wrappers in the place of modules of a torch model; see ``backends/planning/replacements.py``."""

from __future__ import annotations

from torch import nn

from hyper_parallel.backends.planning import replacements
from hyper_parallel.backends.planning.replacements import AppliedBlocks
from hyper_parallel.backends.torch.planner.framework import TORCH

__all__ = ["AppliedBlocks", "Replacements"]


class Replacements(replacements.Replacements):
    """Wrappers that were put in the place of torch modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(TORCH, model)
