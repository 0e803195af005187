"""Rules: "module::op" and what becomes of it, without a wrapper or a function of your own.

python -m examples.rules
"""

from __future__ import annotations

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

RULES = {
    "layers.*::input": "swap",  # what goes into a layer leaves
    "layers.*.self_attn::sdpa": "swap",  # so does attention's output
    "layers.7::*": "save",  # backward begins here: nothing would have time to leave
    "layers.*.linear1::matmul": "save",
    "*::*": "recompute",  # the first rule that matches decides, so this one comes last
}


def main() -> None:
    for name, rules in {"plain": None, "mine": RULES, "boundary": "boundary"}.items():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        model = nn.TransformerEncoder(layer, num_layers=8, enable_nested_tensor=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = torch.randn(8, 128, 32)
        with simulated_accelerator() as accelerator:  # on a GPU: leave it out
            if name == "mine":
                ops = hp.list_ops(model, lambda model=model, batch=batch: model(batch).sum().backward())
                print(f"{len(ops)} kinds of op that a rule can speak of, such as {ops[0].module}::{ops[0].op}")
            applied = hp.apply_rules(model, rules) if rules is not None else None
            accelerator.reset_peak()
            losses = []
            for _ in range(3):
                loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        print(f"{name:10} peak {accelerator.peak_bytes / 2**20:6.2f} MiB   losses {losses}")
        if applied is not None:
            applied.remove()  # the model is as before


if __name__ == "__main__":
    main()
