"""Blocks of models that are no single list of layers: found, planned under a budget, and bitwise exact."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from hyper_parallel.backends.torch.planner.blocks import find_blocks
from hyper_parallel.backends.torch.planner.module_calls import find_blocks_of_step
from hyper_parallel.errors import PlanError
from hyper_parallel.testing import simulated_accelerator

from .models import BATCH, HEADS, LENGTH, VOCABULARY, WIDTH, Layer, Mlp, assert_same, gradients, token_ids, tree_of

Built = tuple[nn.Module, Callable[[], torch.Tensor]]


def stepping(model: nn.Module, loss_of: Callable[[], Any]) -> Built:
    def step() -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        return loss.detach()

    return model.train(), step


def t5() -> Built:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=HEADS, decoder_start_token_id=0
    )
    model, ids = transformers.T5ForConditionalGeneration(config), token_ids()
    return stepping(model, lambda: model(input_ids=ids, labels=ids).loss)


def two_towers() -> Built:
    import transformers

    shared = {"hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": HEADS, "projection_dim": 16}
    text = {**shared, "vocab_size": VOCABULARY, "num_hidden_layers": 3, "max_position_embeddings": LENGTH}
    config = transformers.CLIPConfig(
        text_config={**text, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
        vision_config={**shared, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    model, ids, pixels = transformers.CLIPModel(config), token_ids(), torch.randn(BATCH, 3, 32, 32)
    return stepping(model, lambda: model(input_ids=ids, pixel_values=pixels, return_loss=True).loss)


def whisper() -> Built:
    import transformers

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config = transformers.WhisperConfig(
        **layers, vocab_size=VOCABULARY, d_model=WIDTH, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        num_mel_bins=8, max_source_positions=32, max_target_positions=LENGTH, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model, sound, ids = transformers.WhisperForConditionalGeneration(config), torch.randn(BATCH, 8, 64), token_ids()
    return stepping(model, lambda: model(input_features=sound, labels=ids).loss)


def albert() -> Built:
    """One layer whose weights serve four times."""
    import transformers

    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY, embedding_size=16, hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=HEADS,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    model, ids = transformers.AlbertForMaskedLM(config), token_ids()
    return stepping(model, lambda: model(input_ids=ids, labels=ids).loss)


class Residual(nn.Module):
    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, given)
        self.first = nn.Conv2d(given, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Conv2d(given, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.skip(x) + self.second(F.silu(self.first(self.norm(x))))


class UNet(nn.Module):
    """Lists of lists, as diffusion models have them, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.down = nn.ModuleList(
            nn.ModuleList([Residual(a, a), Residual(a, a), nn.Conv2d(a, b, 4, 2, 1)]) for a, b in ((8, 16), (16, 32))
        )
        self.middle = Residual(32, 32)
        self.up = nn.ModuleList(
            nn.ModuleList([nn.ConvTranspose2d(a, b, 4, 2, 1), Residual(2 * b, b)]) for a, b in ((32, 16), (16, 8))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.enter(x), []
        for one, two, shrink in self.down:  # type: ignore[misc]
            x = two(one(x))
            skips.append(x)
            x = shrink(x)
        x = self.middle(x)
        for grow, one in self.up:  # type: ignore[misc]
            x = one(torch.cat([grow(x), skips.pop()], 1))
        return self.leave(x)


def unet() -> Built:
    model, pixels = UNet(), torch.randn(2, 3, 32, 32)
    return stepping(model, lambda: model(pixels).square().mean())


class Towers(nn.Module):
    """Two stacks in a dictionary; each is a module of the same class."""

    def __init__(self, tower: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"left": tower(), "right": tower()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.towers["left"](x) * self.towers["right"](x)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda y, layer: layer(y), self.layers, x)


def towers(tower: Callable[[], nn.Module]) -> Built:
    model, x = Towers(tower), torch.randn(BATCH, LENGTH, WIDTH)
    return stepping(model, lambda: model(x).square().mean())


def swin() -> Built:
    """Stages of different widths, each a list of layers."""
    import transformers

    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
    )
    model, pixels = transformers.SwinForImageClassification(config), torch.randn(2, 3, 32, 32)
    return stepping(model, lambda: model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss)


class Looped(nn.Module):
    """One block, called six times; no container says so."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.head = nn.Linear(WIDTH, WIDTH), Layer(), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for _ in range(6):
            x = self.block(x)
        return self.head(x)


def looped() -> Built:
    model, x = Looped(), torch.randn(BATCH, LENGTH, WIDTH)
    return stepping(model, lambda: model(x).square().mean())


class Numbered(nn.Module):
    """Layers as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3 = Layer(), Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer3(self.layer2(self.layer1(x)))


def numbered() -> Built:
    model, x = Numbered(), torch.randn(BATCH, LENGTH, WIDTH)
    return stepping(model, lambda: model(x).square().mean())


def _paths(*groups: tuple[str, int]) -> list[str]:
    return [f"{prefix}.{number}" for prefix, count in groups for number in range(count)]


KINDS: dict[str, tuple[Callable[[], Built], list[str]]] = {
    "t5": (t5, _paths(("encoder.block", 2), ("decoder.block", 2))),
    "two towers": (two_towers, _paths(("text_model.encoder.layers", 3), ("vision_model.encoder.layers", 2))),
    "whisper": (whisper, _paths(("model.encoder.layers", 2), ("model.decoder.layers", 2))),
    "albert": (albert, ["albert.encoder.albert_layer_groups.0"]),
    "u-net": (unet, ["down.0.0", "down.0.1", "down.1.0", "down.1.1", "up.0.1", "up.1.1"]),
    "dictionary of sequences": (
        lambda: towers(lambda: nn.Sequential(Layer(), Layer())),
        _paths(("towers.left", 2), ("towers.right", 2)),
    ),
    "dictionary of towers": (lambda: towers(Tower), _paths(("towers.left.layers", 3), ("towers.right.layers", 3))),
    "stages": (swin, _paths(("swin.encoder.layers.0.blocks", 2), ("swin.encoder.layers.1.blocks", 2))),
    "looped": (looped, ["block"]),
    "numbered attributes": (numbered, ["layer1", "layer2", "layer3"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_found_and_a_budget_is_kept_bitwise(kind: str) -> None:
    build, paths = KINDS[kind]
    torch.manual_seed(1)
    model, step = build()
    assert [block.name for block in find_blocks_of_step(model, None, step, who="test")] == paths
    wanted = gradients(model, step)
    tree = tree_of(model)
    with simulated_accelerator() as sim:
        step()
        sim.reset_peak()
        step()
        peak = sim.peak_bytes
        model.zero_grad()
        fixed = 2 * sum(p.nbytes for p in model.parameters())
        budget = fixed + int(0.8 * (peak - fixed))
        applied = hp.fit_memory(model, step, budget, steps=1)
        assert applied.measured.peak_bytes <= budget < peak
        assert {block.name for block in applied.plan.blocks} == set(paths)
        got = gradients(model, step)
        applied.remove()
    assert_same(got, wanted)
    assert tree_of(model) == tree


def test_a_plan_counts_every_call_of_a_block() -> None:
    torch.manual_seed(1)
    model, step = looped()
    with simulated_accelerator():
        profile = hp.profile_memory(model, step, steps=1)
    assert [block.name for block in profile.blocks] == ["block"] * 6


def test_counting_calls_leaves_no_trace() -> None:
    model, step = looped()
    model.block.register_buffer("calls", torch.zeros(()))
    model.block.register_forward_hook(lambda module, *_: module.calls.add_(1) and None)
    tree, state = tree_of(model), torch.get_rng_state()
    find_blocks_of_step(model, None, step, who="test")
    assert tree_of(model) == tree
    assert float(model.block.calls) == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_accumulated_forwards_are_no_repeated_blocks() -> None:
    """Everything is called twice then, and nothing more often than what it is in."""

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model, x = Once(), torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(PlanError, match=r"layer \(Layer\), .*each is called once for every call of what it is in"):
        find_blocks_of_step(model, None, lambda: (model(x) + model(x)).sum().backward(), who="test")


class Experts(nn.Module):
    """A layer that holds a list of modules which are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Layer()
        self.experts = nn.ModuleList(Mlp() for _ in range(4))


Experts.forward = lambda self, x: self.experts[0](self.attention(x))  # type: ignore[method-assign,assignment]


def test_experts_inside_alike_layers_are_no_blocks() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Experts() for _ in range(4))
    assert [block.name for block in find_blocks(model, None, who="test")] == _paths(("layers", 4))


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        (nn.ModuleList([Layer()]), ["layers.0"]),
        (nn.ModuleList([Layer(), Mlp()]), ["layers.0", "layers.1"]),
        (nn.ModuleDict({"a": Layer(), "b": nn.Linear(2, 2)}), ["layers.a"]),
    ],
    ids=["one", "different classes", "one in a dictionary"],
)
def test_what_is_in_a_list_is_taken_where_nothing_is_repeated(layers: nn.Module, found: list[str]) -> None:
    model = nn.Module()
    model.layers = layers
    assert [block.name for block in find_blocks(model, None, who="test")] == found


def test_where_nothing_is_found_the_near_misses_are_named() -> None:
    model = nn.Module()
    model.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.empty = nn.ModuleDict()
    model.pools = nn.ModuleList([nn.Sequential(nn.ReLU(), nn.MaxPool1d(2)) for _ in range(2)])
    model.body = Layer()
    with pytest.raises(PlanError) as caught:
        find_blocks(model, None, who="fit_memory")
    text = str(caught.value)
    assert "heads (ModuleList of 2) holds modules without parts (Linear)" in text
    assert "empty (ModuleDict of 0) holds nothing that can be called" in text
    assert "pools (ModuleList of 2) holds modules without parameters (Sequential)" in text
    assert (
        "Modules with parts are body (Layer), body.attn (Attention), body.mlp (Mlp); whether one runs many times is"
        in text
    )
    assert text.endswith("Name the modules to treat as blocks, for example blocks='body'.")
