"""A small step with every kind of copy, for a race detector to watch.

    PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync compute-sanitizer --tool memcheck --track-stream-ordered-races all \\
        --error-exitcode 9 python scripts/race_case.py

With that allocator every device buffer is allocated and freed on a stream. ``--forget-order`` leaves one order out of the
engine on purpose: a detector that stays silent then has shown that no access was bad, and nothing about order. The
sanitizer of CUDA 13 is such a one (``benchmarks/results``); the GPU suite with slowed copies is what sees order there.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.activation_checkpoint.record import Record

SETTINGS = hp.SwapConfig(min_bytes=0, tail_bytes=0, window_bytes=2**18, prefetch_bytes=2**18)
STEPS = 3


def policy(ctx: object, op: object, *args: object, **kwargs: object) -> hp.CheckpointPolicy:
    """The matmuls leave, all else is made again."""
    return hp.CheckpointPolicy.MUST_SWAP if "mm" in str(op) else hp.CheckpointPolicy.PREFER_RECOMPUTE


def build(*, is_ours: bool) -> nn.Sequential:
    """Layers under swap, and layers under a checkpoint whose inputs and matmuls leave; or the same layers plain."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(4)]
    if is_ours:
        layers[0], layers[2] = (hp.swap_wrapper(layer, swap_config=SETTINGS) for layer in layers[::2])
        layers[1], layers[3] = (
            hp.checkpoint_wrapper(layer, policy_fn=policy, swap_inputs=True, swap_config=SETTINGS)
            for layer in layers[1::2]
        )
    return nn.Sequential(*layers).to("cuda")


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Of several steps, added up."""
    x = torch.linspace(-1, 1, 256 * 256, device="cuda").view(256, 256)
    for _ in range(STEPS):
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    return [parameter.grad for parameter in model.parameters()]


def main() -> None:
    """Run the case; exit 1 when a gradient differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--forget-order", action="store_true", help="break the engine, to see that the detector sees it"
    )
    args = parser.parse_args()
    if args.forget_order:
        Record._order_owner = lambda self: None  # type: ignore[method-assign]
    wanted, got = gradients(build(is_ours=False)), gradients(build(is_ours=True))
    stats = hp.stats()
    is_equal = all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))
    print(
        f"race case: allocator {torch.cuda.get_allocator_backend()}, {STEPS} steps, "
        f"{stats.swapped_out_bytes} bytes out, {stats.swapped_in_bytes} bytes back, gradients equal: {is_equal}"
    )
    sys.exit(0 if is_equal and stats.swapped_in_bytes else 1)


if __name__ == "__main__":
    main()
