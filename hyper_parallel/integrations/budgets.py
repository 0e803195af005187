"""A budget inside another library's trainer: nothing can be measured before the trainer has run a step of its own.

The optimizer makes its state in its first step, and only the trainer knows its batches. So a model with a budget starts
under ``boundary``, the least memory there is without a plan, and is fitted before the first step that finds an optimizer
with state, on a batch that the trainer itself has fed to the model. Gradients are the same before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hyper_parallel.errors import PlanError
from hyper_parallel.integrations.treatment import Treated, Treatment
from hyper_parallel.planner.backend import Model, Step

__all__ = ["InTrainer", "loss_of"]


class Loss(Protocol):
    """A tensor from which a backward can start."""

    def backward(self) -> None:
        """Run backward."""


class InTrainer:
    """A treatment that a trainer's callback applies: ``begin``, then ``before_step`` each time, then ``end``."""

    def __init__(self, treatment: Treatment) -> None:
        if treatment.budget is not None:
            require_device(f"budget={treatment.budget!r}")
        self._treatment = treatment
        self._treated: Treated | None = None
        self._wants_fit = False

    def begin(self, model: Model) -> None:
        """Treat the model; again after a training that ended in an exception."""
        self.end()
        self._wants_fit = self._treatment.budget is not None
        first = Treatment(blocks=self._treatment.blocks) if self._wants_fit else self._treatment
        self._treated = Treated(first, [model])

    def before_step(self, model: Model, optimizers: Any, make_step: Callable[[], Step | None]) -> None:
        """Fit the budget, once the optimizers have their state and ``make_step`` knows a step."""
        if not self._wants_fit or not any(getattr(one, "state", None) for one in optimizers):
            return
        step = make_step()
        if step is None:
            return
        self.end()
        self._treated = Treated(self._treatment, [model], step)

    def end(self) -> None:
        """Put the model back as it was; nothing happens the second time."""
        self._wants_fit = False
        treated, self._treated = self._treated, None
        if treated is not None:
            treated.remove()


def require_device(what: str) -> None:
    """Refuse a budget where there is no device memory, before a training has begun.

    Raises:
        PlanError: the machine has no accelerator, and no simulated one is in use.
    """
    from hyper_parallel.backends.torch.planner.meters import has_device_memory

    if not has_device_memory():
        raise PlanError(
            f"{what}: a budget is of device memory, and this machine has no accelerator. Choose a preset, such as "
            "callback('boundary'), or try the budget inside hyper_parallel.testing.simulated_accelerator()."
        )


def loss_of(output: Any, who: str) -> Loss:
    """The loss in what a model or a training step returned: a scalar tensor, ``.loss``, or ``["loss"]``."""
    loss = output if hasattr(output, "backward") else getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if loss is None or not hasattr(loss, "backward"):
        raise PlanError(
            f"{who}: cannot fit a budget, because {type(output).__name__}, which the model returned for the trainer's batch, "
            "holds no loss. Give the model labels, pass step=..., or choose a preset instead of a budget."
        )
    found: Loss = loss
    return found
