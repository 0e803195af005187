"""Runs a program's schedule through one set of doors and writes down everything that a user could see.

A record of a run is a list of entries (label, value); a value is bytes with shape and dtype, or the kind of an error.
Two runs are equal when their lists are. This file is pasted whole into the scripts that failures print.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import sys
import tempfile
import threading
import types
import warnings
import weakref

import numpy as np
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fuzz.doors import KEPT, Plain, Planned, Tick

HELD = (
    "records outlived",
    "still lent",
    "hooks were left on this thread",
    "bytes are left",
)  # by whatever torch leaves behind
EFFECTS = "left behind"
_TRIES = 6


# ---------------------------------------------------------------- one run


def seen(tensor):
    """A tensor as data, read behind the back of every dispatch mode."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1).cpu()
        if flat.is_floating_point():
            flat = torch.where(flat.isnan(), torch.full_like(flat, float("nan")), flat)
        return (tuple(tensor.shape), str(tensor.dtype), bytes(flat.view(torch.uint8).numpy()))


def kind_of(error):
    """What sort of error a user would see."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, Planned):
        return "planned"
    if type(error).__name__ == "InPlaceChangeError" or "modified by an inplace operation" in text:
        return "in-place"
    if "second time" in text:
        return "second backward"
    if any(base.__name__ == "HyperParallelError" for base in type(error).__mro__) or isinstance(error, AssertionError):
        return f"ours: {text}"
    if isinstance(error, (AttributeError, KeyError, TypeError, NameError, ValueError, TimeoutError)):
        return f"unexpected: {text}"
    return "other"


def make(description, seed, device, wants_grad=True):
    shape, dtype, requires_grad = description[:3]
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator).to(device=device, dtype=getattr(torch, dtype))
    return value.requires_grad_(requires_grad and wants_grad)


def halve_gradient(leaf):
    leaf.grad.mul_(0.5)


def make_weight(description, seed, device):
    value = make(description, seed, device, wants_grad=False).mul(0.5)
    requires_grad, is_parameter, hook = description[2:]
    weight = torch.nn.Parameter(value, requires_grad) if is_parameter else value.requires_grad_(requires_grad)
    if requires_grad and hook == "tensor":
        weight.register_hook(lambda grad: grad * 2)
    elif requires_grad and hook == "accumulated":
        weight.register_post_accumulate_grad_hook(halve_gradient)
    return weight


class Run:
    """One thread's part of the schedule. Each method is one kind of action."""

    def __init__(self, program, model, weights, tick, device, me, hp):
        self.program, self.model, self.weights, self.tick, self.device, self.me = (
            program,
            model,
            weights,
            tick,
            device,
            me,
        )
        self.around = getattr(hp, "around", contextlib.nullcontext)
        self.is_reference = isinstance(hp, Plain)
        self.entries = []
        self.inputs = {}
        self.losses = {}

    def log(self, label, tensors):
        for index, tensor in enumerate(tensors):
            self.entries.append((f"{self.me}: {label} {index}", None if tensor is None else seen(tensor)))

    def perform(self, actions):
        for number, (kind, batch, at, retain) in enumerate(actions):
            label = f"{number} {kind} {batch}"
            try:
                getattr(self, kind)(label, batch, at, retain)
            except Exception as error:
                sort = kind_of(error)
                self.entries.append((f"{self.me}: {label} error", sort))
                if sort == "in-place":
                    return  # what was accumulated before it depends on where it is noticed
            finally:
                self.tick.left = None

    def batch(self, batch):
        if batch not in self.inputs:
            self.inputs[batch] = [
                make(description, 1000 * batch + 100 * self.me + index, self.device)
                for index, description in enumerate(self.program["INPUTS"])
            ]
            KEPT.extend(weakref.ref(leaf) for leaf in self.inputs[batch] if not leaf.numel())
        return self.inputs[batch]

    def forward(self, label, batch, at, retain):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(self.program["SEED"] + batch)
        with self.around():
            outs = self.model(*self.batch(batch))
        self.log(label, outs)
        self.losses.pop(batch, None)
        terms = [out.float().mul(index + 1).sum() for index, out in enumerate(outs) if out.requires_grad]
        if terms:
            self.losses[batch] = sum(terms[1:], terms[0])

    def fail_forward(self, label, batch, at, retain):
        self.tick.left = at
        self.forward(label, batch, at, retain)

    def eval(self, label, batch, at, retain):
        with torch.no_grad():
            self.log(label, self.model(*self.batch(batch)))

    def backward(self, label, batch, at, retain):
        loss = self.losses.get(batch)
        if loss is None:
            return
        if not retain:
            del self.losses[batch]
        try:
            loss.backward(retain_graph=retain)
        except Planned:
            # A retry starts from nothing: how far a backward comes before a recompute fails depends on when that begins,
            # and any saved-tensor hooks inside a checkpoint move it.
            self.losses.pop(batch, None)
            for leaf in [*self.weights, *self.batch(batch)]:
                leaf.grad = None
            raise
        finally:
            if self.device != "cpu" and self.is_reference:
                hooks_of_device_thread(self.device)
        self.log(f"{label} weight", [weight.grad for weight in self.weights])
        self.log(f"{label} input", [value.grad for value in self.batch(batch)])

    def fail_backward(self, label, batch, at, retain):
        self.tick.left = at
        self.backward(label, batch, at, retain)

    def _leaves(self, batch):
        return [leaf for leaf in [*self.weights, *self.batch(batch)] if leaf.requires_grad]

    def grad(self, label, batch, at, retain):
        loss = self.losses.get(batch)
        leaves = self._leaves(batch)
        if loss is None or not leaves:
            return
        chosen = leaves[at % len(leaves) :][:2]
        if not retain:
            del self.losses[batch]
        self.log(label, torch.autograd.grad(loss, chosen, retain_graph=retain, allow_unused=True))

    def double(self, label, batch, at, retain):
        loss = self.losses.pop(batch, None)
        leaves = self._leaves(batch)
        if loss is None or not leaves:
            return
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        self.log(f"{label} first", first)
        squares = [grad.float().square().sum() for grad in first if grad is not None and grad.requires_grad]
        if squares:
            sum(squares[1:], squares[0]).backward()
            self.log(f"{label} weight", [weight.grad for weight in self.weights])

    def both(self, label, batch, at, retain):
        """Two threads go through one retained graph at once, each for gradients of its own."""
        loss = self.losses.get(batch)
        leaves = self._leaves(batch)
        if loss is None or not leaves:
            return
        chosen = [leaves[at % len(leaves) :][:2], leaves[::-1][at % len(leaves) :][:2]]
        found = [None, None]

        def work(me):
            try:
                found[me] = torch.autograd.grad(loss, chosen[me], retain_graph=True, allow_unused=True)
            except Exception as error:
                found[me] = kind_of(error)  # not the error: it holds this frame, which holds it
            forget_last_error(self.device)  # this thread's own: it may end, and free its memory, after it was joined

        in_threads([functools.partial(work, me) for me in range(2)])
        for me, grads in enumerate(found):
            if isinstance(grads, str):
                self.entries.append((f"{self.me}: {label} thread {me} error", grads))
            else:
                self.log(f"{label} thread {me}", grads)

    def drop(self, label, batch, at, retain):
        self.losses.pop(batch, None)

    def edit(self, label, batch, at, retain):
        with torch.no_grad():
            for value in self.batch(batch)[at % 2 :]:
                value.mul_(0.5)

    def change_weight(self, label, batch, at, retain):
        """As an optimizer does that steps between a forward and its backward."""
        with torch.no_grad():
            self.weights[at % len(self.weights)].mul_(0.5)

    def step(self, label, batch, at, retain):
        if self.losses or len(self.program["THREADS"]) > 1:
            return  # an update between forward and backward is torch's own in-place error, or a wrong recompute
        with torch.no_grad():
            for weight in self.weights:
                if weight.grad is not None:
                    weight.sub_(weight.grad.nan_to_num() * 0.01)
                    weight.grad = None


def run_program(program, hp, device):
    """The entries of one run of the whole program through the doors ``hp``."""
    constants = [
        make(tensor, 77 + index, device, wants_grad=False) for index, tensor in enumerate(program["CONSTANTS"])
    ]
    threads = program["THREADS"]
    tick = Tick(len(threads))
    runs = []
    for me in range(len(threads)):
        # Weights of its own: how often turns change inside backward depends on what is recomputed.
        weights = [make_weight(tensor, 7 + index, device) for index, tensor in enumerate(program["WEIGHTS"])]
        model = program["build"](hp, weights, constants, tick)
        runs.append(Run(program, model, weights, tick, device, me, hp))
    if len(runs) == 1:
        runs[0].perform(threads[0])
    else:
        _perform_in_threads(runs, threads, tick)
    for run in runs:
        if hasattr(run.model, "left_behind") and program.get("LOGS_EFFECTS", True):
            run.log(EFFECTS, run.model.left_behind())
    return [entry for run in runs for entry in run.entries]


def _perform_in_threads(runs, threads, tick):
    def work(run, actions):
        try:
            tick.wait(run.me)
            run.perform(actions)
        except Exception as error:
            run.entries.append((f"{run.me}: thread", kind_of(error)))
        finally:
            tick.end(run.me)

    in_threads([functools.partial(work, *pair) for pair in zip(runs, threads)])


def in_threads(works):
    """Each in a thread of its own, under the dispatch modes and the settings of this one."""
    modes = _get_current_dispatch_mode_stack()
    settings = _settings_now()

    def under_modes(work):
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            if settings is not None:
                from hyper_parallel import configure

                stack.enter_context(configure(settings))
            work()

    workers = [threading.Thread(target=under_modes, args=(work,), daemon=True) for work in works]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
        if worker.is_alive():
            raise TimeoutError("a thread of the program did not end")


def _settings_now():
    config = sys.modules.get("hyper_parallel.config")
    return None if config is None else config.current_config()


class Outcome:
    """What one run left behind."""

    def __init__(self, entries, faults, facts):
        self.entries, self.faults, self.facts = entries, faults, facts


def prepare(device):
    """Settings of the process under which two equal runs give equal bytes."""
    os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the device is first used
    torch.set_num_threads(1)
    if device != "cpu":
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


class _TakeHooksOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, taken):
        ctx.taken = taken
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            ctx.taken.append(True)
        return grad, None


def hooks_of_device_thread(device):
    """Take saved-tensor hooks off the framework's thread for this device; how many there were.

    An error inside a replay leaves them there: before 2.13 torch's checkpoint takes its hooks off when the error is
    forgotten, on whichever thread that happens. The judge must not suffer from that; with us, it is a fault.
    """
    taken = []
    _TakeHooksOff.apply(torch.ones(1, device=device, requires_grad=True), taken).backward()
    return len(taken)


def allocated_bytes():
    """Of the real device, without the workspaces that its libraries keep."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@contextlib.contextmanager
def device_of(settings, device):
    """The simulated accelerator, or a real device with slow copies; yields how many device bytes live now."""
    from hyper_parallel.config import SwapConfig, configure

    fields = {name: value for name, value in settings.items() if name not in ("timing", "seed")}
    with tempfile.TemporaryDirectory() as folder:
        if "disk" in fields["tiers"]:
            fields["disk_path"] = folder
        if device == "cpu":
            from hyper_parallel.testing import simulated_accelerator

            with simulated_accelerator(timing=settings["timing"], seed=settings["seed"], **fields) as simulation:
                yield lambda: simulation.live_bytes
            return
        with configure(SwapConfig(**fields)), slow_copies(settings["seed"]):
            yield allocated_bytes
            torch.cuda.synchronize()


@contextlib.contextmanager
def slow_copies(seed):
    """Every copy of the engine starts late, by a random number of cycles of its own stream."""
    from hyper_parallel.backends.torch.devices import AcceleratorBackend

    plain, dice = AcceleratorBackend.copy_all, random.Random(seed)

    def copy_all(self, copies, stream):
        for one in copies:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(dice.choice((0, 1, 20_000, 500_000)))
            plain(self, [one], stream)

    AcceleratorBackend.copy_all = copy_all
    try:
        yield
    finally:
        AcceleratorBackend.copy_all = plain


def forget_last_error(device):
    """Of a backward that raised, torch keeps the last node until the next backward on that thread, with us and without us."""
    torch.ones(1, device=device, requires_grad=True).sum().backward()


def run_once(program, hp, device):
    """One run on a fresh device; with us, also whether anything was left behind."""
    faults, facts, entries = [], None, []
    is_ours = isinstance(hp, types.ModuleType)
    if is_ours:
        hp.SwapManager().reset()
    gc.disable()
    KEPT.clear()
    try:
        with device_of(program["SETTINGS"], device) as live_bytes:
            before = live_bytes()
            entries = run_program(program, hp, device)
            forget_last_error(device)
            left = live_bytes() - before
            if is_ours:
                facts = hp.stats()
                if facts.live_records:
                    faults.append(f"{facts.live_records} records outlived every graph")
        if is_ours:
            faults += [
                f"{tier.live_bytes} bytes of {tier.name} far memory are still lent"
                for tier in hp.stats().tiers
                if tier.live_bytes
            ]
            faults += hooks_left(device)
    except Exception as error:
        if not is_ours:
            raise
        left = 0
        faults.append(f"at the end: {type(error).__name__}: {error}")
    finally:
        gc.enable()
    outcome = Outcome(entries, faults, facts)
    outcome.left_bytes = left
    outcome.left_values = sum(kept() is not None for kept in KEPT)
    return outcome


def effects_happen_once(facts):
    """Whether every region of a run was recomputed from a tape. Where Python runs again, effects happen again."""
    return facts is not None and not facts.regions_from_python


def effects_among(entries):
    return [entry for entry in entries if f": {EFFECTS} " in entry[0]]


def without_effects(entries):
    return [entry for entry in entries if f": {EFFECTS} " not in entry[0]]


def hooks_left(device):
    """Hooks or modes that the program should have taken off."""
    from hyper_parallel.backends.torch import marks

    marks.forget_bottom_hooks()
    faults = []
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        faults.append("saved-tensor hooks were left on this thread")
        torch._C._autograd._pop_saved_tensors_default_hooks()
        marks.THIS_THREAD.bottom = None  # or the next program would start with the damage of this one
    if torch._C._len_torch_dispatch_stack():
        faults.append("a dispatch mode was left on this thread")
    if device != "cpu" and hooks_of_device_thread(device):
        faults.append("saved-tensor hooks were left on the device's backward thread")
    return faults


def faults_of(program, reference, ours, device):
    """What a run with us left behind that it should not have."""
    faults = list(ours.faults)
    if ours.left_bytes and not reference.left_bytes:
        faults.append(f"{ours.left_bytes} device bytes are left, none without us")
    if not faults:
        return faults
    # A value changed by a region that saved it is a cycle of torch's own, and an error inside backward leaves more behind
    # under any hooks; both hold what we saved for them as well.
    # Values without elements have no bytes; whether the graph that saved them is left is told by what the hooks made of them,
    # and by inputs that live on.
    hooked = run_once(program, Plain("hooked"), device)
    is_torch = reference.left_bytes or reference.left_values or hooked.left_bytes or hooked.left_values
    if (
        not is_torch and len(program["THREADS"]) > 1
    ):  # of a thread that has ended, torch keeps something or not, by chance
        is_torch = any(run_once(program, Plain(), device).left_bytes for _ in range(_TRIES))
    has_raised = [value for _, value in ours.entries if value == "in-place"]
    has_raised_alone = has_raised and not [value for _, value in reference.entries if value == "in-place"]
    # Of an error that ended a thread, torch keeps the last node for a while, with us and without us.
    has_raised_in_thread = has_raised and len(program["THREADS"]) > 1
    if is_torch or has_raised_alone or has_raised_in_thread:
        faults = [fault for fault in faults if not any(words in fault for words in HELD)]
    return faults


def changes_a_weight(program):
    return any(kind == "change_weight" for actions in program["THREADS"] for kind, *_ in actions)


def is_right_until_it_raises(program, ours, device):
    """Whether a run is that of a program without any checkpoint, or raised by name after being right.

    Torch's own checkpoint recomputes with a changed weight and says nothing: to be equal to it proves nothing.
    """
    raised = next((at for at, (_, value) in enumerate(ours.entries) if value == "in-place"), None)
    for way in ("exact", "bare"):
        entries = without_effects(run_once(program, Plain(way), device).entries)
        if ours.entries == entries or (raised is not None and ours.entries[:raised] == entries[:raised]):
            return True
    return False


def main(program, device):
    """Compare, and say what differs. 0 when nothing does."""
    import hyper_parallel

    prepare(device)
    warnings.simplefilter("ignore")
    reference, ours = run_once(program, Plain(), device), run_once(program, hyper_parallel, device)
    lines = []
    if effects_happen_once(ours.facts):
        wanted = effects_among(run_once(program, Plain("exact"), device).entries)
        lines += ["forward left other things behind"] * (effects_among(ours.entries) != wanted)
    reference.entries, ours.entries = without_effects(reference.entries), without_effects(ours.entries)
    lines += faults_of(program, reference, ours, device)
    if changes_a_weight(program):
        lines += ["neither right nor an error by name"] * (not is_right_until_it_raises(program, ours, device))
        reference.entries = ours.entries
    for expected, got in zip(reference.entries, ours.entries):
        if expected != got:
            lines.append(f"without us {shown(expected)}")
            lines.append(f"with us    {shown(got)}")
            break
    else:
        if len(reference.entries) != len(ours.entries):
            lines.append(f"without us {len(reference.entries)} results, with us {len(ours.entries)}")
    print("\n".join(lines) or f"{len(ours.entries)} results, all equal")
    return 1 if lines else 0


def shown(entry):
    """An entry for people."""
    label, value = entry
    if value is None or isinstance(value, str):
        return f"{label}: {value}"
    shape, dtype, data = value
    tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype.split(".")[1])) if data else torch.empty(0)
    return f"{label}: {shape} {dtype} {tensor[:8].tolist()}"
