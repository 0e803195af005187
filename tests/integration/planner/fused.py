"""Models that the planner's simulation misjudges: an encoder layer of torch's own, and fused kernels as their libraries write
them, custom autograd functions that allocate in forward what backward returns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .models import BATCH, LENGTH, WIDTH, Step, token_ids

FUSED_VOCABULARY = 512
HIDDEN = 4 * WIDTH


def encoder(layers: int = 4, *, dropout: float = 0.1, activation: str = "relu") -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=dropout, activation=activation, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    batch = torch.randn(8, 32, 64)

    def step() -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    return model, step


class _FusedSwiglu(torch.autograd.Function):
    """Keeps its inputs and makes the product again in backward."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return gradient * up * (sigmoid + silu * (1 - sigmoid)), gradient * silu


class _FusedLoss(torch.autograd.Function):
    """Head and cross entropy in one: the gradients of both inputs are made in forward and kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        grad_rows, grad_weight = torch.empty_like(rows), torch.zeros_like(weight)
        loss = rows.new_zeros(())
        for at in range(0, len(rows), len(rows) // 4):
            part = slice(at, at + len(rows) // 4)
            probabilities = torch.log_softmax(rows[part] @ weight.T, dim=-1)
            loss -= probabilities.gather(1, target[part, None]).sum()
            probabilities.exp_()
            probabilities.scatter_add_(1, target[part, None], torch.full((len(rows) // 4, 1), -1.0))
            grad_rows[part] = probabilities @ weight
            grad_weight += probabilities.T @ rows[part]
        ctx.save_for_backward(grad_rows.view_as(x), grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * gradient, grad_weight * gradient, None


class FusedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(_FusedSwiglu.apply(self.gate(normed), self.up(normed)))


class FusedModel(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(FUSED_VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(FusedLayer() for _ in range(layers))
        self.head = nn.Parameter(torch.randn(FUSED_VOCABULARY, WIDTH) / WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return _FusedLoss.apply(x, self.head, ids.flatten())


def fused(layers: int = 4) -> tuple[nn.Module, Step]:
    torch.manual_seed(4)
    model = FusedModel(layers)
    ids = token_ids()
    assert ids.shape == (BATCH, LENGTH)

    def step() -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        return loss.detach()

    return model, step
