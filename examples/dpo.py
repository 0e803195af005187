"""DPO: two forwards through the trained model, one backward, and a reference model that is not trained.

python -m examples.dpo
On a GPU, move models and batches there and leave ``simulated_accelerator`` out.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

BETA, WORDS, LENGTH = 0.1, 64, 96


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(WORDS, 32)
        self.body = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
        self.head = nn.Linear(32, WORDS)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device)
        return self.head(self.body(self.embedding(ids), mask=mask, is_causal=True))

    def log_likelihood(self, ids: torch.Tensor) -> torch.Tensor:
        losses = nn.functional.cross_entropy(self.logits(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
        return -losses.sum(1)


def main() -> None:
    for name in ("plain", "inputs"):
        torch.manual_seed(0)
        model = Decoder()
        reference = copy.deepcopy(model).requires_grad_(False)
        if name == "inputs":
            for number, layer in enumerate(model.body.layers):
                model.body.layers[number] = hp.checkpoint_wrapper(layer, swap_inputs=True)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
        chosen, rejected = torch.randint(0, WORDS, (2, 4, LENGTH))
        with simulated_accelerator() as accelerator:
            for _ in range(3):
                ours, theirs = (m.log_likelihood(chosen) - m.log_likelihood(rejected) for m in (model, reference))
                loss = -nn.functional.logsigmoid(BETA * (ours - theirs)).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        print(f"{name:10} peak {accelerator.peak_bytes / 2**20:6.2f} MiB   losses {losses}")


if __name__ == "__main__":
    main()
