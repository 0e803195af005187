"""Which modules of a model are its repeated blocks, where they sit in the tree, and how to tell one model from another."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.backends.torch.planner.block_search import BlockRef, has_forward, near_misses, search_blocks
from hyper_parallel.backends.torch.wrappers import ActivationWrapper
from hyper_parallel.errors import PlanError

__all__ = ["BlockRef", "ModuleLocation", "device_of", "find_blocks", "fingerprint_of", "locations_of", "refuse_wrapped"]


@dataclasses.dataclass(frozen=True)
class ModuleLocation:
    """Where a module is in the tree: its parent, and the name it has there."""

    parent: nn.Module
    key: str

    def put(self, module: nn.Module) -> None:
        """Put another module there; the container's own checks are not run."""
        self.parent._modules[self.key] = module

    def get(self) -> nn.Module | None:
        """The module that is there now."""
        return self.parent._modules.get(self.key)


def require_module(model: Any, who: str) -> nn.Module:
    """The model, or an error that says what was given instead."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}: expected a torch.nn.Module, got {type(model).__name__}")
    return model


def device_of(model: nn.Module, who: str) -> torch.device:
    """The one device of the model's parameters."""
    devices = {parameter.device for parameter in model.parameters()}
    if not devices:
        raise PlanError(f"{who}: the model has no parameters, so there is no device whose memory could be planned")
    if len(devices) > 1:
        raise PlanError(
            f"{who}: the model's parameters lie on {len(devices)} devices ({', '.join(sorted(map(str, devices)))}), and a plan "
            "is made for one. Give the part of the model that lies on one device."
        )
    return devices.pop()


def locations_of(root: nn.Module, module: nn.Module) -> list[ModuleLocation]:
    """Every location in the tree that holds this very module."""
    found = []
    for parent in root.modules():
        for key, child in parent._modules.items():
            if child is module:
                found.append(ModuleLocation(parent, key))
    return found


def find_blocks(
    model: nn.Module,
    patterns: str | Sequence[str] | None,
    *,
    who: str,
    calls: Callable[[], Mapping[str, int]] | None = None,
) -> list[BlockRef]:
    """The repeated blocks: those that patterns name, or those that are found (see ``block_search``).

    ``calls``: runs a step and says how often it calls each module, for models whose blocks are only repeated in time.
    """
    blocks = search_blocks(model, calls) if patterns is None else _named(model, patterns, who)
    refuse_wrapped(model, blocks, who)
    if blocks:
        return blocks
    raise PlanError(
        f"{who}: {type(model).__name__} has no repeated blocks: no container holds callable modules with parts and parameters "
        f"of their own{near_misses(model, has_step=calls is not None)}"
    )


def _named(model: nn.Module, patterns: str | Sequence[str], who: str) -> list[BlockRef]:
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not wanted or not all(isinstance(pattern, str) and pattern for pattern in wanted):
        raise TypeError(f"{who}: blocks are one or more patterns such as 'model.layers.*', got {patterns!r}")
    named = [(path, module) for path, module in model.named_modules() if path]
    blocks: list[BlockRef] = []
    inside: set[int] = set()
    for pattern in wanted:
        hits = [(path, module) for path, module in named if _is_named(pattern, path)]
        if not hits:
            near = difflib.get_close_matches(pattern, [path for path, _ in named], n=4, cutoff=0.4)
            raise PlanError(
                f"{who}: no module is called {pattern!r}{'; near misses: ' + ', '.join(near) if near else ''}. A pattern is a "
                "path from the model's root in which * stands for one name."
            )
        for path, module in hits:
            if not has_forward(module):
                raise PlanError(
                    f"{who}: {path} (named by {pattern!r}) cannot be a block, because a {type(module).__name__} is never called; "
                    f"its modules are. Name those, for example {f'{pattern}.*'!r}."
                )
            if id(module) not in inside:
                blocks.append(BlockRef(path, module))
                inside.update(map(id, module.modules()))
    return blocks


def _is_named(pattern: str, path: str) -> bool:
    names, parts = path.split("."), pattern.split(".")
    return len(names) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts))


def refuse_wrapped(model: nn.Module, blocks: Sequence[BlockRef], who: str) -> None:
    """Refuse a model whose blocks are regions already."""
    for block in blocks:
        if isinstance(block.module, ActivationWrapper) or any(
            isinstance(inner, ActivationWrapper) for inner in block.module.modules()
        ):
            raise PlanError(
                f"{who}: {block.name} is wrapped already, or something in it is, and both would decide about the same values. "
                "Remove what was applied before (handle.remove()), or unwrap it."
            )
    for path, module in model.named_modules():
        if module.__dict__.get("gradient_checkpointing") is True:
            raise PlanError(
                f"{who}: {path or type(model).__name__} does gradient checkpointing of its own, which would replay what was "
                "planned to stay. Switch it off first: model.activation_checkpointing_disable(), before transformers 5.23 "
                "model.gradient_checkpointing_disable()."
            )


def fingerprint_of(model: nn.Module) -> str:
    """Names one model structure: paths, classes, parameters with shapes and dtypes. Wrappers of ours do not show."""
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        digest.update(f"{path}:{module.__class__.__name__}\n".encode())
    for path, parameter in model.named_parameters():
        digest.update(f"{path}={tuple(parameter.shape)}:{parameter.dtype}\n".encode())
    return digest.hexdigest()[:16]
