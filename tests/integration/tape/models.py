"""Small models, each with something that a second run of its Python would get wrong or that a tape must understand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import hyper_parallel as hp

WIDTH = 16


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())


class Based(nn.Module):
    """A linear layer, and what a subclass makes of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, batch_first=True, num_layers=2, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.cells(x[None].expand(2, -1, -1))[0]
        return output


class InPlace(Based):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * 2
        y += 1
        z = torch.cat([y[:, :8].exp(), y[:, 8:]], 1)
        z[:, 0] = 0
        return z.sin()


class Complex(Based):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.rfft(self.inner(x))
        z = z.conj() * torch.fft.rfft(x)
        return torch.fft.irfft(z.conj() * z.imag.neg()).tanh()


class FilledUnseen(Based):
    """Memory of an ``empty`` op that numpy fills: the dispatcher does not see it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        scale = torch.empty_like(y)
        scale.detach().numpy()[:] = 3.0
        return (y * scale * torch.tensor([2.0] * WIDTH)).tanh() * torch.from_numpy(np.full(WIDTH, 0.5, np.float32))


class ChangedUnseen(Based):
    """A value that numpy changes after an op made it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).detach().clone()
        y.numpy()[:] *= 3.0
        return (self.inner(x) * y).tanh()


class OwnExp(torch.autograd.Function):
    """A kernel of the user's, with a saved output that the dispatcher does not see filled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y.detach().numpy()[0] = 7
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        result: torch.Tensor = gradient * y
        return result


class OwnKernel(Based):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = OwnExp.apply(self.inner(x))
        return (value * x).tanh()


class Effects(Based):
    """Counts, keeps a list, changes a buffer and draws from numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.log: list[int] = []
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.steps += 1
        return (self.inner(x) * self.steps.sum() * self.calls * float(np.random.rand())).tanh()


class LargeBuffer(Based):
    """Changes a buffer that is too large to be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(600_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table += 1
        return (self.inner(x) + self.table[:WIDTH]).tanh()


class GradientInside(Based):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).tanh()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y * slope).sin()


class Cast(Based):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: torch.Tensor = self.inner(self.inner(x).exp())
            return result.float()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                output.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return output


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = hp.checkpoint(self.first, x.sin())
        result: torch.Tensor = self.second(inner.cos())
        return result.exp()


RECORDED: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "batch norm": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
    ),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2)),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "in place": InPlace,
    "complex": Complex,
    "filled unseen": FilledUnseen,
    "own kernel": OwnKernel,
    "effects": Effects,
    "gradient inside": GradientInside,
    "autocast": Cast,
    "experts": Experts,
    "nested": Nested,
}
"""Models whose regions run from a tape."""
