"""torch and MindSpore in one process: one manager, two rooms, and neither disturbs the other."""

from __future__ import annotations

import sys

import mindspore
import numpy as np
import torch
from mindspore import mint

import hyper_parallel as hp
from hyper_parallel.platform.mindspore import activation_checkpoint as mindspore_room
from hyper_parallel.platform.torch import activation_checkpoint as torch_room

VALUES = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(4, 8)


def torch_gradient(*, swaps: bool) -> np.ndarray:
    x = torch.tensor(VALUES, requires_grad=True)
    forward = lambda x: (x.exp().tanh() * x).sin()  # noqa: E731
    (torch_room.swap(forward, x) if swaps else forward(x)).sum().backward()
    assert x.grad is not None
    return x.grad.numpy()


def mindspore_gradient(*, swaps: bool, between: list[np.ndarray] | None = None) -> np.ndarray:
    def forward(x: mindspore.Tensor) -> mindspore.Tensor:
        h = mint.tanh(mint.exp(x))
        if between is not None:
            between.append(torch_gradient(swaps=True))  # a whole step of the other framework, inside this forward
        return mint.sin(h * x)

    run = (lambda x: mindspore_room.swap(forward, x)) if swaps else forward
    return mindspore.grad(lambda x: run(x).sum())(mindspore.Tensor(VALUES)).asnumpy()


def test_both_frameworks_swap_in_one_process() -> None:
    plain = torch_gradient(swaps=False), mindspore_gradient(swaps=False)
    between: list[np.ndarray] = []
    settings = hp.SwapConfig(min_bytes=0, tail_bytes=0, window_bytes=0, prefetch_bytes=300)
    with hp.configure(settings), torch_room.simulate("lazy", 0) as one, mindspore_room.simulate("lazy", 0) as two:
        found = mindspore_gradient(swaps=True, between=between)
        stats = hp.stats()
    assert found.tobytes() == plain[1].tobytes()
    assert [gradient.tobytes() for gradient in between] == [plain[0].tobytes()]
    assert one.swapped_bytes > 0
    assert two.swapped_bytes > 0
    assert stats.swapped_out_bytes == one.swapped_bytes + two.swapped_bytes
    assert stats.live_records == 0
    assert {"torch", "mindspore"} <= set(sys.modules)
