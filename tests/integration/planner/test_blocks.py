"""Which modules are taken for blocks, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.backends.torch.planner.blocks import find_blocks, fingerprint_of
from hyper_parallel.errors import PlanError

from .models import FAMILIES, Layer, Transformer, transformer


def names(model: nn.Module, patterns: str | list[str] | None = None) -> list[str]:
    return [block.name for block in find_blocks(model, patterns, who="test")]


@pytest.mark.parametrize(
    ("family", "prefix"),
    [("transformer", "layers"), ("llama", "model.layers"), ("gpt2", "transformer.h"), ("moe", "model.layers")],
)
def test_the_repeated_layers_of_known_families(family: str, prefix: str) -> None:
    model, _ = FAMILIES[family]()
    assert names(model) == [f"{prefix}.{number}" for number in range(4)]


def test_two_stacks_are_both_found_and_their_insides_are_not() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(Layer(), Layer())
            self.decoder = nn.ModuleList([Layer(), Layer(), nn.Linear(2, 2)])
            self.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])  # leaves have nothing to replay

    assert names(Both()) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


class _Holder(nn.Module):
    """Holds two parts that the model calls one by one; it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Layer(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def _parts() -> dict[str, nn.Module]:
    return dict(_Holder()._modules)


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        (nn.ModuleList(nn.ModuleDict(_parts()) for _ in range(2)), ["0.attn", "0.mlp", "1.attn", "1.mlp"]),
        (nn.ModuleDict({key: nn.ModuleDict(_parts()) for key in "ab"}), ["a.attn", "a.mlp", "b.attn", "b.mlp"]),
        (nn.ModuleList(nn.ModuleList(_parts().values()) for _ in range(2)), ["0.0", "0.1", "1.0", "1.1"]),
        (nn.ModuleDict({key: nn.ModuleList([Layer()]) for key in "ab"}), ["a.0", "b.0"]),
        (nn.ModuleList(_Holder() for _ in range(2)), ["0.attn", "0.mlp", "1.attn", "1.mlp"]),
        (nn.ModuleDict({"a": Layer(), "b": Layer(), "head": nn.Linear(2, 2)}), ["a", "b"]),
        (nn.ModuleList(nn.Sequential(Layer(), nn.ReLU()) for _ in range(2)), ["0", "1"]),
    ],
    ids=["list_of_dicts", "dict_of_dicts", "list_of_lists", "dict_of_lists", "holders", "dict", "list_of_sequences"],
)
def test_what_is_never_called_is_no_block_and_its_modules_are(layers: nn.Module, found: list[str]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

    assert names(Model()) == [f"layers.{name}" for name in found]


def test_patterns_that_name_what_is_never_called_are_refused() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict(_parts()) for _ in range(2))
    with pytest.raises(PlanError, match=r"layers\.0 \(named by 'layers\.\*'\) cannot be a block.*'layers\.\*\.\*'"):
        names(model, "layers.*")


def test_patterns_name_blocks() -> None:
    model = Transformer(3)
    assert names(model, "layers.*.mlp") == ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]
    assert names(model, ["layers.0", "layers.2.attn"]) == ["layers.0", "layers.2.attn"]
    assert names(model, ["layers.*", "layers.*.mlp"]) == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("model", "patterns", "kind", "text"),
    [
        (nn.Linear(2, 2), None, PlanError, r"Linear has no repeated blocks: .*blocks='encoder\.\*'"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            None,
            PlanError,
            r"has no repeated blocks.*its containers are the model \(Sequential of 3\)",
        ),
        (Transformer(2), "layer.*", PlanError, r"no module is called 'layer\.\*'; near misses: .*layers\.\d"),
        (Transformer(2), [], TypeError, r"blocks are one or more patterns .*, got \[\]"),
        (Transformer(2), [3], TypeError, r"blocks are one or more patterns"),
    ],
)
def test_what_has_no_blocks(model: nn.Module, patterns: object, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        find_blocks(model, patterns, who="test")  # type: ignore[arg-type]


def test_a_model_with_something_applied_is_refused() -> None:
    model, _ = transformer()
    with hp.apply_rules(model, "boundary"):
        with pytest.raises(PlanError, match=r"layers\.0 is wrapped already"):
            hp.apply_rules(model, "boundary")
    hp.apply_rules(model, "boundary").remove()


def test_a_block_with_a_wrapper_inside_is_refused() -> None:
    model, _ = transformer()
    model.layers[2].mlp = hp.swap_wrapper(model.layers[2].mlp)
    with pytest.raises(PlanError, match=r"layers\.2 is wrapped already, or something in it is"):
        hp.apply_rules(model, "boundary")


def test_gradient_checkpointing_of_the_model_itself_is_refused() -> None:
    model, step = FAMILIES["llama"]()
    model.activation_checkpointing_enable()
    with pytest.raises(PlanError, match=r"does gradient checkpointing of its own"):
        hp.list_ops(model, step)


def test_the_fingerprint_tells_models_apart_and_does_not_see_wrappers() -> None:
    one, two = Transformer(2), Transformer(2)
    assert fingerprint_of(one) == fingerprint_of(two)
    assert fingerprint_of(one) != fingerprint_of(Transformer(3))
    assert fingerprint_of(one) != fingerprint_of(Transformer(2).to(torch.float64))
    with hp.apply_rules(one, "boundary"):
        assert fingerprint_of(one) == fingerprint_of(two)


@pytest.mark.parametrize("wrong", [None, "model", torch.zeros(2)])
def test_what_is_no_model(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got"):
        hp.apply_rules(wrong, "boundary")
