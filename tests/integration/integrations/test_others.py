"""PEFT, Lightning and Accelerate, with and without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

from hyper_parallel.errors import PlanError
from hyper_parallel.integrations import accelerate as accelerate_adapter
from hyper_parallel.integrations import apply
from hyper_parallel.integrations import lightning as lightning_adapter
from hyper_parallel.integrations import peft as peft_adapter
from hyper_parallel.testing import simulated_accelerator

from . import tiny


def loop(model: Any, optimizer: Any, batches: Any, backward: Any = torch.Tensor.backward) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_lora(what: Any) -> tuple[list[float], torch.nn.Module]:
    torch.manual_seed(2)
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny.model(), lora)
    model.train()
    if what is not None:
        peft_adapter.apply(model, what)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return loop(model, torch.optim.AdamW(trained, lr=1e-2), tiny.batches()), model


@pytest.mark.parametrize("what", ["boundary", "swap", "recompute"])
def test_lora(what: str) -> None:
    tiny.assert_same_but_smaller(tiny.run(lambda: with_lora(what)), tiny.run(lambda: with_lora(None)))


def test_lora_comes_before_us() -> None:
    with pytest.raises(TypeError, match=r"expected a PeftModel, got LlamaForCausalLM.*call get_peft_model"):
        peft_adapter.apply(tiny.model())


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny.model()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder: Path, callbacks: list[Any]) -> tuple[list[float], torch.nn.Module]:
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, DataLoader(tiny.batches(), batch_size=None))
    assert tiny.names_of_wrapped(module) == []
    assert "loss" in trainer.callback_metrics
    return module.losses, module


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # Lightning's own
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
class TestLightning:
    @pytest.mark.parametrize("what", ["boundary", "swap"])
    def test_three_steps(self, tmp_path: Path, what: str) -> None:
        plain = tiny.run(lambda: fit(tmp_path, []))
        ours = tiny.run(lambda: fit(tmp_path, [lightning_adapter.callback(what)]))
        tiny.assert_same_but_smaller(ours, plain)
        assert ours.swapped_bytes > 0

    def test_a_budget(self, tmp_path: Path) -> None:
        plain = tiny.run(lambda: fit(tmp_path, []))
        with simulated_accelerator():  # a budget needs a device when the callback is made
            callback = lightning_adapter.callback(budget=plain.peak_bytes * 3 // 4)
        fitted: list[Any] = []

        class Look(lightning.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
                fitted.append(getattr(callback._run._treated._handles[0], "plan", None))

        ours = tiny.run(lambda: fit(tmp_path, [callback, Look()]))
        assert ours.losses == plain.losses
        assert all(torch.equal(ours.weights[name], weight) for name, weight in plain.weights.items())
        assert [plan is not None for plan in fitted] == [False, True, True]
        assert not fitted[1].does_nothing

    def test_plans_are_kept_unless_the_store_is_off(self) -> None:
        with simulated_accelerator():
            assert lightning_adapter.callback(budget="1GiB")._run._treatment.store is True
            assert lightning_adapter.callback(budget="1GiB", store=None)._run._treatment.store is None

    def test_an_exception_leaves_the_module_as_it_was(self, tmp_path: Path) -> None:
        class Breaks(lightning.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                assert len(tiny.names_of_wrapped(module)) == 4
                kept.append(module)
                raise RuntimeError("the machine room is on fire")

        kept: list[Any] = []
        with pytest.raises(RuntimeError, match="the machine room is on fire"):
            fit(tmp_path, [lightning_adapter.callback("boundary"), Breaks()])
        assert tiny.names_of_wrapped(kept[0]) == []


def accelerated(what: Any) -> tuple[list[float], torch.nn.Module]:
    accelerator = Accelerator(cpu=True)
    model = tiny.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(tiny.batches(), batch_size=None))
    if what is not None:
        accelerate_adapter.apply(accelerator, model, what)
    return loop(model, optimizer, loader, accelerator.backward), model


@pytest.mark.parametrize("what", ["boundary", "auto"])
def test_accelerate(what: str) -> None:
    tiny.assert_same_but_smaller(tiny.run(lambda: accelerated(what)), tiny.run(lambda: accelerated(None)))


def test_accelerate_wants_its_accelerator() -> None:
    with pytest.raises(TypeError, match=r"expected \(accelerator, model, ...\), got LlamaForCausalLM first"):
        accelerate_adapter.apply(tiny.model(), "boundary")
    with pytest.raises(TypeError, match=r"expected \(accelerator, model, ...\), got str in the model's place"):
        accelerate_adapter.apply(Accelerator(cpu=True), "boundary")


def test_a_budget_needs_a_step() -> None:
    model = tiny.model()
    model.activation_checkpointing_enable()
    with pytest.raises(PlanError, match=r"no step was given. Pass step=..., .* or choose a preset instead: boundary"):
        apply(model, budget="1MiB")
    assert model.is_activation_checkpointing, "a refused treatment changes nothing"
    assert tiny.names_of_wrapped(model) == []


def test_a_handle_takes_it_off_again() -> None:
    model = tiny.model()
    with apply(model, "swap") as treated:
        assert len(tiny.names_of_wrapped(model)) == 4
        assert treated.stats().swapped_out_bytes == 0, "no step has run"
        assert len(treated.applied) == 1
    assert tiny.names_of_wrapped(model) == []
    treated.remove()
