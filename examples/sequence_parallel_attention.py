"""Attention over tokens that are spread over ranks, with its gradients. The same file runs on torch and on MindSpore.

    torchrun --nproc-per-node 4 -m examples.sequence_parallel_attention
    msrun --worker_num 4 --local_worker_num 4 examples/sequence_parallel_attention.py

Each rank has some tokens of all heads. One exchange gives it all tokens of some heads, for which it computes attention; another
one brings the results back. Backward makes the same exchanges the other way round.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hyper_parallel.platform import get_platform

TOKENS, HEADS, WIDTH = 32, 4, 8
platform = get_platform()


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention over (tokens, heads, width)."""
    future = platform.tensor(np.triu(np.full((TOKENS, TOKENS), -1e9, np.float32), 1))
    scores = q.permute(1, 0, 2) @ k.permute(1, 2, 0) / WIDTH**0.5 + future
    return (scores.softmax(-1) @ v.permute(1, 0, 2)).permute(1, 0, 2)


def to_heads(x: Any, size: int) -> Any:
    """From my tokens of all heads to all tokens of my heads."""
    pieces = x.reshape(TOKENS // size, size, HEADS // size, WIDTH).permute(1, 0, 2, 3)  # piece r: the heads of rank r
    pieces = platform.differentiable_all_to_all(pieces, tuple(pieces.shape), None)
    return pieces.reshape(TOKENS, HEADS // size, WIDTH)


def to_tokens(x: Any, size: int) -> Any:
    """The way back."""
    pieces = x.reshape(size, TOKENS // size, HEADS // size, WIDTH)  # piece r: the tokens of rank r
    pieces = platform.differentiable_all_to_all(pieces, tuple(pieces.shape), None)
    return pieces.permute(1, 0, 2, 3).reshape(TOKENS // size, HEADS, WIDTH)


def main() -> None:
    platform.init_process_group()
    rank, size = platform.get_rank(), platform.get_world_size()
    random = np.random.default_rng(0)
    q, k, v, weight = random.normal(size=(4, TOKENS, HEADS, WIDTH)).astype(np.float32)
    mine = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = to_tokens(attention(*(to_heads(x, size) for x in (q, k, v))), size)
        return (out * platform.tensor(weight[mine])).sum()

    def whole_loss(q: Any, k: Any, v: Any) -> Any:
        return (attention(q, k, v) * platform.tensor(weight)).sum()

    value, grads = platform.value_and_grad(loss, (0, 1, 2))(*(platform.tensor(x[mine]) for x in (q, k, v)))
    value = platform.all_reduce(value, None)
    whole, whole_grads = platform.value_and_grad(whole_loss, (0, 1, 2))(*(platform.tensor(x) for x in (q, k, v)))
    apart = abs(float(value) - float(whole))
    for grad, of_whole in zip(grads, whole_grads, strict=True):
        apart = max(apart, np.abs(platform.tensor_to_numpy(grad) - platform.tensor_to_numpy(of_whole)[mine]).max())
    assert apart < 1e-3, apart
    if rank == 0:
        print(f"{size} ranks, {TOKENS // size} tokens each: value and gradients as in one process", flush=True)
    platform.destroy_process_group()


if __name__ == "__main__":
    main()
