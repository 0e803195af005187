"""``transformers.Trainer``: a callback, or a switch behind ``activation_checkpointing=True``.

Trainer(model, args, callbacks=[callback("boundary")])           # or callback(budget="20GiB")
switch(model, "attention")                                       # and activation_checkpointing=True as usual
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from hyper_parallel.integrations.budgets import InTrainer, loss_of
from hyper_parallel.integrations.packages import needed
from hyper_parallel.integrations.switches import Switch
from hyper_parallel.integrations.treatment import Treatment, What
from hyper_parallel.planner.backend import Model, Step
from hyper_parallel.planner.plan_store import Store

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["callback", "switch"]

_SWITCHES: Final = ("activation_checkpointing", "gradient_checkpointing")  # the newer name first


def callback(
    what: What | None = None,
    *,
    budget: int | str | None = None,
    blocks: str | Sequence[str] | None = None,
    step: Step | None = None,
    store: Store = True,
) -> TrainerCallback:
    """A ``TrainerCallback`` that treats the model while it is trained; options as in ``integrations.treatment``.

    ``step``: with a budget, one forward and backward to measure; None: the trainer's first batch. ``store``: see ``fit_memory``.
    """
    who = "integrations.transformers.callback"
    base = needed("transformers", who=who).TrainerCallback
    torch = needed("torch", who=who)
    treatment = Treatment(what=what, budget=budget, blocks=blocks, store=store)

    class HyperParallelCallback(base):  # type: ignore[misc,valid-type]  # a class of a package that is imported at its first use
        """Saves, recomputes or swaps activations while the trainer trains."""

        def __init__(self) -> None:
            self._run = InTrainer(treatment)
            self._call: tuple[Any, Any] | None = None  # what the trainer called the model with
            self._call_hook: Any = None  # torch.utils.hooks.RemovableHandle

        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            if getattr(args, "activation_offloading", False):
                raise ValueError(f"{who}: activation_offloading=True moves the same values; leave it out")
            self._forget()
            self._run.begin(model)
            if treatment.budget is not None and step is None:
                self._call_hook = model.register_forward_pre_hook(self._remember_call, with_kwargs=True)

        def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
            self._run.before_step(model, [optimizer], lambda: step or self._own_step(model))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._forget()
            self._run.end()

        def _remember_call(self, module: Any, args: Any, kwargs: Any) -> None:
            if module.training and torch.is_grad_enabled():  # evaluating and generating have batches of another size
                self._call = args, kwargs

        def _own_step(self, model: Any) -> Step | None:
            call = self._call
            self._forget()
            return None if call is None else lambda: loss_of(model(*call[0], **call[1]), who).backward()

        def _forget(self) -> None:
            self._call = None
            if self._call_hook is not None:
                self._call_hook.remove()
                self._call_hook = None

    return HyperParallelCallback()


def switch(model: Model, what: What | None = None, *, blocks: str | Sequence[str] | None = None) -> Model:
    """Let the model's own switch, under its old and its new name, turn this treatment on and off when a trainer calls it."""
    treatment = Treatment(what=what, blocks=blocks)
    names = [name for name in _SWITCHES if hasattr(model, f"{name}_enable")]
    if not names:
        raise TypeError(
            f"integrations.transformers.switch: {type(model).__name__} has neither "
            f"{' nor '.join(f'{name}_enable()' for name in _SWITCHES)}, which trainers call; "
            "give a transformers model, or use integrations.apply(model, ...)"
        )
    own = Switch(model, treatment)
    for name in names:
        model.__dict__[f"{name}_enable"] = own.enable
        model.__dict__[f"{name}_disable"] = own.disable
    return model
