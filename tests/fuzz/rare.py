"""Operations that a textbook model lacks and real ones have: other people's ops, autograd functions, factories that
draw, gradients inside forward, leaves made inside a region, complex values, buffers, state that forward writes and reads.

Total functions like those of ``operations``; pasted whole into a script whose program calls one of them.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F

from fuzz.operations import fit, like, own, small, two

# ---------------------------------------------------------------- ops of other packages

_NAMESPACE = "fuzz_" + __name__.strip("_").replace(".", "_")  # the script that a failure prints registers its own
_DRAWS_AND_SAYS_SO = {"tags": (torch.Tag.nondeterministic_seeded,)}


def _foreign(name, schema, mutates=(), **settings):
    """Declares an op. Its code runs without autocast: under a dispatch mode, torch's own too, it would do so anyway."""

    def declared(function):
        def kernel(*args, **kwargs):
            device = next((arg.device.type for arg in args if isinstance(arg, torch.Tensor)), "cpu")
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)

        return torch.library.custom_op(f"{_NAMESPACE}::{name}", kernel, mutates_args=mutates, schema=schema, **settings)

    return declared


def _keep_input(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _keep_output(ctx, inputs, output):
    ctx.save_for_backward(output)


@_foreign("wave", "(Tensor x) -> Tensor")
def _wave(x):
    return x.sin()


_wave.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0].cos(), setup_context=_keep_input)


@_foreign("pair", "(Tensor x) -> (Tensor, Tensor)")
def _pair(x):
    return x.tanh(), x.cos()


def _keep_both(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[0])


def _pair_gradient(ctx, first, second):
    x, tanh = ctx.saved_tensors
    return first * (1 - tanh * tanh) - second * x.sin()


_pair.register_autograd(_pair_gradient, setup_context=_keep_both)


@_foreign("halves", "(Tensor x) -> Tensor[]")
def _halves(x):
    return [x / 2, x.exp() / 2]


def _keep_second(ctx, inputs, output):
    ctx.save_for_backward(output[1])


_halves.register_autograd(lambda ctx, grads: grads[0] / 2 + grads[1] * ctx.saved_tensors[0], setup_context=_keep_second)


@_foreign("thinned", "(Tensor x) -> Tensor")
def _thinned(x):
    return x * (torch.rand_like(x) > 0.5)


_thinned.register_autograd(lambda ctx, grad: grad * (ctx.saved_tensors[0] != 0), setup_context=_keep_output)


@_foreign("sprinkled", "(Tensor x) -> Tensor", **_DRAWS_AND_SAYS_SO)
def _sprinkled(x):
    return x * (torch.rand_like(x) > 0.5)


_sprinkled.register_autograd(lambda ctx, grad: grad * (ctx.saved_tensors[0] != 0), setup_context=_keep_output)


@_foreign("numbers", "(SymInt[] size, *, Device device) -> Tensor")
def _numbers(size, *, device):
    return torch.rand(size, device=device)


@_foreign("add_onto", "(Tensor(a!) x, Tensor y) -> ()", ("x",))
def _add_onto(x, y):
    x.add_(y)


@_foreign("shake", "(Tensor(a!) x) -> Tensor", ("x",))
def _shake(x):
    x.mul_(torch.rand_like(x))
    return x.sum()


def foreign_wave(x):
    return _wave(x)


def foreign_pair(x):
    return _pair(x)


def foreign_halves(x):
    first, second = _halves(x.clamp(-3, 1))
    return first, second


def foreign_thinned(x):
    return _thinned(x)


def foreign_sprinkled(x):
    return _sprinkled(x)


def foreign_numbers(x):
    return x * _numbers(list(x.shape), device=x.device).to(x.dtype)


def foreign_add_onto_(x, y):
    x = own(x)
    _add_onto(x.detach(), like(y, x).detach().to(x.dtype))
    return x


def foreign_shake_(x):
    x = own(x)
    return x * torch.tanh(_shake(x.detach()))


# ---------------------------------------------------------------- autograd functions


class KeepsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class KeepsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


class KeepsMiddle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        middle = torch.tanh(x)
        ctx.save_for_backward(None, middle, middle)
        return middle * 2

    @staticmethod
    def backward(ctx, grad):
        _, middle, again = ctx.saved_tensors
        return 2 * grad * (1 - middle * again)


class KeepsNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class HoldsTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.held = x.detach().cos()
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.held + 0 * ctx.saved_tensors[0]


class Dirties(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y.sin(), grad * x * y.cos() if ctx.needs_input_grad[1] else None


class HalfBlind(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        mask = torch.gt(x, y)  # the operator asks a parameter on its right first, and under hooks a replay gets none
        ctx.mark_non_differentiable(mask)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(mask)
        return torch.where(mask, x, y), mask

    @staticmethod
    def backward(ctx, grad, _):
        (mask,) = ctx.saved_tensors
        return (None if grad is None else grad * mask), None


class InTwoSteps(torch.autograd.Function):
    @staticmethod
    def forward(x):
        y = torch.exp(x.clamp(-3, 1))
        return y, y + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx, first, second):
        x, y, _ = ctx.saved_tensors
        return (first + second) * y * ((x > -3) & (x < 1))


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class Recomputes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x).sin()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.tanh(x).sin().backward(grad.detach())
        return x.grad


def function_input(x):
    return KeepsInput.apply(x)


def function_output(x):
    return KeepsOutput.apply(x)


def function_middle(x):
    return KeepsMiddle.apply(x)


def function_nothing(x):
    return KeepsNothing.apply(x)


def function_held(x):
    return HoldsTensor.apply(x)


def function_dirty_(x):
    return Dirties.apply(x.clone() if x._is_view() else own(x))


def function_once(x, y):
    return Once.apply(x, like(y, x).to(x.dtype))


def function_half(x, y):
    value, mask = HalfBlind.apply(x, like(y, x).to(x.dtype))
    return value * mask


def function_steps(x):
    return InTwoSteps.apply(x)


def function_through(x):
    return Through.apply(x)


def function_recomputes(x):
    return Recomputes.apply(x)


# ---------------------------------------------------------------- factories that draw


def draw_rand(x):
    return x * torch.rand(x.shape, dtype=x.dtype, device=x.device)


def draw_randn(x):
    return x + torch.randn(x.shape, dtype=x.dtype, device=x.device)


def draw_into_empty(x):
    return x * torch.empty_like(x).bernoulli_(0.5)


def draw_uniform(x):
    return x * x.new_empty(x.shape).uniform_(0.5, 1.5)


def draw_order(x):
    x = two(x)
    return x[torch.randperm(x.shape[0], device=x.device)]


def draw_integers(x):
    return x * torch.randint(1, 4, x.shape, device=x.device)


def draw_by_generator(x, number):
    generator = torch.Generator(device=x.device).manual_seed(number)
    return x * torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)


def draw_thinned_by_generator(x, number):
    generator = torch.Generator(device=x.device).manual_seed(number)
    return x * torch.empty_like(x).bernoulli_(0.5, generator=generator)


# ---------------------------------------------------------------- leaves, gradients and hooks inside


def fresh_leaf(x):
    return x.detach().requires_grad_()


def fresh_parameter(x):
    return torch.nn.Parameter(x.detach())


def linear_of_values(x, y):
    """A second operand that is taken as it is: a leaf stays the leaf that autocast remembers."""
    y = y if y.dim() == 2 and 0 < y.numel() <= 2048 else two(small(y))
    return F.linear(fit(small(x), y.shape[1]).to(y.dtype), y) / 4


def gradient_inside(x):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(y.sin().exp().sum(), y)
    return x * slope


def gradient_penalty(x):
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x.cos()
    (slope,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
    return slope


def hooked(x):
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 2)
    return y


def hooked_and_kept(x):
    y = x.sin()
    if y.requires_grad:
        y.retain_grad()
        y.grad_fn.register_hook(lambda inputs, outputs: tuple(None if grad is None else grad / 2 for grad in inputs))
        y.grad_fn.register_prehook(lambda grads: tuple(None if grad is None else grad * 3 for grad in grads))
    return y


# ---------------------------------------------------------------- complex values, odd views


def _complex(x, y):
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    return torch.complex(x.to(wide), like(y, x).to(wide))


def complex_product(x, y):
    z = _complex(x, y)
    return torch.view_as_real(z * torch.tanh(z.abs())).sum(-1)


def complex_conjugate(x, y):
    z = _complex(x, y)
    return (z.conj() * z.sin().conj()).real


def complex_negative(x, y):
    return _complex(x, y).conj().imag.sin()


def complex_wave(x):
    x = two(small(x))
    return torch.fft.irfft(torch.fft.rfft(x.to(torch.promote_types(x.dtype, torch.float32))), n=x.shape[1])


def zero_stride(x):
    x = small(x)
    wide = x.sum(-1, keepdim=True).expand(*x.shape[:-1], 4) if x.dim() else x.expand(4)
    return wide * wide.sin()


def unfolded(x):
    x = x.reshape(-1)
    return x.unfold(0, 2, 1) if x.numel() > 1 else x


def batch_norm(x):
    x = two(small(x))
    # Without momentum: torch's kernel changes both after it has saved them, and no counter tells.
    mean, spread = torch.zeros_like(x[0]), torch.ones_like(x[0])
    return F.batch_norm(x, mean, spread, training=x.shape[0] > 1, momentum=0.0)


# ---------------------------------------------------------------- state


def running(x, buffer):
    with torch.no_grad():
        buffer.mul_(0.75).add_(x.float().mean().nan_to_num())
    return x + buffer.to(x.dtype)


class Average(torch.nn.Module):
    """A buffer that forward moves, as running statistics and codebooks do."""

    def __init__(self, device):
        super().__init__()
        self.register_buffer("mean", torch.zeros((), device=device))
        self.calls = 0

    def forward(self, x):
        before = self.mean.clone()
        self.calls += 1
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.float().mean().nan_to_num())
        return (x * before.to(x.dtype)).sin() * self.calls


class State:
    """What a model keeps beside its weights. A region that is recomputed must find it as its forward did, and change it once."""

    def __init__(self, device):
        self.calls = 0
        self.history = []
        self.table = {}
        self.stack = [0.5, 1.5, 2.0]
        self.last = None
        self.dice = random.Random(3)
        self.numbers = np.random.default_rng(3)
        self.generator = torch.Generator(device=device).manual_seed(3)
        self.average = Average(device)

    def left_behind(self):
        """Everything, as tensors."""
        told = (self.calls, self.history, self.table, self.stack, self.average.calls)
        told += (self.dice.getstate(), self.numbers.bit_generator.state)
        told = torch.frombuffer(bytearray(repr(told).encode()), dtype=torch.uint8)
        last = [] if self.last is None else [self.last]
        return [told, self.generator.get_state(), self.average.mean, *last]


def state_counts(x, state):
    state.calls += 1
    return x.sin() * (1 + state.calls % 3)


def state_appends(x, state):
    state.history.append(len(state.history))
    return (x + sum(state.history[-3:])).sin()


def state_files(x, state):
    state.table[f"entry {len(state.table) % 5}"] = len(state.table)
    return (x * (1 + len(state.table))).sin()


def state_turns(x, state):
    state.stack.append(state.stack.pop(0))
    return (x * state.stack[0]).sin()


def state_remembers(x, state):
    before, state.last = state.last, x.detach().float().mean().nan_to_num()
    return x.sin() if before is None else (x * before.to(x.dtype)).sin()


def state_averages(x, state):
    return state.average(x)


def state_draws(x, state):
    return (x * torch.rand(x.shape, generator=state.generator, dtype=x.dtype, device=x.device)).sin()


def state_throws(x, state):
    return (x * state.dice.random()).sin()


def state_samples(x, state):
    return (x * float(state.numbers.random())).sin()


def global_throws(x):
    return (x * random.random()).sin()


def global_samples(x):
    return (x * float(np.random.rand())).sin()
