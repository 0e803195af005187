"""Lightning: a callback.

    Trainer(..., callbacks=[callback("boundary")])                   # or callback(budget="20GiB")

It works from the start of ``fit``, when the strategy has placed and wrapped the module, to its end or exception. What
Lightning saves has the names that it has without us.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.integrations.budgets import InTrainer, loss_of
from hyper_parallel.integrations.packages import needed
from hyper_parallel.integrations.treatment import Treatment, What
from hyper_parallel.planner.plan_store import Store

if TYPE_CHECKING:
    from lightning.pytorch import Callback

__all__ = ["callback"]


def callback(
    what: What | None = None,
    *,
    budget: int | str | None = None,
    blocks: str | Sequence[str] | None = None,
    store: Store = True,
) -> Callback:
    """A ``Callback`` that treats the ``LightningModule`` while it is fitted; options as in ``integrations.treatment``.

    ``store``: with a budget, the folder of plans that lets a restart plan nothing; None switches it off.
    """
    who = "integrations.lightning.callback"
    base = needed("lightning.pytorch", who=who, otherwise="pytorch_lightning").Callback
    treatment = Treatment(what=what, budget=budget, blocks=blocks, store=store)

    class HyperParallelCallback(base):  # type: ignore[misc,valid-type]  # a class of a package that is imported at its first use
        """Saves, recomputes or swaps activations while the trainer fits."""

        def __init__(self) -> None:
            self._run = InTrainer(treatment)

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self._run.begin(pl_module)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            def step() -> None:
                with _unlogged(pl_module), trainer.precision_plugin.train_step_context():
                    loss = loss_of(pl_module.training_step(batch, batch_idx), who)
                loss.backward()

            self._run.before_step(pl_module, trainer.optimizers, lambda: step)

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self._run.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._run.end()

    return HyperParallelCallback()


@contextlib.contextmanager
def _unlogged(pl_module: Any) -> Iterator[None]:
    """Trial steps write nothing into the trainer's logs."""

    def say_nothing(*_: Any, **__: Any) -> None:
        return None

    names = ("log", "log_dict")
    pl_module.__dict__.update(dict.fromkeys(names, say_nothing))
    try:
        yield
    finally:
        for name in names:
            del pl_module.__dict__[name]
