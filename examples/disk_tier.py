"""No GPU at all: activations leave RAM for a file, and the process really becomes smaller.

python -m examples.disk_tier [DIRECTORY]

Each way runs in a process of its own, because the peak of a process never falls.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile

import torch
from torch import nn

import hyper_parallel as hp


def train(is_swapped: bool, directory: str) -> None:
    if is_swapped:
        # Windows small enough for so small a model; for a real model the defaults are a good start.
        small = {"min_bytes": "256KiB", "tail_bytes": "8MiB", "window_bytes": "16MiB", "prefetch_bytes": "16MiB"}
        hp.configure(tiers="disk", disk_path=directory, **small)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, num_layers=12, enable_nested_tensor=False)
    if is_swapped:
        for number, block in enumerate(model.layers):
            model.layers[number] = hp.swap_wrapper(block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, losses = torch.randn(8, 256, 128), []
    for _ in range(3):
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{'disk' if is_swapped else 'plain':10} peak {peak / 2**20:6.2f} MiB   losses {losses}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as directory:
        for is_swapped in (False, True):
            command = f"from examples import disk_tier; disk_tier.train({is_swapped}, {directory!r})"
            subprocess.run([sys.executable, "-c", command], check=True, env=os.environ, timeout=300)


if __name__ == "__main__":
    main()
