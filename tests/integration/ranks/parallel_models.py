"""Small models under FSDP2, tensor, context and expert parallelism: two ranks on gloo, each with the step of its rank.

Torch's context parallelism has no attention kernel for CPU tensors, so the context-parallel model exchanges heads for
positions with torch's functional all-to-all: every rank has all positions of its heads while it attends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH: Final = 32
HEADS: Final = 4
LENGTH: Final = 64
BLOCKS: Final = 3
EXPERTS_PER_RANK: Final = 2

Exchange = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Parallel:
    """A model, and one forward and backward of this rank."""

    model: nn.Module
    step: Callable[[], None]


class Attention(nn.Module):
    """Attention over all positions; ``gather`` and ``scatter`` are around it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gather: Exchange | None = None
        self.scatter: Exchange | None = None

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # batch, heads, positions, width of a head
        return heads if self.gather is None else self.gather(heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(
            self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x)), is_causal=True
        )
        if self.scatter is not None:
            attended = self.scatter(attended)
        return self.out(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Every token goes to one expert, on whichever rank that is, and comes back."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        super().__init__()
        self.group = group
        self.size = group.size()
        self.router = nn.Linear(WIDTH, EXPERTS_PER_RANK * self.size, bias=False)
        torch.manual_seed(100 + rank)  # every rank has other experts
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS_PER_RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        sent = expert.bincount(minlength=EXPERTS_PER_RANK * self.size).view(self.size, EXPERTS_PER_RANK)
        received = wait_tensor(all_to_all_single(sent, None, None, self.group))
        ins, outs = sent.sum(1).tolist(), received.sum(1).tolist()
        here = all_to_all_single_autograd(tokens[order], outs, ins, self.group)
        parts = here.split(received.flatten().tolist())
        made = torch.cat([self.experts[at % EXPERTS_PER_RANK](part) for at, part in enumerate(parts)])
        back = all_to_all_single_autograd(made, ins, outs, self.group)
        return (back[order.argsort()] * weight[:, None]).view_as(x)


class Block(nn.Module):
    def __init__(self, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = Mlp() if mlp is None else mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Stack(nn.Module):
    def __init__(self, make_mlp: Callable[[], nn.Module | None] = lambda: None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for number in range(BLOCKS):
            torch.manual_seed(number)
            self.blocks.append(Block(make_mlp()))
        torch.manual_seed(50)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _batch(rows: int, seed: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def _parallel(model: nn.Module, batch: torch.Tensor) -> Parallel:
    return Parallel(model, lambda: model(batch).square().mean().backward())


def fsdp2(rank: int) -> Parallel:
    """Each rank has other data; rank 1 has more of it."""
    model = Stack()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _parallel(model, _batch(2 + 2 * rank, rank))


def tensor(rank: int) -> Parallel:
    """All ranks have the same data."""
    model, mesh = Stack(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"attention.out": RowwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return _parallel(model, _batch(4, 0))


def _heads_to_positions(group: dist.ProcessGroup) -> tuple[Exchange, Exchange]:
    size = group.size()

    def exchange(parts: torch.Tensor) -> torch.Tensor:  # the first axis: a part for each rank, then one of each rank
        flat = all_to_all_single_autograd(parts.contiguous().view(-1), None, None, group)
        return flat.view_as(parts)

    def gather(x: torch.Tensor) -> torch.Tensor:
        parts = torch.stack(x.chunk(size, dim=1))
        return torch.cat(exchange(parts).unbind(0), dim=2)

    def scatter(x: torch.Tensor) -> torch.Tensor:
        parts = torch.stack(x.chunk(size, dim=2))
        return torch.cat(exchange(parts).unbind(0), dim=1)

    return gather, scatter


def context(rank: int) -> Parallel:
    """Each rank has its part of the positions."""
    model, group = Stack(), dist.group.WORLD
    assert group is not None
    for block in model.blocks:
        block.attention.gather, block.attention.scatter = _heads_to_positions(group)
    return _parallel(model, _batch(4, 0).chunk(group.size(), dim=1)[rank].contiguous())


def experts(rank: int) -> Parallel:
    """Each rank has its experts and its data; how many tokens an expert gets depends on the data."""
    group = dist.group.WORLD
    assert group is not None
    return _parallel(Stack(lambda: Experts(group, rank)), _batch(3, rank))


KINDS: Final[dict[str, Callable[[int], Parallel]]] = {
    "fsdp2": fsdp2,
    "tensor": tensor,
    "context": context,
    "experts": experts,
}

SHARES: Final = {"fsdp2": 0.6, "tensor": 0.6, "context": 0.7, "experts": 0.7}
"""Of the bytes that a step holds at its peak above those between two steps: what the budget leaves."""
