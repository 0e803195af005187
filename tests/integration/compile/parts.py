"""A small residual model whose blocks can be compiled and wrapped, and a backend that counts its runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

WIDTH, ROWS, BLOCKS = 16, 24, 3

Wrap = Callable[[Any], Any]


class Block(nn.Module):
    """Norm, two linears, gelu, dropout, residual."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Work before and after the blocks, so that a compiled stack has something of its own to compile.

    It has functions of its own, because torch gives up a whole function whose loop holds a graph break.
    """

    def __init__(self, wrap: Wrap, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(wrap(Block(dropout)) for _ in range(BLOCKS))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.enter(x))

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.sin(x)).square().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(x)


def stack(wrap: Wrap = lambda block: block, dropout: float = 0.0) -> Stack:
    """The same weights every time."""
    torch.manual_seed(0)
    return Stack(wrap, dropout)


def step(model: Callable[[torch.Tensor], torch.Tensor], parameters: Any, *, seed: int = 1) -> list[torch.Tensor]:
    """Loss, gradient of the input and of every parameter, from a fixed random state."""
    parameters = list(parameters)
    torch.manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    loss = model(x)
    loss.backward()
    made = [loss.detach().clone(), x.grad, *(parameter.grad for parameter in parameters)]
    for parameter in parameters:
        parameter.grad = None
    return [tensor for tensor in made if tensor is not None]


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Bit by bit."""
    assert len(got) == len(wanted)
    different = [index for index, (one, other) in enumerate(zip(got, wanted)) if not torch.equal(one, other)]
    assert not different, f"tensors {different} of {len(wanted)} differ (0 is the loss, 1 the input's gradient)"


class CountingBackend:
    """A compiler backend that counts what it compiled and how often that ran in forward."""

    def __init__(self, name: str) -> None:
        self._compile: Callable[..., Any] = torch._dynamo.lookup_backend(name)
        self.compiled = 0
        self.runs = 0

    def __call__(self, module: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.compiled += 1
        function = self._compile(module, example_inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return function(*args)

        return run


class GraphsBackend:
    """A compiler backend that runs graphs as they are, and keeps those of forward and backward."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.Graph] = []
        self.backward: list[torch.fx.Graph] = []
        self._compile = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    @staticmethod
    def _keep(graphs: list[torch.fx.Graph]) -> Callable[..., Any]:
        def compile_graph(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            graphs.append(module.graph)
            return make_boxed_func(module.forward)

        return compile_graph

    def __call__(self, module: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = self._compile(module, example_inputs)
        return compiled

    def count(self, graphs: list[torch.fx.Graph], name: str) -> int:
        """How many ops of this name the graphs hold."""
        packet = getattr(torch.ops.aten, name)
        return sum(getattr(node.target, "overloadpacket", None) is packet for graph in graphs for node in graph.nodes)

    def recomputed(self) -> dict[str, int]:
        """Ops of the block's forward that the backward graphs run again."""
        return {name: self.count(self.backward, name) for name in ("addmm", "native_layer_norm")}


def graph_breaks() -> list[str]:
    """Every graph break since the compiler was reset."""
    return list(counters["graph_break"])


def graphs_traced() -> int:
    """How many graphs dynamo made since the compiler was reset."""
    return int(counters["stats"]["unique_graphs"])
