"""A memory budget for ``mindspore.train.Model``: one callback, in PyNative mode without data sinking."""

from __future__ import annotations

import os
from typing import Any

import mindspore
from mindspore.train import Callback

from hyper_parallel.errors import PlanError
from hyper_parallel.planner.backend import AppliedPlan
from hyper_parallel.planner.fit import fit_memory

__all__ = ["BudgetCallback"]


class BudgetCallback(Callback):  # type: ignore[misc]
    """Fits the network to a budget with the first batch of the training, and takes the plan off when training ends.

    Args:
        budget: ``"20GiB"`` or bytes, as for ``hp.fit_memory``.
        blocks: patterns of the cells that are blocks; None: they are found.
        report: a file for the plan and what became of it.
    """

    def __init__(
        self, budget: int | str, *, blocks: Any = None, steps: int = 3, report: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        self._budget = budget
        self._blocks = blocks
        self._steps = steps
        self._report = report
        self.applied: AppliedPlan | None = None

    def on_train_step_begin(self, run_context: Any) -> None:
        """Before the first step: run trial steps with its batch, which leave no trace."""
        if self.applied is not None:
            return
        who = type(self).__name__
        values = run_context.original_args()
        batch = values.get("train_dataset_element")
        if batch is None:
            raise PlanError(
                f"{who}: cannot see the first batch; because the data goes to the device in a sink. Use Model.train(..., "
                "dataset_sink_mode=False)."
            )
        trained = values.train_network
        network, weights = getattr(trained, "network", None), getattr(trained, "weights", None)
        if network is None or weights is None:
            raise PlanError(
                f"{who}: {type(trained).__name__} has no network and weights, as nn.TrainOneStepCell has. Call hp.fit_memory("
                "model, step, budget) before the training, with a step that runs one forward and backward."
            )
        function = mindspore.value_and_grad(network, None, weights)
        inputs = batch if isinstance(batch, tuple | list) else (batch,)
        self.applied = fit_memory(
            network, lambda: function(*inputs), self._budget, blocks=self._blocks, steps=self._steps
        )

    def on_train_end(self, run_context: Any) -> None:
        """Write the report, and put the network back as it was."""
        if self.applied is None:
            return
        if self._report is not None:
            self.applied.report(self._report)
        self.applied.remove()
