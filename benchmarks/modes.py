"""Every way of keeping activations that the benchmarks compare, each as a context that changes a model and puts it back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

import hyper_parallel as hp
from benchmarks.offloading import trl_offloading
from hyper_parallel import CheckpointPolicy, SwapConfig

SAVE, SWAP, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.PREFER_RECOMPUTE
GIB = 2**30
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def is_attention(op: Any) -> bool:
    return "scaled_dot_product" in str(op) or "flash_attn" in str(op)


@contextlib.contextmanager
def replaced(layers: nn.ModuleList, wrap: Callable[[int, nn.Module], nn.Module]) -> Iterator[None]:
    """Layers with wrappers in their place; the originals come back."""
    originals = list(layers)
    for index, layer in enumerate(originals):
        layers[index] = wrap(index, layer)
    try:
        yield
    finally:
        for index, layer in enumerate(originals):
            layers[index] = layer


class _TorchCheckpointed(nn.Module):
    def __init__(self, layer: nn.Module, policy: Callable[..., Any] | None) -> None:
        super().__init__()
        self.layer = layer
        self.policy = policy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.policy is None:
            return torch_checkpoint.checkpoint(self.layer, *args, use_reentrant=False, **kwargs)
        context_fn = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, self.policy)
        return torch_checkpoint.checkpoint(self.layer, *args, use_reentrant=False, context_fn=context_fn, **kwargs)


def _save_matmul_and_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    keep = op in MATMULS or is_attention(op)
    return torch_checkpoint.CheckpointPolicy.MUST_SAVE if keep else torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def _save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    keep = is_attention(op)
    return torch_checkpoint.CheckpointPolicy.MUST_SAVE if keep else torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def none(model: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
    yield


def torch_mode(policy: Callable[..., Any] | None) -> Any:
    @contextlib.contextmanager
    def mode(model: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
        with replaced(layers, lambda _, layer: _TorchCheckpointed(layer, policy)):
            yield

    return mode


@contextlib.contextmanager
def save_on_cpu(model: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        yield


def trl_mode(with_checkpoint: bool) -> Any:
    """TRL's OffloadActivations, from an installed TRL or from the one file named by TRL_OFFLOAD_FILE."""

    @contextlib.contextmanager
    def mode(model: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
        offloading = trl_offloading()
        if offloading is None:
            raise ModuleNotFoundError("TRL cannot be imported; TRL_OFFLOAD_FILE may name its one file")
        wrap = (lambda _, layer: _TorchCheckpointed(layer, None)) if with_checkpoint else (lambda _, layer: layer)
        with replaced(layers, wrap), offloading(use_pin_memory=True, use_streams=True):
            yield

    return mode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What becomes of the named values of a layer. Names: qkv, attention, o, gate, up; anything else is recomputed."""

    swap: tuple[str, ...] = ()
    save: tuple[str, ...] = ()
    swap_inputs: bool = True
    is_split: bool = False


KEEP = None  # a layer without a wrapper


def policy_of(layer: nn.Module, recipe: Recipe) -> Callable[..., CheckpointPolicy]:
    """A policy that knows matmuls by the weight they read."""
    named = dict(layer.named_modules())
    parts = {
        "qkv": ("attention.qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("attention.o", "self_attn.o_proj"),
        "gate": ("mlp.gate", "mlp.gate_proj"),
        "up": ("mlp.up", "mlp.up_proj"),
    }
    table: dict[int, CheckpointPolicy] = {}
    for names, fate in ((recipe.swap, SWAP), (recipe.save, SAVE)):
        for name in names:
            for path in parts.get(name, ()):
                if path in named:
                    table[named[path].weight.data_ptr()] = fate
    attention = SWAP if "attention" in recipe.swap else SAVE if "attention" in recipe.save else RECOMPUTE

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in MATMULS:
            return table.get(args[-1].data_ptr(), RECOMPUTE)
        return attention if is_attention(op) else RECOMPUTE

    return policy


def ours(recipe_of: Callable[[int, int], Recipe | None], config: SwapConfig, *, act_gib: float | None = None) -> Any:
    """Our regions: ``recipe_of(index, count)`` says what becomes of each layer.

    ``act_gib``: what the device may hold beside weights and gradients before copies hold compute up.
    """

    @contextlib.contextmanager
    def mode(model: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
        halves: list[tuple[nn.Module, str, nn.Module]] = []
        settings = config
        if act_gib is not None:
            fixed_bytes = sum(2 * parameter.nbytes for parameter in model.parameters())
            settings = dataclasses.replace(config, device_bytes=fixed_bytes + int(act_gib * GIB))

        def wrap(index: int, layer: nn.Module) -> nn.Module:
            recipe = recipe_of(index, len(layers))
            if recipe is None:
                return layer
            keywords = {
                "policy_fn": policy_of(layer, recipe),
                "swap_inputs": recipe.swap_inputs,
                "swap_config": settings,
                "preserve_rng_state": False,
            }
            if not recipe.is_split:
                return hp.checkpoint_wrapper(layer, **keywords)
            for name in ("attention", "mlp"):
                halves.append((layer, name, getattr(layer, name)))
                setattr(layer, name, hp.checkpoint_wrapper(getattr(layer, name), **keywords))
            return layer

        try:
            with replaced(layers, wrap):
                yield
        finally:
            for layer, name, half in halves:
                setattr(layer, name, half)

    return mode


def swap_everything(config: SwapConfig) -> Any:
    @contextlib.contextmanager
    def mode(model: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
        with replaced(layers, lambda _, layer: hp.swap_wrapper(layer, swap_config=config)):
            yield

    return mode


def phases(*counted: tuple[int, Recipe | None]) -> Callable[[int, int], Recipe | None]:
    """``(number of layers, recipe)`` from the first layer on; the last recipe serves all that remain."""

    def recipe_of(index: int, count: int) -> Recipe | None:
        for layers, recipe in counted:
            if index < layers:
                return recipe
            index -= layers
        return counted[-1][1]

    return recipe_of


def alternate(*recipes: Recipe) -> Callable[[int, int], Recipe | None]:
    """One recipe after the other, over and over: an even load on the link."""
    return lambda index, count: recipes[index % len(recipes)]


def plan_mode(path: Path) -> Any:
    """A plan that was saved."""

    @contextlib.contextmanager
    def mode(model: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
        applied = hp.apply_plan(model, hp.Plan.load(path))
        try:
            yield
        finally:
            applied.remove()

    return mode


def last_kept(kept: int, recipe: Recipe) -> Callable[[int, int], Recipe | None]:
    """The same recipe for all layers but the last ``kept``, which backward needs first."""
    return lambda index, count: KEEP if index >= count - kept else recipe


def late_saves(kept: int, late: int, recipe: Recipe, late_recipe: Recipe) -> Callable[[int, int], Recipe | None]:
    """The last ``kept`` layers stay, the ``late`` ones before them follow another recipe."""

    def recipe_of(index: int, count: int) -> Recipe | None:
        if index >= count - kept:
            return KEEP
        return late_recipe if index >= count - kept - late else recipe

    return recipe_of
