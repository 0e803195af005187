"""transformers.Trainer as it is, and with one more line. Without a GPU the peak is that of the simulated accelerator.

python -m examples.transformers_trainer
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

from hyper_parallel.integrations.transformers import callback
from hyper_parallel.testing import simulated_accelerator


def train(callbacks: list[Any]) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, eos_token_id=2
        )
    )  # fmt: skip
    tokens = torch.randint(3, 128, (12, 64)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=3, per_device_train_batch_size=4, logging_steps=1, use_cpu=True,
            save_strategy="no", report_to=[], disable_tqdm=True, log_level="error",
        )  # fmt: skip
        trainer = Trainer(
            model,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            data_collator=default_data_collator,
            callbacks=callbacks,  # this is the line
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    for name, callbacks in {"plain": [], "boundary": [callback("boundary")], "swap": [callback("swap")]}.items():
        with simulated_accelerator() as accelerator:
            losses = train(callbacks)
        print(f"{name:10} peak {accelerator.peak_bytes / 2**20:6.2f} MiB   losses {losses}")


if __name__ == "__main__":
    main()
