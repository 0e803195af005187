"""TRL's SFTTrainer on a LoRA model, as it is and with one more line.

python -m examples.sft_lora
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hyper_parallel.integrations.trl import callback
from hyper_parallel.testing import simulated_accelerator

WORDS = {f"w{number}": number for number in range(128)}


def train(callbacks: list[Any]) -> list[float]:
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, eos_token_id=2
        )
    )  # fmt: skip
    model = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    words = Tokenizer(WordLevel(WORDS, unk_token="w0"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, max_steps=3, per_device_train_batch_size=4, logging_steps=1, use_cpu=True, bf16=False,
            save_strategy="no", report_to=[], disable_tqdm=True, log_level="error", gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        trainer = SFTTrainer(
            model,
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": torch.randint(3, 128, (12, 64)).tolist()}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2"),
            callbacks=callbacks,  # this is the line
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    for name, callbacks in {"plain": [], "boundary": [callback("boundary")]}.items():
        with simulated_accelerator() as accelerator:
            losses = train(callbacks)
        print(f"{name:10} peak {accelerator.peak_bytes / 2**20:6.2f} MiB   losses {losses}")


if __name__ == "__main__":
    main()
