"""Scenarios about how layers are joined: order, sharing, skipping, branching, what goes in and out of a layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp

from .kinds import Kind
from .models import WIDTH, Attention, Block, Bottle, Chain, Crossing, Experts, Packet, Pair
from .scenario import Log, batch, scenario

__all__: list[str] = []


def _step(kind: Kind, log: Log, model: nn.Module, forward: Any, *args: Any) -> None:
    x = batch()
    out = kind.forward(forward, x, *args)
    out.pow(2).mean().backward()
    log.keep("output", out)
    log.keep("input", x.grad)
    log.model(model)


@scenario
def layer_skipped_now_and_then(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(Block()) for _ in range(4)])
    for skipped in ((), (1,), (0, 3), (0, 1, 2, 3), (2,)):

        def forward(x: torch.Tensor, skipped: tuple[int, ...] = skipped) -> torch.Tensor:
            for index, layer in enumerate(model.layers):
                x = x if index in skipped else layer(x)
            return x

        model.zero_grad()
        _step(kind, log, model, forward)


@scenario
def layer_called_several_times(kind: Kind, log: Log) -> None:
    layer = kind.layer(Block())

    def forward(x: torch.Tensor) -> torch.Tensor:
        return layer(layer(layer(x))) + layer(x.flip(0))

    _step(kind, log, layer, forward)


@scenario
def weights_tied(kind: Kind, log: Log) -> None:
    embedding = nn.Embedding(11, WIDTH)
    head = nn.Linear(WIDTH, 11, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(kind.layer(embedding), kind.layer(Block()), kind.layer(head))
    tokens = torch.tensor([[1, 4, 10], [0, 4, 3]])
    logits = kind.forward(model, tokens)
    F.cross_entropy(logits.view(-1, 11), tokens.view(-1)).backward()
    log.keep("output", logits)
    log.model(model)


@scenario
def layers_in_another_order_than_declared(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(Block()) for _ in range(4)])
    if kind.name not in ("plain", "torch_checkpoint"):
        for first, second in zip(model.layers[:-1], model.layers[1:]):
            hp.SwapManager().set_forward_prefetch_layer(first, second)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 0), (1,)):

        def forward(x: torch.Tensor, order: tuple[int, ...] = order) -> torch.Tensor:
            for index in order:
                x = model.layers[index](x)
            return x

        _step(kind, log, model, forward)


@scenario
def declared_chain(kind: Kind, log: Log) -> None:
    """Two micro-batches in flight on a declared chain, several steps."""
    model = Chain([kind.layer(Block()) for _ in range(4)])
    if kind.name not in ("plain", "torch_checkpoint"):
        for first, second in zip(model.layers[:-1], model.layers[1:]):
            hp.SwapManager().set_forward_prefetch_layer(first, second)
    for _ in range(2):
        one, two = batch(seed=1), batch(seed=2)
        first_loss = kind.forward(model, one).pow(2).mean()
        second_loss = kind.forward(model, two).pow(2).mean()
        first_loss.backward(retain_graph=True)
        second_loss.backward()
        first_loss.backward()
        log.keep("input", one.grad)
        log.keep("input", two.grad)
        log.model(model)


@scenario
def encoder_output_shared_by_decoder_layers(kind: Kind, log: Log) -> None:
    encoder, decoder = Chain([kind.layer(Block()) for _ in range(2)]), [kind.layer(Crossing()) for _ in range(3)]
    model = nn.ModuleList([encoder, *decoder])

    def forward(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        memory = encoder(source)
        for layer in decoder:
            x = layer(x, memory)
        return x

    source = batch(5, seed=3)
    _step(kind, log, model, forward, source)
    log.keep("source", source.grad)


@scenario
def attention_with_shared_tables_and_mask(kind: Kind, log: Log) -> None:
    layers = nn.ModuleList([kind.layer(Attention()) for _ in range(3)])
    x = batch(2 * 3).detach().view(2, 3, WIDTH).requires_grad_()
    cos, sin = torch.linspace(0, 1, 3 * 4).view(3, 4), torch.linspace(1, 0, 3 * 4).view(3, 4)
    mask = torch.ones(3, 3).tril()

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x, cos, sin, mask)
        return x

    for _ in range(2):
        out = kind.forward(forward, x)
        out.pow(2).mean().backward()
        log.keep("output", out)
        log.keep("input", x.grad)
        log.keep("tables", torch.stack([cos, sin]))
    log.model(layers)


@scenario
def skip_connections(kind: Kind, log: Log) -> None:
    model = Bottle([kind.layer(Block()) for _ in range(3)], [kind.layer(Block()) for _ in range(3)])
    _step(kind, log, model, model)


@scenario
def auxiliary_loss_on_a_middle_layer(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(Block()) for _ in range(3)])
    x = batch()

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = model.layers[0](x)
        return middle, model.layers[2](model.layers[1](middle))

    middle, out = kind.forward(forward, x)
    middle.abs().sum().backward(retain_graph=True)
    out.pow(2).mean().backward()
    log.keep("middle", middle)
    log.keep("input", x.grad)
    log.model(model)


@scenario
def early_exit(kind: Kind, log: Log) -> None:
    """Backward from a middle layer only, while the rest of the graph lives and is never used."""
    model = Chain([kind.layer(Block()) for _ in range(4)])

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        outs = []
        for layer in model.layers:
            x = layer(x)
            outs.append(x)
        return outs

    for exit_at in (1, 3, 0):
        model.zero_grad()
        x = batch(seed=exit_at)
        outs = kind.forward(forward, x)
        outs[exit_at].pow(2).mean().backward()
        log.keep("input", x.grad)
        log.keep("last", outs[-1])
        log.model(model)


@scenario
def dead_branch(kind: Kind, log: Log) -> None:
    model = nn.ModuleList([kind.layer(Block()) for _ in range(3)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model[0](x)
        model[1](x).exp()
        return model[2](x) + model[1](x).detach()

    _step(kind, log, model, forward)


@scenario
def two_heads_with_separate_backwards(kind: Kind, log: Log) -> None:
    trunk, left, right = (kind.layer(Block()) for _ in range(3))
    model = nn.ModuleList([trunk, left, right])
    x = batch()

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shared = trunk(x)
        return left(shared), right(shared)

    one, two = kind.forward(forward, x)
    two.sum().backward(retain_graph=True)
    log.keep("input", x.grad)
    one.pow(2).sum().backward()
    log.keep("input", x.grad)
    log.model(model)


@scenario
def experts_without_tokens(kind: Kind, log: Log) -> None:
    model = Experts([kind.layer(Block()) for _ in range(3)])
    for forbidden in (0, 2, 1):
        _step(kind, log, model, model, forbidden)


class _KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, *, x: torch.Tensor, scale: dict[str, Any]) -> dict[str, Any]:
        values = [value * scale["by"] for value in (self.block(x), x.sin())]
        return {"sum": values[0] + scale["bias"][0], "parts": (values, {"deep": values[1].exp()}), "name": "out"}


@scenario
def keywords_and_nested_values(kind: Kind, log: Log) -> None:
    model = nn.ModuleList([kind.layer(_KeywordsOnly()) for _ in range(2)])
    x, bias = batch(), batch(seed=2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        first = model[0](x=x, scale={"by": 2.0, "bias": [bias, None]})
        second = model[1](x=first["sum"], scale={"by": first["parts"][1]["deep"], "bias": (first["parts"][0][0],)})
        return second["sum"] + second["parts"][1]["deep"]

    out = kind.forward(forward, x)
    out.pow(2).mean().backward()
    log.keep("output", out)
    log.keep("input", x.grad)
    log.keep("bias", bias.grad)
    log.model(model)


class _Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, packet: Packet, pair: Pair) -> tuple[Packet, Pair]:
        body = self.block(packet.body) * pair.left
        return Packet(body, {"twice": body * 2, "flag": packet.extra["flag"]}), Pair(
            pair.right["x"].tanh(), {"x": body}
        )


@scenario
def dataclass_and_named_tuple(kind: Kind, log: Log) -> None:
    model = nn.ModuleList([kind.layer(_Structured()) for _ in range(2)])
    x, y = batch(), batch(seed=2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        packet, pair = model[0](Packet(x, {"flag": True}), Pair(y, {"x": x * y}))
        packet, pair = model[1](packet, pair)
        return packet.extra["twice"] * pair.left

    out = kind.forward(forward, x)
    out.pow(2).mean().backward()
    log.keep("output", out)
    log.keep("input", x.grad)
    log.keep("second input", y.grad)
    log.model(model)


class _Viewing(nn.Module):
    """Returns a view of what it computed, its own input, and a view of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        left, _ = self.linear(x).sigmoid().chunk(2, dim=-1)
        return left, x, x.t()


@scenario
def outputs_are_views_and_inputs(kind: Kind, log: Log) -> None:
    model = nn.ModuleList([kind.layer(_Viewing()) for _ in range(3)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        total = x
        for layer in model:
            left, same, turned = layer(total)
            total = left * same + turned.t().exp()
        return total

    _step(kind, log, model, forward)


@scenario
def functions_instead_of_modules(kind: Kind, log: Log) -> None:
    weight = nn.Parameter(batch(WIDTH, seed=4).detach())

    def function(x: torch.Tensor, power: int = 2) -> torch.Tensor:
        return (x @ weight).tanh().pow(power)

    wrapped = kind.layer(function)
    x = batch()
    out = kind.forward(lambda x: wrapped(wrapped(x, 3), power=2), x)
    out.mean().backward()
    log.keep("output", out)
    log.keep("input", x.grad)
    log.keep("weight", weight.grad)


@scenario
def nested_wrappers(kind: Kind, log: Log) -> None:
    """Wrapped layers inside a wrapped layer."""
    inner = [kind.layer(Chain([kind.layer(Block()), Block(), kind.layer(Block())])) for _ in range(2)]
    model = kind.layer(Chain(inner))
    x = batch()
    loss = kind.forward(model, x).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    log.keep("input", x.grad)
    log.model(model)


@scenario
def input_without_grad(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(Block()) for _ in range(3)])
    x = batch(grad=False)
    for _ in range(2):
        kind.forward(model, x).pow(2).mean().backward()
    log.keep("the caller's batch", x)
    log.model(model)
