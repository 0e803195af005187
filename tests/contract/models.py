"""The same small models in every framework, for tests of members that take a module."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from .adapters import Adapter


class Models(abc.ABC):
    """What tests of modules need beside the Platform. Every model maps (batch, 4) to (batch, 4)."""

    names = ("embed.weight", "first.weight", "first.bias", "second.weight", "second.bias")
    buffers = ("scale",)

    @abc.abstractmethod
    def small(self) -> Any:
        """Linear layers ``first`` and ``second``, an embedding ``embed`` of 6 rows, a buffer ``scale`` of ones."""

    @abc.abstractmethod
    def tied(self) -> Any:
        """Linear layers ``first`` and ``second`` that share one weight."""

    @abc.abstractmethod
    def run(self, model: Any, array: np.ndarray) -> np.ndarray:
        """The model's output, without gradients."""

    @abc.abstractmethod
    def backward(self, model: Any, array: np.ndarray) -> None:
        """One step of sum(output squared); every parameter's gradient is on ``parameter.grad`` afterwards."""


class TorchModels(Models):
    """On torch."""

    def small(self) -> Any:
        import torch

        class Small(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = torch.nn.Embedding(6, 4)
                self.first = torch.nn.Linear(4, 4)
                self.second = torch.nn.Linear(4, 4)
                self.register_buffer("scale", torch.ones(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.second(torch.tanh(self.first(x + self.embed.weight[0]))) * self.scale

        torch.manual_seed(0)
        return Small()

    def tied(self) -> Any:
        import torch

        class Tied(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = torch.nn.Linear(4, 4)
                self.second = torch.nn.Linear(4, 4)
                self.second.weight = self.first.weight

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.second(torch.tanh(self.first(x)))

        torch.manual_seed(0)
        return Tied()

    def run(self, model: Any, array: np.ndarray) -> np.ndarray:
        import torch

        with torch.no_grad():
            return model(torch.tensor(array, dtype=torch.float32)).numpy()

    def backward(self, model: Any, array: np.ndarray) -> None:
        import torch

        model(torch.tensor(array, dtype=torch.float32)).square().sum().backward()


class MindSporeModels(Models):
    """On MindSpore."""

    def small(self) -> Any:
        import mindspore
        from mindspore import mint, nn

        class Small(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.embed = mint.nn.Embedding(6, 4)
                self.first = mint.nn.Linear(4, 4)
                self.second = nn.Dense(4, 4)
                self.register_buffer("scale", mint.ones((4,)))

            def construct(self, x: Any) -> Any:
                return self.second(mint.tanh(self.first(x + self.embed.weight[0]))) * self.scale

        mindspore.set_seed(0)
        return Small()

    def tied(self) -> Any:
        import mindspore
        from mindspore import mint, nn

        class Tied(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.first = mint.nn.Linear(4, 4)
                self.second = mint.nn.Linear(4, 4)
                self.second.weight = self.first.weight

            def construct(self, x: Any) -> Any:
                return self.second(mint.tanh(self.first(x)))

        mindspore.set_seed(0)
        return Tied()

    def run(self, model: Any, array: np.ndarray) -> np.ndarray:
        import mindspore

        with mindspore._no_grad():
            return np.array(model(mindspore.Tensor(array.astype(np.float32))).asnumpy(), copy=True)

    def backward(self, model: Any, array: np.ndarray) -> None:
        import mindspore

        parameters = model.trainable_params()
        step = mindspore.value_and_grad(lambda x: model(x).square().sum(), None, parameters)
        _, gradients = step(mindspore.Tensor(array.astype(np.float32)))
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient


def models_for(adapter: Adapter) -> Models:
    """The models of that framework."""
    known: dict[str, type[Models]] = {"torch": TorchModels, "mindspore": MindSporeModels}
    return known[adapter.name]()
