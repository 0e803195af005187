"""The operations of fuzzed programs: total functions over tensors of any floating dtype and any shape.

Each is short enough to be pasted into a stand-alone script. Operands adapt: ``fit`` makes a last dimension, ``like``
a shape, ``own`` something that may be written, ``small`` keeps what could grow without end. What adapts is made of
views, so that programs are full of them.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

__all__ = ["SPECS", "Spec"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What the generator and the lowering need to know of an operation."""

    ins: int = 1
    weights: str = ""  # one letter each: m(atrix), v(ector), c(onstant), b(uffer), s(tate), e(ffects)
    outs: int = 1
    writes: bool = False  # changes its first operand in place
    aliases: bool = False  # the result may share bytes with an operand
    is_random: bool = False
    has_number: bool = False
    needs_tick: bool = False
    takes_gradient: bool = False  # of its own, inside forward
    is_shareable: bool = True  # by two backwards at once


def fit(x, columns):
    x = x.reshape(1, 1) if x.dim() == 0 else x
    if x.shape[-1] >= columns:
        return x[..., :columns]
    return x.sum(-1, keepdim=True).expand(*x.shape[:-1], columns)


def like(x, y):
    if x.shape == y.shape:
        return x
    if x.numel() >= y.numel():
        return x.reshape(-1)[: y.numel()].reshape(y.shape)
    return x.sum().expand(y.shape)


def own(x):
    is_shared = torch._debug_has_internal_overlap(x) != 0
    return x.clone() if is_shared or (x.is_leaf and x.requires_grad) else x


def two(x):
    return x.reshape(1, 1) if x.dim() == 0 else x.reshape(-1, x.shape[-1]) if x.numel() else x.new_zeros(1, 1)


def small(x):
    return x if x.numel() <= 2048 else x.reshape(-1)[:64]


# ---------------------------------------------------------------- matrices


def linear(x, w):
    return F.linear(fit(small(x), w.shape[1]).to(w.dtype), w)


def linear_bias(x, w, b):
    return F.linear(fit(small(x), w.shape[1]).to(w.dtype), w, fit(b, w.shape[0]).to(w.dtype))


def matmul(x, y):
    x, y = two(small(x)), two(small(y)).to(x.dtype)
    return x @ fit(y, x.shape[1]).t() / 4


def bmm(x, y):
    x = two(small(x))
    y = fit(two(small(y)).to(x.dtype), x.shape[1])
    return torch.bmm(x.expand(2, *x.shape), y.t().expand(2, *y.t().shape)) / 4


def attention(x, y):
    x = two(small(x))[None, None]
    y = fit(two(small(y)), x.shape[-1])[None, None].to(x.dtype)
    return F.scaled_dot_product_attention(x, y, y)


def attention_dropout(x, y):
    x = two(small(x))[None, None]
    y = fit(two(small(y)), x.shape[-1])[None, None].to(x.dtype)
    return F.scaled_dot_product_attention(x, y, y, dropout_p=0.4)


def embedding(x, w):
    return F.embedding((small(x).detach().reshape(-1) * 10).long().abs() % w.shape[0], w)


def weight_view(x, w):
    return w.t()


def constant(x, c):
    return c


def times_constant(x, c):
    return x * like(c, x)


# ---------------------------------------------------------------- elementwise, reductions


def relu(x):
    return F.relu(x)


def gelu(x):
    return F.gelu(x)


def tanh(x):
    return torch.tanh(x)


def sigmoid(x):
    return torch.sigmoid(x)


def exp(x):
    return torch.exp(x.clamp(-3, 1))


def sin(x):
    return torch.sin(x)


def square(x):
    return torch.tanh(x) ** 2


def add(x, y):
    return x + like(y, x)


def sub(x, y):
    return x - like(y, x)


def mul(x, y):
    return x * torch.tanh(like(y, x))


def div(x, y):
    return x / (1 + like(y, x).abs())


def where(x, y):
    return torch.where(x.detach() > 0, x, like(y, x).to(x.dtype))


def softmax(x):
    return F.softmax(two(x), dim=-1)


def log_softmax(x):
    return F.log_softmax(two(x), dim=-1) / 8


def layer_norm(x, v):
    return F.layer_norm(fit(x, v.shape[0]).to(v.dtype), v.shape, v, v)


def plain_norm(x):
    return F.layer_norm(two(x), two(x).shape[-1:])


def mean(x):
    return two(x).mean(0, keepdim=True)


def total(x):
    return x.sum() / 8


def cat(x, y):
    x = two(small(x))
    return torch.cat([x, fit(two(small(y)), x.shape[1]).to(x.dtype)])


def stack(x, y):
    x = small(x)
    return torch.stack([x, like(y, x).to(x.dtype)])


def gather(x):
    x = two(x)
    return x.gather(1, x.detach().argsort(1))


def sort(x):
    return two(x).sort(0).values


def amax(x):
    return two(x).amax(1)


def logsumexp(x):
    return two(x).logsumexp(1)


def cross_entropy(x):
    x = two(x)
    return F.cross_entropy(x, torch.arange(x.shape[0], device=x.device) % x.shape[1])


def branch(x, y):
    return x * 2 if float(x.detach().float().sum()) > 0 else torch.sin(like(y, x))


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * (1 - y * y) + 0 * x.sin()


def custom(x):
    return Saves.apply(x)


# ---------------------------------------------------------------- dtypes, graph


def cast(x, number):
    return x.to((torch.float32, torch.float64, torch.bfloat16)[number % 3])


def detach(x):
    return x.detach()


def clone(x):
    return x.clone()


def contiguous(x):
    return x.contiguous()


def empty(x):
    return two(x)[:0]


def mark(hp, x, number):
    return hp.swap_tensor_wrapper(x, (None, "a", "b")[number % 3])


def mark_tree(hp, x, y):
    return hp.swap_tensor_wrapper({"x": [x], "y": (y, 3)}, "tree")["x"][0]


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tick):
        ctx.tick, ctx.turn = tick, tick.whose_turn()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.tick(ctx.turn)
        return grad, None


def gate(tick, x):
    return Gate.apply(x, tick)


# ---------------------------------------------------------------- views


def transpose(x):
    return two(x).t()


def narrow(x, number):
    x = two(x)
    return x[number % x.shape[0] :]


def columns(x, number):
    x = two(x)
    return x[:, number % x.shape[1] :]


def select(x, number):
    x = two(x)
    return x[number % x.shape[0]]


def chunk(x):
    first, *rest = two(x).chunk(2, dim=-1)
    return first, rest[0] if rest else first


def split_views(x):
    x = two(x)
    half = x.shape[1] // 2
    return x[:, :half], x[:, half:]


def expand(x):
    x = small(x)
    return x.unsqueeze(0).expand(3, *x.shape)


def flatten(x):
    return x.reshape(-1)


def unsqueeze(x):
    return x.unsqueeze(-1)


def strided(x):
    return two(x)[::2]


# ---------------------------------------------------------------- random


def dropout(x):
    return F.dropout(x, 0.4)


def noise(x):
    return x * torch.rand_like(x)


def bernoulli(x):
    return x * torch.bernoulli(torch.full_like(x, 0.5))


# ---------------------------------------------------------------- in place


def add_(x, y):
    x = own(x)
    x += like(y, x).to(x.dtype)
    return x


def mul_(x, y):
    x = own(x)
    return x.mul_(torch.tanh(like(y, x)).to(x.dtype))


def sub_number_(x, number):
    return own(x).sub_(number + 0.25)


def relu_(x):
    return F.relu(own(x), inplace=True)


def sigmoid_(x):
    return own(x).sigmoid_()


def dropout_(x):
    return F.dropout(own(x), 0.4, inplace=True)


def masked_fill_(x):
    x = own(x)
    return x.masked_fill_(x.detach() > 0.5, 0.25)


def add_to_rows_(x, y):
    x = own(x)
    rows = two(x)[:1]
    rows += like(y, rows).to(x.dtype)
    return x


def set_rows_(x, y):
    x = own(x)
    if x.dim():
        x[:1] = like(y, x[:1]).to(x.dtype)
    return x


def zero_rows_(x):
    x = own(x)
    if x.dim():
        x[1:].zero_()
    return x


def copy_(x, y):
    x = own(x)
    return x.copy_(like(y, x))


_INPUT = Spec()
_PAIR = Spec(ins=2)
_VIEW = Spec(aliases=True)
_WRITE = Spec(writes=True, aliases=True)
_WRITE_PAIR = Spec(ins=2, writes=True, aliases=True)

SPECS: dict[str, Spec] = {
    "linear": Spec(weights="m"),
    "linear_bias": Spec(weights="mv"),
    "matmul": _PAIR,
    "bmm": _PAIR,
    "attention": _PAIR,
    "attention_dropout": Spec(ins=2, is_random=True),
    "embedding": Spec(weights="m"),
    "weight_view": Spec(weights="m", aliases=True),
    "constant": Spec(weights="c", aliases=True),
    "times_constant": Spec(weights="c"),
    **dict.fromkeys(("relu", "gelu", "tanh", "sigmoid", "exp", "sin", "square"), _INPUT),
    **dict.fromkeys(("add", "sub", "mul", "div", "where"), _PAIR),
    **dict.fromkeys(("softmax", "log_softmax", "plain_norm", "mean", "total"), _INPUT),
    "layer_norm": Spec(weights="v"),
    **dict.fromkeys(("cat", "stack", "branch"), _PAIR),
    **dict.fromkeys(("gather", "sort", "amax", "logsumexp", "cross_entropy", "custom"), _INPUT),
    "cast": Spec(has_number=True, aliases=True),
    "detach": _VIEW,
    "clone": _INPUT,
    "contiguous": _VIEW,
    "empty": _VIEW,
    "mark": Spec(has_number=True, aliases=True),
    "mark_tree": Spec(ins=2, aliases=True),
    "gate": Spec(needs_tick=True),
    **dict.fromkeys(("transpose", "expand", "flatten", "unsqueeze", "strided"), _VIEW),
    **dict.fromkeys(("narrow", "columns", "select"), Spec(has_number=True, aliases=True)),
    **dict.fromkeys(("chunk", "split_views"), Spec(outs=2, aliases=True)),
    **dict.fromkeys(("dropout", "noise", "bernoulli"), Spec(is_random=True)),
    **dict.fromkeys(("add_", "mul_", "add_to_rows_", "set_rows_", "copy_"), _WRITE_PAIR),
    **dict.fromkeys(("relu_", "sigmoid_", "masked_fill_", "zero_rows_"), _WRITE),
    "sub_number_": Spec(writes=True, aliases=True, has_number=True),
    "dropout_": Spec(writes=True, aliases=True, is_random=True),
}
