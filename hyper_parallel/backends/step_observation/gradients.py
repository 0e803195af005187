"""A fingerprint of all gradients of a step, so that ways of running it can be compared bit for bit."""

from __future__ import annotations

import hashlib
from typing import Any

from hyper_parallel.backends.planning.module_tree import Module
from hyper_parallel.backends.step_observation.framework import ObservedFramework

__all__ = ["FirstGradients", "add_gradients"]


def add_gradients(framework: ObservedFramework, digest: Any, model: Module, result: Any) -> bool:  # digest: hashlib's
    """Feed every gradient of the step that returned ``result`` to ``digest``, by name; whether there were any."""
    has_some = False
    for name, gradient in framework.gradients(model, result):
        has_some = True
        digest.update(name.encode())
        if gradient is not None:
            digest.update(framework.bytes_of(gradient))
    return has_some


class FirstGradients:
    """Called after every step with its result; takes the fingerprint of the first step's gradients, and then does nothing.

    The fingerprint stays empty where the step shows no gradients.
    """

    def __init__(self, framework: ObservedFramework, model: Module) -> None:
        self._framework = framework
        self._model = model
        self._is_over = False
        self.fingerprint = ""

    def __call__(self, result: Any) -> None:
        """A step is over."""
        if self._is_over:
            return
        self._is_over = True
        digest = hashlib.sha256()
        if add_gradients(self._framework, digest, self._model, result):
            self.fingerprint = digest.hexdigest()
