"""A transformer for video diffusion: with many tokens attention is most of the work, so its outputs are swapped, not run again.

python -m examples.video_diffusion
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

WIDTH, HEADS, FRAMES, PATCHES = 64, 4, 8, 16
RULES = {"*::sdpa": "swap", "blocks.*::input": "swap", "*::*": "recompute"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(level)[:, None].chunk(6, -1)
        qkv = self.qkv(self.norm1(x) * (1 + scale) + shift).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class VideoTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.levels, self.out = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, video: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        level, x = F.silu(self.levels(noise)), video.flatten(1, 2)  # all patches of all frames see each other
        for block in self.blocks:
            x = block(x, level)
        return self.out(x).view_as(video)


if __name__ == "__main__":
    for name in ("plain", "attention"):
        torch.manual_seed(0)
        model, video = VideoTransformer(), torch.randn(2, FRAMES, PATCHES, WIDTH)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        if name == "attention":
            hp.apply_rules(model, RULES)  # this is the line
        with simulated_accelerator() as accelerator:
            for noise, target in zip(torch.rand(3, 2, 1), torch.randn(3, *video.shape), strict=True):
                mixed = torch.lerp(video, target, noise[..., None, None])
                loss = (model(mixed, noise) - (target - video)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        print(f"{name:10} peak {accelerator.peak_bytes / 2**20:6.2f} MiB   losses {losses}")
