"""Generate, score, train: the loop of GRPO and other reinforcement learning, with one wrapped model for both parts.

python -m examples.generate_then_train

Under ``no_grad`` a wrapped layer does nothing of its own, so generation costs what it cost. On a GPU, move the model there and
leave ``simulated_accelerator`` out.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

import hyper_parallel as hp
from examples.dpo import WORDS, Decoder
from hyper_parallel.testing import simulated_accelerator

SAMPLES, PROMPT, NEW = 4, 48, 16


@torch.no_grad()
def generate(model: Decoder, prompt: torch.Tensor) -> torch.Tensor:
    ids = prompt.repeat(SAMPLES, 1)
    for _ in range(NEW):
        chances = model.logits(ids)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1)], dim=1)
    return ids


def main() -> None:
    for name in ("plain", "inputs"):
        torch.manual_seed(0)
        model = Decoder()
        if name == "inputs":
            for number, layer in enumerate(model.body.layers):
                model.body.layers[number] = hp.checkpoint_wrapper(layer, swap_inputs=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prompt, losses = torch.randint(0, WORDS, (1, PROMPT)), []
        with simulated_accelerator() as accelerator:
            for _ in range(3):
                ids = generate(model, prompt)
                rewards = (ids[:, PROMPT:] % 2 == 0).float().mean(1)  # even words are better
                advantages = rewards - rewards.mean()
                logits = model.logits(ids[:, :-1])[:, PROMPT - 1 :]
                likelihood = -F.cross_entropy(logits.transpose(1, 2), ids[:, PROMPT:], reduction="none").sum(1)
                loss = -(advantages * likelihood).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        print(f"{name:10} peak {accelerator.peak_bytes / 2**20:6.2f} MiB   losses {losses}")


if __name__ == "__main__":
    main()
