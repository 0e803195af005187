"""Say how much memory a step may take; the planner finds out what to save, recompute and swap, and measures that it holds.

python -m examples.budget
"""

from __future__ import annotations

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.testing import simulated_accelerator


def train(budget: str | None) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(8, 128, 32)

    def step() -> torch.Tensor:
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        loss.backward()
        return loss

    losses = []
    with simulated_accelerator() as accelerator:  # on a GPU: leave it out
        if budget is not None:
            applied = hp.fit_memory(model, step, budget, steps=1)  # trial steps leave no trace
            print("\n".join(applied.plan.summary().splitlines()[:3]))
        accelerator.reset_peak()
        for _ in range(3):
            losses.append(step().item())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.peak_bytes, losses


def main() -> None:
    for budget in (None, "8MiB", "1MiB"):
        try:
            peak, losses = train(budget)
        except BudgetTooSmallError as error:
            print(error)
        else:
            print(f"{budget or 'plain':10} peak {peak / 2**20:6.2f} MiB   losses {losses}")


if __name__ == "__main__":
    main()
