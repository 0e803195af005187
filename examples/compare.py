"""Train a small transformer with none / recompute / swap / mixed, and compare memory, time and gradients.

    make demo

On a machine with a CUDA device, swapped activations go to pinned host memory and the peak is the device's. Without one
the device is RAM and far memory is a file: the peak is the resident set of the process, and it really falls. Each mode
runs in a process of its own, because a process never quite gives its memory back.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time

MODES = {
    "none": "every activation stays",
    "recompute": "checkpoint_wrapper(layer)",
    "swap": "swap_wrapper(layer)",
    "mixed": "swap inputs and attention, recompute the rest",
}


def train(mode: str, disk_path: str, steps: int) -> dict[str, object]:
    """A few steps in this process: what they cost, and a fingerprint of the gradients."""
    import torch
    import torch.nn.functional as F

    import hyper_parallel as hp

    class Layer(torch.nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class LanguageModel(torch.nn.Module):
        def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(vocabulary, width)
            self.layers = torch.nn.ModuleList(Layer(width, heads) for _ in range(layers))
            self.head = torch.nn.Linear(width, vocabulary, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def keep_attention(ctx: object, op: object, *args: object, **kwargs: object) -> hp.CheckpointPolicy:
        is_attention = "scaled_dot_product" in str(op)
        return hp.CheckpointPolicy.MUST_SWAP if is_attention else hp.CheckpointPolicy.PREFER_RECOMPUTE

    has_device = torch.cuda.is_available()
    device = "cuda" if has_device else "cpu"
    if not has_device:
        hp.configure(
            tiers="disk", disk_path=disk_path, tail_bytes="32MiB", window_bytes="96MiB", prefetch_bytes="64MiB"
        )
    torch.manual_seed(0)
    torch.set_num_threads(max(1, (os.cpu_count() or 2)))
    with torch.device(device):
        model = LanguageModel(vocabulary=512, width=256, heads=8, layers=16)
        ids = torch.randint(0, 512, (4, 1024))
    wrap = {
        "none": lambda layer: layer,
        "recompute": hp.checkpoint_wrapper,
        "swap": hp.swap_wrapper,
        "mixed": lambda layer: hp.checkpoint_wrapper(layer, swap_inputs=True, policy_fn=keep_attention),
    }[mode]
    for index, layer in enumerate(model.layers):
        model.layers[index] = wrap(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fingerprint, seconds, losses = hashlib.sha256(), [], []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        for parameter in model.parameters():
            fingerprint.update(parameter.grad.cpu().numpy().tobytes())
        optimizer.step()
    stats = hp.stats()
    return {
        "mode": mode,
        "device": torch.cuda.get_device_name() if has_device else "CPU, far memory on disk",
        "peak_bytes": torch.cuda.max_memory_allocated() if has_device else _peak_resident_bytes(),
        "seconds": min(seconds),
        "losses": losses,
        "swapped_bytes": stats.swapped_out_bytes // steps,
        "recomputed_bytes": stats.recomputed_bytes // steps,
        "gradients": fingerprint.hexdigest(),
    }


def _peak_resident_bytes() -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("compare: cannot read the resident peak; /proc/self/status has no VmHWM line on this system")


def show(rows: list[dict[str, object]]) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    reference = rows[0]
    table = Table(title=f"One small transformer, one step ({reference['device']})")
    for name in ("mode", "peak MiB", "peak", "step s", "swapped MiB", "gradients"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in rows:
        is_equal = row["gradients"] == reference["gradients"]
        table.add_row(
            f"{row['mode']}  [dim]{MODES[str(row['mode'])]}[/dim]",
            f"{float(row['peak_bytes']) / 2**20:.0f}",  # type: ignore[arg-type]
            f"{float(row['peak_bytes']) / float(reference['peak_bytes']) - 1:+.0%}",  # type: ignore[arg-type]
            f"{float(row['seconds']):.2f}",  # type: ignore[arg-type]
            f"{float(row['swapped_bytes']) / 2**20:.0f}",  # type: ignore[arg-type]
            "[green]bitwise equal[/green]" if is_equal else "[red]DIFFERENT[/red]",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, help="run one mode in this process and print JSON")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--disk-path", default=None, help="a directory for swapped activations on machines without a GPU"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-", dir=args.disk_path) as folder:
        if args.mode is not None:
            print(json.dumps(train(args.mode, folder, args.steps)))
            return
        rows = []
        for mode in MODES:
            print(f"{mode} ...", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "examples.compare", "--mode", mode, "--steps", str(args.steps)]
            finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if finished.returncode != 0:
                sys.exit(f"compare: mode {mode} failed\n{finished.stderr}")
            rows.append(json.loads(finished.stdout.splitlines()[-1]))
    show(rows)
    if any(row["gradients"] != rows[0]["gradients"] for row in rows):
        sys.exit("compare: the gradients of the modes differ")


if __name__ == "__main__":
    main()
