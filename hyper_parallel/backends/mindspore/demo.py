"""The demo on MindSpore: a small language model and its step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import mindspore
import numpy as np
from mindspore import mint, nn, ops

from hyper_parallel.backends.demo_training import SIZES, DemoSize
from hyper_parallel.backends.mindspore.observed_framework import FRAMEWORK
from hyper_parallel.backends.step_observation.framework import ObservedFramework
from hyper_parallel.platform.mindspore.device import on_cpu

__all__ = ["DEMO", "LanguageModel", "MindSporeDemo"]

_RATE: Final = np.float32(0.1)
_HIDDEN: Final = -1e9  # a score of what attention must not see


class Layer(nn.Cell):  # type: ignore[misc]
    """Attention and a feed-forward part, as every decoder has them, of ops that also the CPU has."""

    def __init__(self, size: DemoSize) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.qkv, self.out = mint.nn.Linear(width, 3 * width), mint.nn.Linear(width, width)
        self.up, self.down = mint.nn.Linear(width, 4 * width), mint.nn.Linear(4 * width, width)

    def construct(self, x: Any, mask: Any) -> Any:
        """One layer."""
        batch, length, width = x.shape
        q, k, v = (
            mint.transpose(part.reshape(batch, length, self.heads, width // self.heads), 1, 2)
            for part in mint.chunk(self.qkv(self.norm1(x)), 3, dim=-1)
        )
        scores = mint.matmul(q, mint.transpose(k, -1, -2)) * (width // self.heads) ** -0.5 + mask
        attended = mint.transpose(mint.matmul(mint.nn.functional.softmax(scores, -1), v), 1, 2)
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.down(mint.nn.functional.silu(self.up(self.norm2(x))))


class LanguageModel(nn.Cell):  # type: ignore[misc]
    """Embedding, layers, head; its output is the loss of the next token."""

    def __init__(self, size: DemoSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.CellList([Layer(size) for _ in range(size.layers)])
        self.head = mint.nn.Linear(size.width, size.vocabulary, bias=False)
        self.mask = mindspore.Tensor(np.triu(np.full((size.length, size.length), _HIDDEN, np.float32), 1))

    def construct(self, ids: Any) -> Any:
        """The mean loss over a batch of token ids."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.mask)
        logits = self.head(x)[:, :-1]
        return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


class MindSporeDemo:
    """See :class:`~hyper_parallel.backends.demo_training.DemoFramework`. No Ascend has run it yet."""

    observed: ObservedFramework = FRAMEWORK
    # Attention's scores are values of their own here, and what an op makes on the simulated device is copied once more.
    sizes: Mapping[str, DemoSize] = {
        **SIZES,
        "host": dataclasses.replace(SIZES["host"], layers=6, batch=4, unit_bytes=2**18),
        "tiny": dataclasses.replace(SIZES["tiny"], length=128, unit_bytes=2**14),
    }
    frees_host_memory = False
    why_simulated = (
        "peaks are of the simulated accelerator, which counts what ops make, without the weights: MindSpore keeps what its "
        "tensors give back, so the memory of the process says nothing. Times are of the CPU, where swapped values go to a file"
    )

    def has_accelerator(self) -> bool:
        """See the protocol."""
        return not on_cpu()

    def fitting_size(self) -> str:
        """See the protocol. MindSpore does not say how much of an Ascend is free."""
        return "host"

    def num_threads(self) -> None:
        """See the protocol."""

    def plan_resident(self, *_: Any, **__: Any) -> NoReturn:
        """See the protocol."""
        raise AssertionError("asked only where a framework frees host memory")

    def built(self, size: DemoSize) -> tuple[Any, Callable[[], Any]]:
        """See the protocol."""
        if on_cpu():
            mindspore.runtime.launch_blocking()  # the asynchronous pipeline is slower on few cores
        else:
            mindspore.set_deterministic(True)
        mindspore.set_seed(0)
        model = LanguageModel(size)
        source = np.random.RandomState(0)
        for parameter in model.get_parameters():
            if parameter.ndim > 1:
                numbers = source.standard_normal(parameter.shape).astype(np.float32)
                parameter.set_data(mindspore.Tensor(numbers * parameter.shape[-1] ** -0.5))
        ids = mindspore.Tensor(source.randint(0, size.vocabulary, (size.batch, size.length)).astype(np.int32))
        function = mindspore.value_and_grad(model, None, model.trainable_params())
        return model, lambda: function(ids)

    def updates(self, model: Any) -> Callable[[Any], float]:
        """See the protocol.

        By hand: an optimizer of ``mindspore.nn`` holds the gradients until it gets the next, which the next step's peak would
        show, and one of ``mindspore.mint`` changes nothing on the CPU.
        """
        parameters = model.trainable_params()

        def update(result: Any) -> float:
            loss, gradients = result
            for parameter, gradient in zip(parameters, gradients):
                parameter.set_data(mindspore.Tensor(parameter.asnumpy() - _RATE * gradient.asnumpy()))
            return float(loss.asnumpy())

        return update


DEMO: Final = MindSporeDemo()
