"""``transformers.Trainer`` and TRL's ``SFTTrainer``, with and without us."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments, default_data_collator
from trl import SFTConfig, SFTTrainer

from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch import native
from hyper_parallel.errors import PlanError
from hyper_parallel.integrations import apply
from hyper_parallel.integrations import transformers as adapter
from hyper_parallel.integrations import trl as trl_adapter
from hyper_parallel.planner import fit
from hyper_parallel.testing import simulated_accelerator

from . import tiny

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": tiny.BATCH,
    "max_steps": tiny.STEPS,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "seed": 3,
}


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(
    folder: Path, callbacks: list[Any], *, prepare: Callable[[Any], Any] = lambda model: model, **settings: Any
) -> tuple[list[float], torch.nn.Module]:
    model = prepare(tiny.model())
    arguments = TrainingArguments(output_dir=str(folder), **(COMMON | settings))
    trainer = Trainer(
        model, arguments, train_dataset=tiny.rows(), data_collator=default_data_collator, callbacks=callbacks
    )
    trainer.train()
    return losses_of(trainer), model


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP if "scaled_dot_product" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.fixture
def plain(tmp_path: Path) -> tiny.Run:
    return tiny.run(lambda: train(tmp_path, []))


@pytest.mark.parametrize(
    "what",
    [
        "boundary",
        "attention",
        "elementwise",
        "auto",
        "swap",
        "recompute",
        {"*::sdpa": "swap", "*::*": "recompute"},
        policy,
    ],
    ids=lambda what: what if isinstance(what, str) else type(what).__name__,
)
def test_the_callback(tmp_path: Path, plain: tiny.Run, what: Any) -> None:
    wrapped: list[list[str]] = []

    def train_with_us() -> tuple[list[float], torch.nn.Module]:
        losses, model = train(tmp_path, [adapter.callback(what)])
        wrapped.append(tiny.names_of_wrapped(model))
        return losses, model

    ours = tiny.run(train_with_us)
    tiny.assert_same_but_smaller(ours, plain)
    assert wrapped == [[]]
    assert (ours.swapped_bytes > 0) == (what not in ("recompute", "elementwise"))


def test_the_callback_takes_the_place_of_gradient_checkpointing(tmp_path: Path, plain: tiny.Run) -> None:
    states: list[bool] = []

    def train_with_us() -> tuple[list[float], torch.nn.Module]:
        losses, model = train(tmp_path, [adapter.callback("boundary")], activation_checkpointing=True)
        states.append(model.is_activation_checkpointing)
        return losses, model

    ours = tiny.run(train_with_us)
    tiny.assert_same_but_smaller(ours, plain)
    assert ours.swapped_bytes > 0
    assert states == [True], "after training the model's own checkpointing is on again"


def test_the_switch(tmp_path: Path, plain: tiny.Run) -> None:
    models: list[Any] = []

    def prepare(model: Any) -> Any:
        models.append(model)
        return adapter.switch(model, "boundary")

    ours = tiny.run(lambda: train(tmp_path, [], prepare=prepare, activation_checkpointing=True))
    tiny.assert_same_but_smaller(ours, plain)
    assert ours.swapped_bytes > 0
    assert len(tiny.names_of_wrapped(models[0])) == 4
    models[0].activation_checkpointing_disable()
    assert tiny.names_of_wrapped(models[0]) == []


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_has_a_switch_of_its_own(copied: Callable[[Any], Any]) -> None:
    model = adapter.switch(tiny.model(), "boundary")
    twin = copied(model)
    twin.activation_checkpointing_enable()
    assert (len(tiny.names_of_wrapped(twin)), tiny.names_of_wrapped(model)) == (4, [])
    third = copied(twin)
    twin.activation_checkpointing_disable()
    assert (tiny.names_of_wrapped(twin), len(tiny.names_of_wrapped(third))) == ([], 4)
    third.activation_checkpointing_enable()
    with pytest.raises(PlanError, match=r"copied or loaded with them on.*Disable it before copying"):
        third.activation_checkpointing_disable()


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_the_switch_answers_to_the_old_and_the_new_name(name: str) -> None:
    model = adapter.switch(tiny.model(), "boundary")
    getattr(model, f"{name}_enable")()
    assert len(tiny.names_of_wrapped(model)) == 4
    getattr(model, f"{name}_disable")()
    assert tiny.names_of_wrapped(model) == []


def test_the_switch_takes_a_model_that_has_the_old_name_only() -> None:
    class Older(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(4))

        def gradient_checkpointing_enable(self) -> None: ...

        def gradient_checkpointing_disable(self) -> None: ...

    model = adapter.switch(Older(), "recompute")
    model.gradient_checkpointing_enable()
    assert len(tiny.names_of_wrapped(model)) == 4
    assert not hasattr(model, "activation_checkpointing_enable")


def test_a_budget(tmp_path: Path, plain: tiny.Run) -> None:
    fitted: list[Any] = []

    def train_with_us() -> tuple[list[float], torch.nn.Module]:
        callback = adapter.callback(budget=plain.peak_bytes * 3 // 4)
        original = callback.on_train_end

        def on_train_end(*args: Any, **kwargs: Any) -> None:
            fitted.append(callback._run._treated._handles[0].plan)
            original(*args, **kwargs)

        callback.on_train_end = on_train_end
        return train(tmp_path, [callback])

    ours = tiny.run(train_with_us)
    assert ours.losses == plain.losses
    assert all(torch.equal(ours.weights[name], weight) for name, weight in plain.weights.items())
    assert len(fitted) == 1
    assert not fitted[0].does_nothing


def test_a_budget_without_an_accelerator_is_refused_when_the_callback_is_made() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(
        PlanError, match=r"budget='1GiB': a budget is of device memory, and this machine has no accelerator"
    ):
        adapter.callback(budget="1GiB")


def test_callbacks_keep_plans_unless_the_store_is_off() -> None:
    with simulated_accelerator():
        for callback in (adapter.callback, trl_adapter.callback):
            assert callback(budget="1GiB")._run._treatment.store is True
            assert callback(budget="1GiB", store=None)._run._treatment.store is None
            with pytest.raises(TypeError, match=r"store is a folder for plans"):
                callback(budget="1GiB", store=7)


def test_a_restarted_training_plans_nothing(tmp_path: Path, plain: tiny.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled: list[int] = []
    whole = fit._Fit._profile
    monkeypatch.setattr(fit._Fit, "_profile", lambda self: profiled.append(1) or whole(self))
    monkeypatch.setenv("HYPER_PARALLEL_PLAN_STORE", str(tmp_path / "plans"))
    budget = plain.peak_bytes * 3 // 4

    def once() -> None:
        ours = tiny.run(lambda: train(tmp_path, [adapter.callback(budget=budget)]))
        assert ours.losses == plain.losses
        assert all(torch.equal(ours.weights[name], weight) for name, weight in plain.weights.items())

    once()
    assert (len(profiled), len(list((tmp_path / "plans").iterdir()))) == (1, 1)
    once()
    assert len(profiled) == 1


def test_a_budget_is_fitted_on_a_training_batch_also_after_an_evaluation(tmp_path: Path) -> None:
    """Evaluation runs between the first step and the one that fits, on batches of another size."""
    with simulated_accelerator():  # a budget needs a device when the callback is made
        callback = adapter.callback(budget="1GiB")
    shapes: list[tuple[int, ...]] = []
    original = callback._own_step

    def own_step(model: Any) -> Any:
        shapes.append(tuple(callback._call[1]["input_ids"].shape))
        return original(model)

    callback._own_step = own_step
    rows = tiny.rows()
    short = [{name: row[name][:8] for name in row} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2, **COMMON
    )
    trainer = Trainer(
        tiny.model(),
        arguments,
        train_dataset=rows,
        eval_dataset=short,
        data_collator=default_data_collator,
        callbacks=[callback],
    )
    with simulated_accelerator():
        trainer.train()
    assert shapes == [(tiny.BATCH, tiny.LENGTH)]


@pytest.mark.parametrize(
    "what", ["boundary", "auto", "swap", "recompute", policy], ids=["boundary", "auto", "swap", "recompute", "policy"]
)
def test_a_treated_model_generates_what_the_plain_one_does(what: Any) -> None:
    """Generation reads the key-value cache that the blocks fill; a copy of it would be thrown away."""
    model = tiny.model().eval()
    prompt = torch.tensor([row["input_ids"][:8] for row in tiny.rows(2)])

    def generated() -> torch.Tensor:
        return model.generate(prompt, max_new_tokens=6, do_sample=False)

    def cached() -> int:
        with torch.no_grad():
            return int(model(prompt, use_cache=True).past_key_values.get_seq_length())

    plain = generated()
    with apply(model, what):
        assert torch.equal(generated(), plain)
        assert cached() == 8


@pytest.mark.parametrize("grad_later", [True, False], ids=["gradients", "no_grad"])
@pytest.mark.parametrize("what", ["boundary", policy], ids=["boundary", "policy"])
def test_a_cache_that_a_replayed_forward_left_empty_is_refused(
    what: Any, grad_later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "0")  # a tape fills the cache, once
    model = tiny.model()
    ids = torch.tensor([row["input_ids"] for row in tiny.rows(2)])
    with apply(model, what):
        first = model(ids[:, :16], use_cache=True)
        with pytest.raises(PlanError, match=r"LlamaDecoderLayer: cannot go on with a key-value cache.*use_cache=False"):
            with torch.set_grad_enabled(grad_later):
                model(ids[:, 16:], past_key_values=first.past_key_values)


def test_a_cache_that_a_replayed_forward_left_empty_is_refused_by_every_later_region() -> None:
    """Regions with a policy function run Python again. Those of the preset run from a tape where there is a recorder."""
    model = tiny.model()
    ids = torch.tensor([row["input_ids"] for row in tiny.rows(2)])
    with apply(model, policy):
        first = model(ids[:, :16], use_cache=True)
    with (
        apply(model, "boundary"),
        pytest.raises(PlanError, match="LlamaDecoderLayer: cannot go on with a key-value cache"),
    ):
        model(ids[:, 16:], past_key_values=first.past_key_values)


@pytest.mark.parametrize("what", ["boundary", "recompute", "swap"])
def test_a_forward_goes_on_with_a_cache_that_was_filled(what: str) -> None:
    """Without gradients a region fills it. With gradients ``swap`` does, which replays nothing, and a region with a tape."""
    model = tiny.model()
    fills_with_gradients = what == "swap" or native.load() is not None
    ids = torch.tensor([row["input_ids"] for row in tiny.rows(2)])

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        with torch.set_grad_enabled(fills_with_gradients):
            first = model(ids[:, :16], use_cache=True)
        model(ids[:, 16:], past_key_values=first.past_key_values, labels=ids[:, 16:]).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    with apply(model, what):
        ours = gradients()
    assert plain.keys() == ours.keys()
    assert all(torch.equal(ours[name], gradient) for name, gradient in plain.items())


def sft(folder: Path, callbacks: list[Any], **settings: Any) -> tuple[list[float], torch.nn.Module]:
    model = tiny.model()
    arguments = SFTConfig(
        output_dir=str(folder),
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        bf16=False,
        **(COMMON | {"gradient_checkpointing": False} | settings),
    )
    trainer = SFTTrainer(
        model,
        args=arguments,
        train_dataset=Dataset.from_list(tiny.rows()),
        processing_class=tiny.tokenizer(),
        callbacks=callbacks,
    )
    trainer.train()
    return losses_of(trainer), model


def test_sft(tmp_path: Path) -> None:
    plain = tiny.run(lambda: sft(tmp_path, []))
    ours = tiny.run(lambda: sft(tmp_path, [trl_adapter.callback("boundary")], gradient_checkpointing=True))
    tiny.assert_same_but_smaller(ours, plain)
    assert ours.swapped_bytes > 0


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    arguments = SFTConfig(output_dir=str(tmp_path), activation_offloading=True, use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=r"activation_offloading=True moves the same values; leave it out"):
        trl_adapter.callback().on_train_begin(arguments, None, None, model=tiny.model())
    with pytest.raises(
        TypeError, match=r"Linear has neither activation_checkpointing_enable\(\) nor gradient_checkpointing_enable\(\)"
    ):
        adapter.switch(torch.nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"Linear has no repeated blocks"):
        adapter.callback("swap").on_train_begin(None, None, None, model=torch.nn.Linear(2, 2))
