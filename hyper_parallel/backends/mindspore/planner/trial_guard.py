"""A guard around trial steps: it puts back what they change.

Gradients are values that a step returns, so that there is nothing to put back of them, unless the step stores them in
``parameter.grad``. Random streams, buffers and parameters that are not trained are put back. MindSpore counts no change by
``assign`` or by an optimizer, so trained parameters are copied to the host and compared: a step that changes them is an
error, and they are put back too.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import mindspore
import numpy as np

from hyper_parallel.backends.mindspore.devices import as_array
from hyper_parallel.backends.mindspore.planner.blocks import TREE, require_cell
from hyper_parallel.backends.mindspore.storages import flat_bytes, unseen
from hyper_parallel.core.activation_checkpoint.summary import FirstStep
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device import on_cpu

__all__ = ["guarded", "restored_after"]


class _Value:
    """A tensor and a copy of its bytes on the host."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self._copy = self._bytes().copy()

    def _bytes(self) -> Any:  # numpy.ndarray
        compat.wait_for_ops()
        return as_array(flat_bytes(self.tensor)) if on_cpu() else self.tensor.asnumpy()

    def is_changed(self) -> bool:
        """Whether its bytes are others now."""
        now = self._bytes()
        return bool(now.tobytes() != self._copy.tobytes())

    def put_back(self) -> None:
        """Its bytes as they were."""
        if on_cpu():
            np.copyto(self._bytes(), self._copy)
        else:
            self.tensor.set_data(mindspore.Tensor(self._copy, dtype=self.tensor.dtype))


class _Snapshot:
    """What a trial step may change."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cells = [(path, id(cell), cell.training) for path, cell in TREE.named(model)]
        self._parameters = list(TREE.named_parameters(model))
        with unseen():
            self._values = [(name, _Value(parameter)) for name, parameter in self._parameters]
            self._gradients = [
                (parameter, parameter.__dict__["grad"])
                for _, parameter in self._parameters
                if "grad" in getattr(parameter, "__dict__", {})
            ]
            self._buffers = [
                _Value(buffer)
                for _, cell in TREE.named(model)
                for buffer in cell._buffers.values()
                if buffer is not None
            ]
        self._random = random.getstate()
        self._numpy = np.random.get_state()
        self._seeds = compat.op_seeds()

    def changes(self) -> list[str]:
        """What the step changed and must not."""
        found = []
        changed = [name for name, value in self._values if value.tensor.requires_grad and value.is_changed()]
        if changed:
            found.append(f"parameters were changed ({_some(changed)})")
        now = dict(TREE.named_parameters(self._model))
        replaced = [name for name, parameter in self._parameters if now.get(name) is not parameter]
        if replaced:
            found.append(f"parameters were replaced ({_some(replaced)})")
        after = [(path, id(cell), cell.training) for path, cell in TREE.named(self._model)]
        if after != self._cells:
            differ = sorted({path for path, *_ in set(after) ^ set(self._cells)})
            found.append(f"the module tree or its training flags changed ({_some(differ)})")
        return found

    def put_back(self) -> None:
        """Everything as it was."""
        with unseen():
            for value in (*(value for _, value in self._values), *self._buffers):
                if value.is_changed():
                    value.put_back()
        for _, parameter in self._parameters:
            getattr(parameter, "__dict__", {}).pop("grad", None)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        compat.restore_op_seeds(self._seeds)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def guarded(model: Any, *, who: str) -> contextlib.AbstractContextManager[None]:
    """One guard around many trial steps: profile, plans and measurements of a whole fit."""
    return restored_after(require_cell(model, who), who=who)


@contextlib.contextmanager
def restored_after(model: Any, *, who: str) -> Iterator[None]:
    """Put back what trial steps inside change; raise where they changed trained weights or the tree of cells."""
    snapshot = _Snapshot(model)
    manager = SwapManager()
    first_step, manager.first_step = manager.first_step, FirstStep(is_over=True, is_trial=True)
    is_complete = False
    changes: list[str] = []
    try:
        yield
        is_complete = True
    finally:
        if not is_complete:
            compat.end_failed_gradient()
        first_step.before = manager.stats()
        manager.first_step = first_step
        changes = snapshot.changes()
        snapshot.put_back()
    if changes:
        raise PlanError(
            f"{who}: the step left a trace: {'; '.join(changes)}. Weights, buffers and random states were put back. Give a step "
            "that runs one forward and backward only, without an optimizer."
        )
