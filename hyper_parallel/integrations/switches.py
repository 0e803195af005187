"""Methods that replace a model's own and turn a treatment on and off; a copy of the model has a switch of its own."""

from __future__ import annotations

from typing import Any

from hyper_parallel.errors import PlanError
from hyper_parallel.integrations.treatment import Treated, Treatment
from hyper_parallel.planner.backend import Model

__all__ = ["Switch"]


class Switch:
    """A treatment of one model that others turn on and off."""

    def __init__(self, model: Model, treatment: Treatment) -> None:
        self._model = model
        self._treatment = treatment
        self._treated: Treated | None = None
        self._was_copied_on = False

    def enable(self, *_: Any, **__: Any) -> None:  # their options belong to the function that this one replaces
        """On, unless it is."""
        if self._treated is None and not self._was_copied_on:
            self._treated = Treated(self._treatment, [self._model])

    def disable(self) -> None:
        """Off, if it is on."""
        if self._was_copied_on:
            raise PlanError(
                "integrations.transformers.switch: cannot take the regions off this model, because it was copied or loaded with "
                "them on, and the way back stayed with the original. Disable it before copying; state dicts are the same."
            )
        treated, self._treated = self._treated, None
        if treated is not None:
            treated.remove()

    def __getstate__(self) -> dict[str, Any]:
        is_on = self._treated is not None or self._was_copied_on
        return {**self.__dict__, "_treated": None, "_was_copied_on": is_on}
