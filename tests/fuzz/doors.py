"""What a program calls instead of us, its policies, and the clock that plans its errors and turns.

Pasted into the scripts that failures print, before ``harness``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts


class Planned(Exception):
    """An error that the schedule asked for."""


class Plain:
    """The doors without us: nothing is swapped, and checkpoints are torch's own.

    ``exact``: nothing is recomputed, and every saved value is copied when it is saved. These are the gradients that the
    mathematics means, also where a later change in place makes torch raise. A copy has the strides of the original: with
    other strides a matrix product may choose another kernel, and on which processors its last bits then differ is chance.
    ``bare``: nothing is recomputed, and torch's own check for changes in place is on.
    ``hooked``: hooks that keep every value stand where ours might. What torch itself leaves behind under hooks, after an
    error inside backward, is not our leak.
    ``alike``: hooks that keep every value stand where ours do, and tensors come by position where we pass them so. Both
    change how often torch replays nested checkpoints.
    ``once``: our checkpoints run their Python once, as a tape does; torch's own are as they are.
    """

    def __init__(self, way="plain"):
        self.way = way

    def around(self):
        if self.way != "exact":
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(copy_with_strides, lambda copy: copy)

    def _hooks(self):
        if self.way not in ("hooked", "alike"):
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(Kept, unchanged)

    def swap(self, function, *args, policy_fn=None, swap_config=None, **kwargs):
        with self._hooks():
            return function(*args, **kwargs)

    def checkpoint(
        self, function, *args, swap_inputs=False, policy_fn=None, swap_config=None, early_stop=True, **kwargs
    ):
        if self.way in ("exact", "bare", "once"):
            return function(*args, **kwargs)
        if self.way == "alike":
            function, args, kwargs = by_position(function, args, kwargs, takes_box=swap_inputs)
        if "early_stop" in inspect.signature(torch_checkpoint).parameters:
            kwargs["early_stop"] = early_stop
        with self._hooks() if swap_inputs or self.way == "hooked" else contextlib.nullcontext():
            return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)

    def swap_wrapper(self, function, **settings):
        return Wrapped(self.swap, function, settings)

    def checkpoint_wrapper(self, function, **settings):
        return Wrapped(self.checkpoint, function, settings)

    def swap_tensor_wrapper(self, tree, tag=None):
        return tree

    def SwapConfig(self, **fields):
        return None

    class CheckpointPolicy:
        MUST_SAVE = PREFER_SAVE = MUST_RECOMPUTE = PREFER_RECOMPUTE = MUST_SWAP = None


class Wrapped:
    """A wrapped function or module without us."""

    def __init__(self, run, function, settings):
        self.run, self.function, self.settings = run, function, settings

    def __call__(self, *args, **kwargs):
        own = {name: kwargs.pop(name) for name in list(kwargs) if name in OF_TORCH}
        function = functools.partial(self.function, **own) if own else self.function
        return self.run(function, *args, **self.settings, **kwargs)


OF_TORCH = (
    "debug",
    "early_stop",
    "function",
    "preserve_rng_state",
    "determinism_check",
)  # of its checkpoint's settings


def copy_with_strides(tensor):
    """A copy of the whole storage, seen through the same offset and strides; ``clone`` makes an expanded value dense."""
    value = tensor.detach()
    is_plain = value.layout is torch.strided and type(value) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or value.is_conj() or value.is_neg() or value.is_quantized:
        return value.clone()
    with torch.no_grad():
        storage = value.untyped_storage().clone()
        return value.new_empty(0).set_(storage, value.storage_offset(), value.size(), value.stride())


# ---------------------------------------------------------------- what users have around us


def by_position(function, args, kwargs, takes_box):
    """A call that gives by position what a program gives by keyword or in a box."""
    names = tuple(kwargs)
    if names:
        return (lambda *values: function(**dict(zip(names, values)))), tuple(kwargs.values()), {}
    if takes_box and args and isinstance(args[0], dict):
        return (lambda *values: function({**args[0], "values": list(values)})), tuple(args[0]["values"]), {}
    return function, args, kwargs


def torch_checkpoint_of(hp, function, *args, **kwargs):
    if isinstance(hp, Plain) and hp.way != "alike":
        return hp.checkpoint(function, *args, **kwargs)
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def torch_reentrant_of(hp, function, *args):
    if isinstance(hp, Plain) and hp.way in ("exact", "bare"):
        return function(*args)
    return torch_checkpoint(function, *args, use_reentrant=True)


def torch_selective_of(hp, function, *args, **kwargs):
    if isinstance(hp, Plain) and hp.way in ("exact", "bare"):
        return function(*args, **kwargs)
    saved = [torch.ops.aten.mm.default, torch.ops.aten.tanh.default, torch.ops.aten.mul.Tensor]
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def copying_hooks():
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda copy: copy)


class PassingMode(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **(kwargs or {}))


class Block(torch.nn.Module):
    """A function as a module, with its parameters and perhaps hooks."""

    def __init__(self, function, weights, hooks):
        super().__init__()
        self.function = function
        self.weights = torch.nn.ParameterList(weight for weight in weights if isinstance(weight, torch.nn.Parameter))
        if hooks == "forward_hook":
            self.register_forward_hook(lambda module, args, output: output * 2 if torch.is_tensor(output) else output)
        elif hooks == "backward_hook":
            self.register_full_backward_hook(
                lambda module, inputs, outputs: tuple(None if grad is None else grad / 2 for grad in inputs)
            )

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Reading(torch.nn.Module):
    """A function as a module that hands it the weights which the module has at the moment."""

    def __init__(self, function, weights):
        super().__init__()
        self.function = function
        self.count = len(weights)
        for index, weight in enumerate(weights):
            if isinstance(weight, torch.nn.Parameter):
                self.register_parameter(f"w{index}", weight)
            else:
                self.register_buffer(f"w{index}", weight)

    def forward(self, *args, **kwargs):
        return self.function([getattr(self, f"w{index}") for index in range(self.count)], *args, **kwargs)


class Outer(torch.nn.Module):
    """A model with one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


def other_weights(wrapped, weights, *args, **kwargs):
    """``functional_call`` of a wrapped layer, with weights that come from its own by one step."""
    other = {f"w{index}": weight * 0.75 + 0.125 for index, weight in enumerate(weights)}
    if isinstance(wrapped, Wrapped):  # a replay of torch's checkpoint would find the layer's own weights
        layer = wrapped.function

        def inside(*args, **kwargs):
            return torch.func.functional_call(layer, other, args, kwargs)

        return Wrapped(wrapped.run, inside, wrapped.settings)(*args, **kwargs)
    return torch.func.functional_call(wrapped, other, args, kwargs)


def weights_inside(wrapped, weights, *args, **kwargs):
    """The same for a model that has the wrapped layer in it."""
    if isinstance(wrapped, Wrapped):
        return other_weights(wrapped, weights, *args, **kwargs)
    other = {f"layer.w{index}": weight * 0.75 + 0.125 for index, weight in enumerate(weights)}
    return torch.func.functional_call(Outer(wrapped), other, args, kwargs)


def by_keyword(x, value):
    """A result that shows which keyword arrived."""
    return x * value.detach().mean().to(x.dtype) if torch.is_tensor(value) else x * (3 if value else 5)


KEPT = []  # weak references to what the hooks of the run that goes on keep, and to its inputs without elements


class Kept:
    """A value that hooks keep as it is."""

    def __init__(self, tensor):
        self.tensor, self.version = tensor.detach(), tensor._version
        KEPT.append(weakref.ref(self))


def unchanged(kept):
    if kept.tensor._version != kept.version:
        raise RuntimeError("a saved tensor was modified by an inplace operation")
    return kept.tensor


# ---------------------------------------------------------------- policies


def function_policy(hp, table, otherwise):
    def policy(ctx, op, *args, **kwargs):
        return getattr(hp.CheckpointPolicy, table.get(op.overloadpacket.__name__, otherwise))

    return policy


def bools_policy(hp, table, otherwise):
    return lambda ctx, op, *args, **kwargs: op.overloadpacket.__name__ in table


def cycle_policy(hp, table, otherwise):
    answers = [*table.values(), otherwise]
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        return getattr(hp.CheckpointPolicy, answers[len(asked) % len(answers)])

    return policy


def save_even(hp):
    policies = hp.CheckpointPolicy
    return lambda tensor: policies.MUST_SAVE if tensor.dim() % 2 == 0 else policies.MUST_SWAP


def all_save(hp):
    return lambda tensor: hp.CheckpointPolicy.PREFER_SAVE


# ---------------------------------------------------------------- turns and planned errors


class Tick:
    """Called at every operation: raises where the schedule wants it, and passes the turn between threads.

    One thread runs at a time, and turns change at counted calls only, so a program with threads is deterministic.
    A device's backward runs on the framework's one thread for that device, whoever asked for it: passing the turn there
    would stop the only thread that could ever give it back, so turns are passed on the program's own threads alone.

    Slots, and no ``__dict__``: a region would put the count back around a replay, as it does for every object in reach.
    """

    __slots__ = ("_calls", "_changed", "_members", "_over", "_threads", "_turn", "left")

    def __init__(self, threads):
        self.left = None  # calls until the planned error
        self._threads = threads
        self._calls = 0
        self._turn = 0
        self._over = set()
        self._members = set()
        self._changed = threading.Condition()

    def whose_turn(self):
        return self._turn

    def __call__(self, me=None):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Planned
        if self._threads > 1 and threading.get_ident() in self._members:
            self._calls += 1
            if self._calls % 3 == 0:
                self._pass_turn(self._turn if me is None else me)

    def wait(self, me):
        with self._changed:
            self._members.add(threading.get_ident())
            if not self._changed.wait_for(lambda: self._turn == me, timeout=60):
                raise TimeoutError(f"thread {me} waited a minute for its turn")

    def _pass_turn(self, me):
        with self._changed:
            others = [other for other in range(self._threads) if other not in self._over and other != me]
            if not others:
                return
            self._turn = others[0]
            self._changed.notify_all()
        self.wait(me)

    def end(self, me):
        with self._changed:
            self._over.add(me)
            left = [other for other in range(self._threads) if other not in self._over]
            self._turn = left[0] if left else me
            self._changed.notify_all()
