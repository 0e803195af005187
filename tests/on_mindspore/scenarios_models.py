"""Scenarios about how layers are joined: order, sharing, skipping, branching, what goes in and out of a layer."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import mint, nn, ops

import hyper_parallel as hp

from .kinds import Kind
from .models import WIDTH, Attention, Block, Bottle, Chain, Crossing, Experts, Packet, Pair
from .scenario import Halves, Log, batch, scenario

__all__: list[str] = []


def _is_ours(kind: Kind) -> bool:
    return kind.name not in ("plain", "mindspore_recompute")


def _declare_chain(kind: Kind, layers: Any) -> None:
    if _is_ours(kind):
        for first, second in zip(list(layers)[:-1], list(layers)[1:]):
            hp.SwapManager().set_forward_prefetch_layer(first, second)


@scenario
def layer_skipped_now_and_then(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(Block()) for _ in range(4)])
    for skipped in ((), (1,), (0, 3), (2,)):

        def forward(x: Any, skipped: tuple[int, ...] = skipped) -> Any:
            for index, layer in enumerate(model.layers):
                x = x if index in skipped else layer(x)
            return x

        log.step(kind, forward, batch(), model=model)


@scenario
def layer_called_several_times(kind: Kind, log: Log) -> None:
    layer = kind.layer(Block())
    log.step(kind, lambda x: layer(layer(layer(x))) + layer(x * 2), batch(), model=layer)


@scenario
def weights_tied(kind: Kind, log: Log) -> None:
    embedding, block = nn.Embedding(11, WIDTH), Block()
    model = nn.CellList([kind.layer(embedding), kind.layer(block)])
    head = kind.layer(lambda h: mint.matmul(h, embedding.embedding_table.T))
    tokens = mindspore.Tensor(np.array([[1, 4, 10], [0, 4, 3]], np.int32))

    def loss(logits: Any) -> Any:
        return ops.cross_entropy(logits.reshape(-1, 11), tokens.reshape(-1))

    log.step(kind, lambda tokens: head(model[1](model[0](tokens))), tokens, model=model, loss=loss, of_inputs=False)


@scenario
def layers_in_another_order_than_declared(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(Block()) for _ in range(4)])
    _declare_chain(kind, model.layers)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 0), (1,)):

        def forward(x: Any, order: tuple[int, ...] = order) -> Any:
            for index in order:
                x = model.layers[index](x)
            return x

        log.step(kind, forward, batch(), model=model)


@scenario
def declared_chain(kind: Kind, log: Log) -> None:
    """Two micro-batches in flight on a declared chain, several steps."""
    model = Chain([kind.layer(Block()) for _ in range(4)])
    _declare_chain(kind, model.layers)
    halves = Halves(kind, model)
    for _ in range(2):
        one, two = batch(seed=1), batch(seed=2)
        outs = halves.forward(one), halves.forward(two)
        log.all("first", halves.backward(one, outs[0]))
        log.all("second", halves.backward(two, outs[1]))


@scenario
def encoder_output_shared_by_decoder_layers(kind: Kind, log: Log) -> None:
    encoder = Chain([kind.layer(Block()) for _ in range(2)])
    decoder = nn.CellList([kind.layer(Crossing()) for _ in range(3)])
    weights = [*encoder.trainable_params(), *decoder.trainable_params()]

    def forward(x: Any, source: Any) -> Any:
        memory = encoder(source)
        for layer in decoder:
            x = layer(x, memory)
        return x

    log.step(kind, forward, batch(), batch(5, seed=3), model=weights)


@scenario
def attention_with_shared_tables_and_mask(kind: Kind, log: Log) -> None:
    layers = nn.CellList([kind.layer(Attention()) for _ in range(3)])
    x = mindspore.Tensor(batch(6).asnumpy().reshape(2, 3, WIDTH))
    cos = mindspore.Tensor(np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4))
    sin = mindspore.Tensor(np.linspace(1, 0, 12, dtype=np.float32).reshape(3, 4))
    mask = mindspore.Tensor(np.tril(np.ones((3, 3), np.float32)))

    def forward(x: Any) -> Any:
        for layer in layers:
            x = layer(x, cos, sin, mask)
        return x

    for _ in range(2):
        log.step(kind, forward, x, model=layers)
        log.all("table", (cos, sin, mask))


@scenario
def skip_connections(kind: Kind, log: Log) -> None:
    model = Bottle([kind.layer(Block()) for _ in range(3)], [kind.layer(Block()) for _ in range(3)])
    log.step(kind, model, batch())


@scenario
def auxiliary_loss_on_a_middle_layer(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(Block()) for _ in range(3)])

    def forward(x: Any) -> tuple[Any, Any]:
        middle = model.layers[0](x)
        return middle, model.layers[2](model.layers[1](middle))

    log.step(kind, forward, batch(), model=model, loss=lambda both: both[0].abs().sum() + both[1].square().mean())


@scenario
def early_exit(kind: Kind, log: Log) -> None:
    """Backward from a middle layer only, while the rest of the graph lives and is never used."""
    model = Chain([kind.layer(Block()) for _ in range(4)])

    def forward(x: Any) -> list[Any]:
        outs = []
        for layer in model.layers:
            x = layer(x)
            outs.append(x)
        return outs

    for exit_at in (1, 3, 0):
        log.step(
            kind, forward, batch(seed=exit_at), model=model, loss=lambda outs, at=exit_at: outs[at].square().mean()
        )


@scenario
def dead_branch(kind: Kind, log: Log) -> None:
    model = nn.CellList([kind.layer(Block()) for _ in range(3)])

    def forward(x: Any) -> Any:
        x = model[0](x)
        mint.exp(model[1](x))
        return model[2](x) + ops.stop_gradient(model[1](x))

    log.step(kind, forward, batch(), model=model)


@scenario
def experts_without_tokens(kind: Kind, log: Log) -> None:
    model = Experts([kind.layer(Block()) for _ in range(3)])
    for choice in ((1, 2, 1, 1), (0, 0, 0, 0), (2, 0, 1, 2)):
        log.step(kind, lambda x, choice=choice: model(x, choice), batch(), model=model)


class _KeywordsOnly(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def construct(self, *, x: Any, scale: dict[str, Any]) -> dict[str, Any]:
        values = [value * scale["by"] for value in (self.block(x), mint.sin(x))]
        return {"sum": values[0] + scale["bias"][0], "parts": (values, {"deep": mint.exp(values[1])}), "name": "out"}


@scenario
def keywords_and_nested_values(kind: Kind, log: Log) -> None:
    model = nn.CellList([kind.layer(_KeywordsOnly()) for _ in range(2)])

    def forward(x: Any, bias: Any) -> Any:
        first = model[0](x=x, scale={"by": 2.0, "bias": [bias, None]})
        second = model[1](x=first["sum"], scale={"by": first["parts"][1]["deep"], "bias": (first["parts"][0][0],)})
        return second["sum"] + second["parts"][1]["deep"]

    log.step(kind, forward, batch(), batch(seed=2), model=model)


class _Structured(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def construct(self, packet: Packet, pair: Pair) -> tuple[Packet, Pair]:
        body = self.block(packet.body) * pair.left
        return Packet(body, {"twice": body * 2, "flag": packet.extra["flag"]}), Pair(
            mint.tanh(pair.right["x"]), {"x": body}
        )


@scenario
def dataclass_and_named_tuple(kind: Kind, log: Log) -> None:
    model = nn.CellList([kind.layer(_Structured()) for _ in range(2)])

    def forward(x: Any, y: Any) -> Any:
        packet, pair = model[0](Packet(x, {"flag": True}), Pair(y, {"x": x * y}))
        packet, pair = model[1](packet, pair)
        return packet.extra["twice"] * pair.left

    log.step(kind, forward, batch(), batch(seed=2), model=model)


class _Viewing(nn.Cell):
    """Returns a view of what it computed, its own input, and a view of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = mint.nn.Linear(WIDTH, 2 * WIDTH)

    def construct(self, x: Any) -> tuple[Any, Any, Any]:
        left, _ = mint.chunk(mint.sigmoid(self.linear(x)), 2, dim=-1)
        return left, x, x.T


@scenario
def outputs_are_views_and_inputs(kind: Kind, log: Log) -> None:
    model = nn.CellList([kind.layer(_Viewing()) for _ in range(3)])

    def forward(x: Any) -> Any:
        total = x
        for layer in model:
            left, same, turned = layer(total)
            total = left * same + mint.exp(turned.T)
        return total

    log.step(kind, forward, batch(), model=model)


@scenario
def functions_instead_of_modules(kind: Kind, log: Log) -> None:
    weight = mindspore.Parameter(batch(WIDTH, seed=4), name="weight")

    def function(x: Any, power: int = 2) -> Any:
        return mint.pow(mint.tanh(mint.matmul(x, weight)), power)

    wrapped = kind.layer(function)
    log.step(kind, lambda x: wrapped(wrapped(x, 3), power=2), batch(), model=[weight])


@scenario
def nested_wrappers(kind: Kind, log: Log) -> None:
    """Wrapped layers inside a wrapped layer."""
    inner = [kind.layer(Chain([kind.layer(Block()), Block(), kind.layer(Block())])) for _ in range(2)]
    log.step(kind, kind.layer(Chain(inner)), batch())


@scenario
def input_without_grad(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(Block()) for _ in range(3)])
    x = batch()
    for _ in range(2):
        log.step(kind, model, x, of_inputs=False)
    log.keep("the caller's batch", x)
