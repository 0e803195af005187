"""A guard around trial steps: it puts back what they change.

Before: the module tree, training flags, gradients, buffers, random states and the versions of the parameters are written
down; large values on the host, so that the device's peak is not ours. After: everything is put back. Gradients that were
there before are not held on the device for that: a step that drops them has their bytes, as it would without a trial.

Parameters and optimizer states are not copied: they may be larger than the host's memory. An optimizer is stopped before
its first step changes anything, and that is an error. Parameters that the step changes by hand cannot be put back; whatever
else ends the trial, its error names them too. A change through ``.data`` moves no version, so some values of each parameter
are compared as well.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyper_parallel.backends.torch.planner.blocks import device_of, require_module
from hyper_parallel.backends.torch.storages import unseen
from hyper_parallel.core.activation_checkpoint.summary import FirstStep
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import HyperParallelError, PlanError

__all__ = ["guarded", "restored_after"]

_COMPARED: Final = 4096  # values of each parameter, evenly spaced


class _Snapshot:
    """What a trial step may change."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._modules = [(path, id(module), module.training) for path, module in model.named_modules()]
        self._parameters = list(model.named_parameters(remove_duplicate=False))
        self._versions = {name: parameter._version for name, parameter in self._parameters}
        with unseen():
            self._values = {name: _some_values(parameter) for name, parameter in self._parameters}
            self._gradients = [_Gradient.of(parameter.grad) for _, parameter in self._parameters]
            self._buffers = [
                (owner, name, _Value.of(buffer))
                for owner in model.modules()
                for name, buffer in owner._buffers.items()
                if buffer is not None
            ]
        self._random = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._cpu_state = torch.get_rng_state()
        self._device_state = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def put_back(self) -> None:
        """Everything as it was."""
        with unseen():
            for (_, parameter), gradient in zip(self._parameters, self._gradients):
                parameter.grad = gradient.restored() if gradient is not None else None
            for owner, name, buffer in self._buffers:
                assert buffer is not None, "only buffers that exist are written down"
                owner._buffers[name] = buffer.restored()
        random.setstate(self._random)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu_state)
        if self._device_state is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_state, self._device)

    def changes(self) -> list[str]:
        """What the step changed and cannot be put back."""
        found = []
        now = dict(self._model.named_parameters(remove_duplicate=False))
        replaced = [name for name, parameter in self._parameters if now.get(name) is not parameter]
        with unseen():
            changed = [
                name
                for name, parameter in self._parameters
                if name not in replaced and self._is_changed(name, parameter)
            ]
        if changed:
            found.append(f"parameters were changed ({_some(changed)})")
        if replaced:
            found.append(f"parameters were replaced ({_some(replaced)})")
        after = [(path, id(module), module.training) for path, module in self._model.named_modules()]
        if after != self._modules:
            differ = sorted({path for path, *_ in set(after) ^ set(self._modules)})
            found.append(f"the module tree or its training flags changed ({_some(differ)})")
        return found

    def _is_changed(self, name: str, parameter: nn.Parameter) -> bool:
        if parameter._version != self._versions[name]:
            return True
        before, now = self._values[name], _some_values(parameter)
        return before is not now and (before is None or now is None or not torch.equal(before, now))


class _Value:
    """A tensor and a copy of its bytes on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        local = _local(tensor)
        self._copy = local.detach().to("cpu", copy=True)

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> _Value | None:
        """None for nothing."""
        return None if tensor is None else cls(tensor)

    def restored(self) -> torch.Tensor:
        """The tensor, with its bytes put back."""
        _local(self._tensor).detach().copy_(self._copy)
        return self._tensor


class _Gradient:
    """A gradient that waits on the host: a step that drops its gradients gets the device's bytes of it.

    It is put back into the same tensor as long as anyone else holds that, else into a new one.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._device = tensor.device
        self._copy = tensor.detach().to("cpu", copy=True)

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> _Gradient | _Value | None:
        """None for nothing. What is more than bytes (a shard, a gradient with a graph) is held itself."""
        if tensor is None:
            return None
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
        return cls(tensor) if is_plain else _Value(tensor)

    def restored(self) -> torch.Tensor:
        """The gradient, with its bytes put back."""
        tensor = self._tensor()
        if tensor is None:
            return self._copy.to(self._device, copy=True)
        tensor.detach().copy_(self._copy)
        return tensor


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # a sharded tensor's own part
    return local


def _some_values(parameter: nn.Parameter) -> torch.Tensor | None:
    """Evenly spaced values of a parameter as integers, on the host; None where there are no plain values to look at."""
    local = _local(parameter).detach()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(local.dtype.itemsize)
    is_plain = type(local) in (torch.Tensor, nn.Parameter) and local.layout is torch.strided
    if not is_plain or local.is_meta or integers is None or not local.numel():
        return None
    if local.is_contiguous():
        return local.view(-1)[:: -(-local.numel() // _COMPARED)].to("cpu", copy=True).view(integers)
    rows = local[:: -(-local.shape[0] // _COMPARED)]
    return rows.to("cpu", copy=True).reshape(-1)[:_COMPARED].view(integers)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def guarded(model: Any, *, who: str) -> contextlib.AbstractContextManager[None]:
    """One guard around many trial steps: profile, plans and measurements of a whole fit."""
    return restored_after(require_module(model, who), device_of(model, who), who=who)


@contextlib.contextmanager
def restored_after(model: nn.Module, device: torch.device, *, who: str) -> Iterator[None]:
    """Put back what trial steps inside change; raise what they changed for good, also where they end in an error."""
    snapshot = _Snapshot(model, device)
    manager = SwapManager()
    first_step, manager.first_step = (
        manager.first_step,
        FirstStep(is_over=True, is_trial=True),
    )  # a trial step is not the user's first step
    optimizers = register_optimizer_step_pre_hook(_OptimizerStops(model, who))
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        optimizers.remove()
        first_step.before = manager.stats()
        manager.first_step = first_step
        snapshot.put_back()
        if failure is not None:
            _add_changes_to_error(failure, snapshot.changes(), who)
    changes = snapshot.changes()
    if changes:
        raise PlanError(
            f"{who}: {_trace(changes)} Give a step that runs one forward and backward only, without an optimizer."
        )


def _trace(changes: list[str]) -> str:
    return (
        f"the step left a trace that cannot be undone: {'; '.join(changes)}. Gradients, buffers and random states were put "
        "back."
    )


def _add_changes_to_error(failure: BaseException, changes: list[str], who: str) -> None:
    """Add to an error what the trial steps before it changed for good: to the message where it is ours, else as a note."""
    if not changes:
        return
    if isinstance(failure, HyperParallelError) and failure.args and isinstance(failure.args[0], str):
        failure.args = (f"{failure.args[0]} Besides, {_trace(changes)}", *failure.args[1:])
    elif sys.version_info >= (3, 11):
        failure.add_note(f"{who}: {_trace(changes)}")


class _OptimizerStops:
    """A hook before every optimizer's step that stops those which would change the model."""

    def __init__(self, model: nn.Module, who: str) -> None:
        self._parameters = set(map(id, model.parameters()))
        self._who = who

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if any(id(parameter) in self._parameters for parameter in held):
            raise PlanError(
                f"{self._who}: the step calls {type(optimizer).__name__}.step(), and a trial step must not change weights. It "
                "was stopped before anything changed: weights, optimizer states, gradients, buffers and random states are as "
                "they were. Give a step that runs one forward and backward only, without an optimizer."
            )
