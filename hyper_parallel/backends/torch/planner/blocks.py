"""Torch's modules as planning sees them: which are a model's blocks, and how they lie in one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from hyper_parallel.backends.planning import blocks
from hyper_parallel.backends.planning.module_tree import BlockRef, ModuleLocation
from hyper_parallel.backends.torch.wrappers import ActivationWrapper
from hyper_parallel.errors import PlanError

__all__ = [
    "TREE",
    "BlockRef",
    "ModuleLocation",
    "device_of",
    "find_blocks",
    "fingerprint_of",
    "locations_of",
    "refuse_wrapped",
]


class TorchTree:
    """See :class:`~hyper_parallel.backends.planning.module_tree.ModuleTree`."""

    class_name = "torch.nn.Module"
    containers: tuple[type, ...] = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    wrapper_class: type = ActivationWrapper

    def named(self, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """See the protocol."""
        found: Iterable[tuple[str, nn.Module]] = module.named_modules()
        return found

    def children(self, module: nn.Module) -> dict[str, nn.Module | None]:
        """See the protocol."""
        return module._modules

    def put_child(self, module: nn.Module, key: str, child: nn.Module) -> None:
        """See the protocol."""
        module._modules[key] = child

    def parameters(self, module: nn.Module) -> Iterable[nn.Parameter]:
        """See the protocol."""
        return module.parameters()

    def named_parameters(self, module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        """See the protocol."""
        return module.named_parameters()

    def has_forward(self, module: nn.Module) -> bool:
        """See the protocol. A ``ModuleList`` and a ``ModuleDict`` have none."""
        return type(module).forward is not nn.Module.forward or "forward" in module.__dict__

    def refuse_own_checkpointing(self, model: nn.Module, who: str) -> None:
        """See the protocol."""
        for path, module in model.named_modules():
            if module.__dict__.get("gradient_checkpointing") is True:
                raise PlanError(
                    f"{who}: {path or type(model).__name__} does gradient checkpointing of its own, which would replay what was "
                    "planned to stay. Switch it off first: model.activation_checkpointing_disable(), before transformers 5.23 "
                    "model.gradient_checkpointing_disable()."
                )


TREE: Final = TorchTree()


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
    return blocks.locations_of(TREE, root, module)


def find_blocks(
    model: nn.Module,
    patterns: str | Sequence[str] | None,
    *,
    who: str,
    calls: Callable[[], Mapping[str, int]] | None = None,
) -> list[BlockRef]:
    """See :func:`hyper_parallel.backends.planning.blocks.find_blocks`."""
    return blocks.find_blocks(TREE, model, patterns, who=who, calls=calls)


def refuse_wrapped(model: nn.Module, found: Sequence[BlockRef], who: str) -> None:
    """Refuse a model whose blocks are regions already."""
    blocks.refuse_wrapped(TREE, model, found, who)


def fingerprint_of(model: nn.Module) -> str:
    """Names one model structure."""
    return blocks.fingerprint_of(TREE, model)
