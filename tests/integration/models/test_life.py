"""What people do with a model between two steps, or between its forward and its backward."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

from .steps import Result, assert_bitwise_equal, seeded_step, taken_gradients
from .treatments import SAVE_AND_SWAP, SWAP_MATMULS, TREATMENTS
from .zoo import FAMILIES, build, llama, text_batch, wrap_layers

WRAPS = {
    "swap": hp.swap_wrapper,
    "checkpoint_swap_inputs": lambda layer: hp.checkpoint_wrapper(layer, swap_inputs=True),
    "selective": lambda layer: hp.checkpoint_wrapper(layer, policy_fn=SAVE_AND_SWAP, swap_inputs=True),
}
each_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


def _llama(wrap: Callable[[Any], Any] | None = None) -> Any:
    model = build("llama")
    if wrap is not None:
        wrap_layers("llama", model, wrap)
    return model


@each_wrap
def test_saving_and_loading_pretrained_both_ways(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    wanted = seeded_step(_llama(), text_batch())
    wrapped = _llama(wrap)
    wrapped.save_pretrained(tmp_path / "from_wrapped")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "from_wrapped").train()
    assert type(loaded) is LlamaForCausalLM
    assert_bitwise_equal(seeded_step(loaded, text_batch()), wanted)
    with simulated_accelerator():
        wrap_layers("llama", loaded, wrap)
        assert_bitwise_equal(seeded_step(loaded, text_batch()), wanted)


@each_wrap
def test_a_model_loaded_into_wrapped_layers(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    source = build("llama", seed=3)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    wrapped = _llama(wrap)
    wrapped.load_state_dict(torch.load(tmp_path / "weights.pt"))
    with simulated_accelerator():
        got = seeded_step(wrapped, text_batch())
    assert_bitwise_equal(got, seeded_step(source, text_batch()))


@each_wrap
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_evaluation_and_generation_between_forward_and_backward(name: str, wrap: Callable[[Any], Any]) -> None:
    def interlude(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        model.eval()
        with torch.no_grad():
            logits = model(**FAMILIES[name].batch(5)).logits
        tokens = model.generate(
            FAMILIES[name].batch(6)["input_ids"][:, :6], max_new_tokens=5, do_sample=False, pad_token_id=0
        )
        model.train()
        return logits, tokens

    def step(model: Any) -> tuple[Result, tuple[torch.Tensor, torch.Tensor]]:
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        result = seeded_step(model, FAMILIES[name].batch(0), before_backward=lambda: seen.append(interlude(model)))
        return result, seen[0]

    wanted, (plain_logits, plain_tokens) = step(build(name))
    model = build(name)
    wrap_layers(name, model, wrap)
    with simulated_accelerator(window_bytes=16384) as sim:
        got, (logits, tokens) = step(model)
    assert sim.swapped_bytes > 0
    assert torch.equal(logits, plain_logits)
    assert torch.equal(tokens, plain_tokens)
    assert_bitwise_equal(got, wanted)


@pytest.mark.parametrize("treatment_name", TREATMENTS)
def test_autocast_to_bfloat16(treatment_name: str) -> None:
    treatment = TREATMENTS[treatment_name]

    def step(model: Any, around: Callable[[], Any]) -> Result:
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=torch.bfloat16), around():
            loss = model(**text_batch()).loss
        loss.backward()
        return Result(loss=loss.detach().clone(), gradients=taken_gradients(model))

    wanted = step(build("gpt2"), contextlib.nullcontext)
    model = build("gpt2")
    wrap_layers("gpt2", model, treatment.wrap)
    with simulated_accelerator(window_bytes=16384) as sim:
        assert_bitwise_equal(step(model, treatment.around_forward), wanted)
    assert (sim.swapped_bytes > 0) == treatment.swaps


class _LowRank(nn.Module):
    """A frozen linear layer with a trained low-rank addition and dropout, as adapters do it."""

    def __init__(self, frozen: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(self.dropout(x)))


def _add_low_rank(model: Any) -> None:
    model.requires_grad_(False)
    torch.manual_seed(21)
    for layer in model.model.layers:
        layer.self_attn.q_proj = _LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = _LowRank(layer.self_attn.v_proj)


@each_wrap
@pytest.mark.parametrize("wraps_first", [True, False])
def test_low_rank_adapters_on_frozen_weights(wrap: Callable[[Any], Any], wraps_first: bool) -> None:
    plain = _llama()
    _add_low_rank(plain)
    wanted = seeded_step(plain, text_batch())
    model = _llama()
    if wraps_first:
        wrap_layers("llama", model, wrap)
        _add_low_rank(model)
    else:
        _add_low_rank(model)
        wrap_layers("llama", model, wrap)
    assert list(model.state_dict()) == list(plain.state_dict())
    with simulated_accelerator(window_bytes=16384) as sim:
        got = seeded_step(model, text_batch())
    assert sim.swapped_bytes > 0
    assert_bitwise_equal(got, wanted)
    assert (
        sum(gradient is not None for gradient in got.gradients.values()) == 4 * 4
    )  # up and down, of q and v, 4 layers


@each_wrap
@pytest.mark.parametrize("wraps_first", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_with_the_models_own_gradient_checkpointing(name: str, wrap: Callable[[Any], Any], wraps_first: bool) -> None:
    wanted = seeded_step(build(name), FAMILIES[name].batch(0))
    model = build(name)
    if wraps_first:
        wrap_layers(name, model, wrap)
        model.activation_checkpointing_enable()
    else:
        model.activation_checkpointing_enable()
        wrap_layers(name, model, wrap)
    assert all(layers[0].gradient_checkpointing for layers in FAMILIES[name].layer_lists(model))
    with simulated_accelerator(window_bytes=16384) as sim:
        got = seeded_step(model, FAMILIES[name].batch(0))
    assert sim.swapped_bytes > 0
    assert_bitwise_equal(got, wanted)


@each_wrap
def test_optimizer_steps_with_accumulated_micro_batches(wrap: Callable[[Any], Any]) -> None:
    def train(model: Any) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(5)
        for step in range(3):
            losses = [model(**text_batch(10 * step + part)).loss / 2 for part in range(2)]
            for loss in losses if step % 2 == 0 else reversed(losses):
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    wanted = train(build("gpt2"))
    model = build("gpt2")
    wrap_layers("gpt2", model, wrap)
    with simulated_accelerator(window_bytes=16384) as sim:
        got = train(model)
    assert sim.swapped_bytes > 0
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)


@each_wrap
def test_teacher_copied_from_the_wrapped_student(wrap: Callable[[Any], Any]) -> None:
    def distil(model: Any) -> Result:
        teacher = copy.deepcopy(model).eval().requires_grad_(False)
        batch = text_batch()
        torch.manual_seed(9)
        student_logits = model(**batch).logits
        with torch.no_grad():
            teacher_logits = teacher(**batch).logits
        loss = nn.functional.mse_loss(student_logits, teacher_logits) + student_logits.logsumexp(-1).mean()
        loss.backward()
        return Result(loss=loss.detach().clone(), gradients=taken_gradients(model))

    wanted = distil(build("gpt2"))
    model = build("gpt2")
    wrap_layers("gpt2", model, wrap)
    with simulated_accelerator(window_bytes=16384) as sim:
        assert_bitwise_equal(distil(model), wanted)
    assert sim.swapped_bytes > 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "vit"])
def test_hidden_states_are_reported(name: str) -> None:
    """transformers finds the layers to record by their class, while it walks the tree."""
    wanted = build(name).eval()(**FAMILIES[name].batch(0), output_hidden_states=True)
    model = build(name).eval()
    wrap_layers(name, model, hp.swap_wrapper)
    with simulated_accelerator():
        got = model(**FAMILIES[name].batch(0), output_hidden_states=True)
    for key in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        expected, actual = getattr(wanted, key, None), getattr(got, key, None)
        assert (actual is None) == (expected is None)
        if expected is not None:
            assert len(actual) == len(expected)
            assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@each_wrap
def test_auxiliary_loss_on_hidden_states(wrap: Callable[[Any], Any]) -> None:
    """Recording was switched on before wrapping, so the middle layer's output is used by its hook's owner too."""

    def recorded(model: Any) -> Any:
        with torch.no_grad():
            model(**text_batch(), output_hidden_states=True)
        return model

    def step(model: Any) -> Result:
        output = model(**text_batch(), output_hidden_states=True)
        loss = output.loss + 0.1 * output.hidden_states[2].square().mean()
        loss.backward()
        return Result(loss=loss.detach().clone(), gradients=taken_gradients(model))

    wanted = step(recorded(_llama()))
    model = recorded(_llama())
    wrap_layers("llama", model, wrap)
    with simulated_accelerator(window_bytes=16384) as sim:
        assert_bitwise_equal(step(model), wanted)
    assert sim.swapped_bytes > 0


def test_vocabulary_resized_after_wrapping() -> None:
    def resized(model: Any) -> Any:
        torch.manual_seed(2)
        model.resize_token_embeddings(80, mean_resizing=False)
        return model

    wanted = seeded_step(resized(_llama()), text_batch())
    model = resized(_llama(hp.swap_wrapper))
    with simulated_accelerator() as sim:
        assert_bitwise_equal(seeded_step(model, text_batch()), wanted)
    assert sim.swapped_bytes > 0


def test_a_key_value_cache_under_swap() -> None:
    batch = text_batch() | {"use_cache": True}
    wanted = seeded_step(_llama(), batch)
    with simulated_accelerator() as sim:
        assert_bitwise_equal(seeded_step(_llama(hp.swap_wrapper), batch), wanted)
    assert sim.swapped_bytes > 0


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize(
    "policy",
    [SWAP_MATMULS, SAVE_AND_SWAP, ["_scaled_dot_product_flash_attention_for_cpu"]],
    ids=["swap_matmuls", "save_and_swap", "save_attention"],
)
def test_a_cache_that_the_replay_would_fill_again_is_given_to_it_as_forward_found_it(
    policy: Any, has_mask: bool
) -> None:
    """Transformers leaves its cache on in training; a second filling would give the replay other shapes."""
    batch = text_batch() | {"use_cache": True}
    if not has_mask:
        batch["attention_mask"] = None
    wanted = seeded_step(_llama(), batch)
    with simulated_accelerator():
        got = seeded_step(_llama(lambda layer: hp.checkpoint_wrapper(layer, policy_fn=policy)), batch)
    assert_bitwise_equal(got, wanted)


def test_a_batch_of_another_length_every_step() -> None:
    def steps(model: Any) -> list[Result]:
        results = []
        for length in (32, 7, 1, 20):
            batch = {
                key: value[:, :length] if isinstance(value, torch.Tensor) else value
                for key, value in text_batch(length).items()
            }
            results.append(seeded_step(model, batch | {"labels": batch["input_ids"]}))
        return results

    plain, wrapped = llama_pair(WRAPS["selective"])
    with simulated_accelerator(window_bytes=4096) as sim:
        got = steps(wrapped)
    for one, other in zip(got, steps(plain), strict=True):
        if not math.isnan(other.loss.item()):  # a single token has nothing to predict
            assert_bitwise_equal(one, other)
    assert sim.swapped_bytes > 0


def llama_pair(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The same weights plain and wrapped; attention with dropout, so that the composed attention ops run."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(llama(attention_dropout=0.1).train())
    wrap_layers("llama", models[1], wrap)
    return models[0], models[1]
