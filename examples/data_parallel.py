"""Data parallel training: gradients are reduced in buckets while backward goes on. The same file on torch and on MindSpore.

    torchrun --nproc-per-node 4 -m examples.data_parallel
    msrun --worker_num 4 --local_worker_num 4 examples/data_parallel.py

The backward of ``Seen`` has a weight's gradient as soon as it is there. A full bucket is reduced beside the rest of backward.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from hyper_parallel.platform import get_platform

BATCH, WIDTHS, STEPS, LEARNING_RATE, MAX_NORM = 8, (16, 64, 64, 4), 3, 0.1, 0.05
platform = get_platform()


class Seen(platform.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, bucket: Bucket, place: int) -> Any:
        ctx.bucket, ctx.place = bucket, place
        return weight * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.bucket.add(ctx.place, grad)
        return grad, None, None


class Bucket:
    def __init__(self, weights: list[Any], group: Any) -> None:
        self.weights, self.group, self.grads = weights, group, {}

    def add(self, place: int, grad: Any) -> None:
        self.grads[place] = grad.reshape(-1)
        if len(self.grads) == len(self.weights):
            flat = platform.cat([self.grads.pop(place) for place in range(len(self.weights))])
            flat, handle = platform.all_reduce(flat, self.group, async_op=True)
            platform.set_grad_reduce_handle(handle, lambda: self.hand_out(flat))

    def hand_out(self, flat: Any) -> None:
        size = len(platform.get_process_group_ranks(self.group))
        for weight in self.weights:
            count = int(np.prod(tuple(weight.shape)))
            weight.grad, flat = (flat[:count] / size).reshape(tuple(weight.shape)), flat[count:]


def train(x: np.ndarray, y: np.ndarray, group: Any) -> list[Any]:
    dice = np.random.default_rng(0)
    weights = [platform.Parameter(platform.tensor(dice.normal(0, 0.25, s).astype("float32"))) for s in pairwise(WIDTHS)]
    buckets = [Bucket(weights[:1], group), Bucket(weights[1:], group)]

    def loss(x: Any, y: Any) -> Any:
        for bucket in buckets:
            for place, weight in enumerate(bucket.weights):
                x = (x @ Seen.apply(weight, bucket, place)).tanh()
        return ((x - y) * (x - y)).mean()

    for _ in range(STEPS):
        platform.value_and_grad(loss, None, weights)(platform.tensor(x), platform.tensor(y))
        platform.wait_grad_handle()
        platform.clip_grad_norm_(weights, MAX_NORM)
        for weight in weights:
            platform.load_into_param(weight, weight - LEARNING_RATE * weight.grad)
    return [platform.tensor_to_numpy(weight) for weight in weights]


platform.init_process_group()
rank, size, random = platform.get_rank(), platform.get_world_size(), np.random.default_rng(1)
x, y = (random.normal(size=(BATCH, width)).astype(np.float32) for width in (WIDTHS[0], WIDTHS[-1]))
together = train(*(rows[rank * BATCH // size : (rank + 1) * BATCH // size] for rows in (x, y)), None)
alone = train(x, y, platform.create_group([rank]))
assert all(np.allclose(mine, whole, atol=1e-6) for mine, whole in zip(together, alone, strict=True))
print(f"rank {rank} of {size}: weights after {STEPS} clipped steps as in one process", flush=True)
platform.destroy_process_group()
