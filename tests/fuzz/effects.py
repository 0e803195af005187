"""Operations with effects beside their results: counters, lists, caches, buffers, prints, branches that change from step to
step, batch norm, and writes into a tensor's memory that no op makes.

A run of the user's Python for the second time repeats the effects. What they left behind is compared at the end of a run in which
every region ran from a tape. Total functions like those of ``operations``; pasted whole into a script whose program calls one.
"""

from __future__ import annotations

import ctypes
import io

import numpy as np
import torch

from fuzz.operations import fit, small, two


class Effects:
    """What the forward of a model leaves behind."""

    def __init__(self, device):
        self.calls = 0
        self.log = []
        self.cache = []
        self.table = {}
        self.printed = io.StringIO()
        self.load = torch.zeros(4, device=device)
        self.norm = torch.nn.BatchNorm1d(4, device=device)
        for parameter in self.norm.parameters():
            parameter.requires_grad_(False)

    def left_behind(self):
        """Everything, as tensors."""
        text = repr((self.calls, self.log, self.table, self.printed.getvalue(), len(self.cache)))
        told = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return [told, self.load, *self.norm.buffers(), *(value.clone() for value in self.cache)]


# ---------------------------------------------------------------- effects


def effect_counts(x, effects):
    effects.calls += 1
    effects.log.append(tuple(x.shape))
    return x.sin() * (1 + effects.calls % 3)


def effect_prints(x, effects):
    print(tuple(x.shape), x.dtype, file=effects.printed)
    return x.cos()


def effect_caches(x, effects):
    """A cache that grows with every call, as keys and values do, and is read as a whole."""
    rows = fit(two(small(x)), 4)[:1].detach().float()
    effects.cache.append(rows.clone())
    return x * torch.cat(effects.cache[-3:]).sum().to(x.dtype).tanh()


def effect_files(x, effects):
    """A cache by key: what is in it is not made a second time."""
    key = tuple(x.shape)
    if key not in effects.table:
        effects.table[key] = len(effects.table) + 1
    return (x * effects.table[key]).sin()


def effect_loads(x, effects):
    """Counts how often each of four experts was chosen, and prefers those that were chosen least."""
    scores = fit(two(small(x)), 4)
    chosen = (scores.detach().float().nan_to_num() - effects.load / 8).argmax(-1)
    effects.load += torch.nn.functional.one_hot(chosen, 4).sum(0)
    return scores.softmax(-1) * effects.load.clone().to(x.dtype)


def effect_branches(x, effects):
    """Other ops in every second call."""
    effects.calls += 1
    if effects.calls % 2:
        return x.sigmoid() * x
    return (x.tanh() * effects.calls).cos().mul(x.detach())


def effect_lengthens(x, effects):
    """One op more in every call, up to four."""
    effects.calls += 1
    for _ in range(min(effects.calls, 4)):
        x = x.sin()
    return x * x


def effect_norms(x, effects):
    """Batch norm with a momentum: its kernel changes the running statistics, and the schema does not say so."""
    x = fit(two(small(x)), 4).float()
    if x.shape[0] < 2:
        x = x.expand(2, 4)
    return effects.norm(x.clamp(-100, 100))


# ---------------------------------------------------------------- writes that no op makes
# They change what the function itself made: where Python runs again they happen again, to a value that was made again.


def _bytes_of(x):
    """The memory of a contiguous tensor, to be written behind torch's back."""
    return (ctypes.c_uint8 * (x.numel() * x.element_size())).from_address(x.data_ptr())


def raw_numpy(x):
    """A value that numpy changes after an op made it."""
    y = x.detach().float().tanh()
    if y.device.type == "cpu":
        y.numpy()[...] = np.clip(x.detach().float().numpy(), -1, 1)
    else:
        y.data.copy_(x.detach().float().clamp(-1, 1))
    return x * y.to(x.dtype)


def raw_halves(x):
    """A value that numpy changes once, as fused rotary embeddings do: to change it a second time would show."""
    y = x.detach().float().cos()
    if y.device.type == "cpu":
        values = y.numpy()
        values *= 0.5
    else:
        y.data.mul_(0.5)
    return (x * y.to(x.dtype)).sin()


def raw_fill(x):
    """Memory of an ``empty`` op that ctypes fills."""
    y = torch.empty(x.shape, device=x.device)
    if y.device.type != "cpu":
        y.data.fill_(3.0)
    elif y.numel():
        memory = _bytes_of(y)
        ctypes.memmove(memory, np.full(x.shape, 3.0, np.float32).tobytes(), len(memory))
    return x + y.to(x.dtype).sin()


def raw_dlpack(x):
    """A second tensor over the same memory, with a storage of its own, that an op changes."""
    y = x.detach().float().cos()
    if y.numel():
        torch.from_dlpack(y).copy_(x.detach().float().tanh())
    return (x * y.to(x.dtype)).sin()


def raw_data(x):
    """A change through ``.data``, which no version counter sees."""
    y = x.detach().float().cos()
    y.data.copy_(x.detach().float().tanh())
    return (x * y.to(x.dtype)).sin()


class FillsRaw(torch.autograd.Function):
    """A kernel of the user's that fills its output itself."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty(x.shape, device=x.device)
        if y.device.type == "cpu":
            y.numpy()[...] = np.tanh(x.detach().float().numpy())
        else:
            y.data.copy_(x.detach().float().tanh())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


def raw_function(x):
    return FillsRaw.apply(x.float()).to(x.dtype) * x.cos()
