"""The demo on torch: a small language model and its step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel.backends.demo_training import SIZES, DemoSize
from hyper_parallel.backends.step_observation.framework import ObservedFramework
from hyper_parallel.backends.torch.observed_framework import FRAMEWORK
from hyper_parallel.backends.torch.resident_planning import fit_resident, profile_resident
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.profile import Profile

__all__ = ["DEMO", "LanguageModel", "TorchDemo"]

_DEVICE_SIZE_BYTES: Final = 14 * 2**30  # what the size "device" needs left alone, with a margin


class Layer(nn.Module):
    """Attention and a feed-forward part, as every decoder has them."""

    def __init__(self, size: DemoSize) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        added: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + added


class LanguageModel(nn.Module):
    """Embedding, layers, head; its output is the loss of the next token."""

    def __init__(self, size: DemoSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch of token ids."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class TorchDemo:
    """See :class:`~hyper_parallel.backends.demo_training.DemoFramework`."""

    observed: ObservedFramework = FRAMEWORK
    sizes = SIZES
    frees_host_memory = True
    why_simulated = ""

    def has_accelerator(self) -> bool:
        """See the protocol."""
        return torch.cuda.is_available()

    def fitting_size(self) -> str:
        """See the protocol."""
        if not self.has_accelerator():
            return "host"
        free_bytes, _ = torch.cuda.mem_get_info()
        return "device" if free_bytes >= _DEVICE_SIZE_BYTES else "host"

    def num_threads(self) -> int:
        """See the protocol."""
        return torch.get_num_threads()

    def plan_resident(
        self,
        model: nn.Module,
        step: Callable[[], torch.Tensor],
        size: DemoSize,
        *,
        disk_path: str,
        peak_bytes: int,
        first_plan: Callable[[Profile], Plan],
        attempts: int,
    ) -> tuple[Profile, Plan]:
        """See the protocol."""
        resident = profile_resident(
            model, step, settings=size.small_settings(), disk_path=disk_path, peak_bytes=peak_bytes
        )
        plan = first_plan(resident.profile)
        return resident.profile, fit_resident(model, step, resident, plan, attempts=attempts, steps=1)

    def built(self, size: DemoSize) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        """See the protocol."""
        device = torch.device("cuda" if self.has_accelerator() else "cpu")
        torch.set_num_threads(max(1, os.cpu_count() or 1))
        torch.manual_seed(0)
        with device:
            model = LanguageModel(size)
            ids = torch.randint(0, size.vocabulary, (size.batch, size.length))
        if self.has_accelerator():
            model = model.to(dtype=torch.bfloat16)
            # The ways are compared bit for bit, and attention's own backward adds in any order unless told not to.
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

        def step() -> torch.Tensor:
            # Gradients stay in memory between steps, as in a run that accumulates: planner and observer count them so.
            model.zero_grad(set_to_none=False)
            loss: torch.Tensor = model(ids)
            loss.backward()
            return loss.detach()

        return model, step

    def updates(self, model: nn.Module) -> Callable[[torch.Tensor], float]:
        """See the protocol."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def update(loss: torch.Tensor) -> float:
            optimizer.step()
            return float(loss)

        return update


DEMO: Final = TorchDemo()
