"""A fingerprint of all gradients of a model, so that ways of running its step can be compared bit for bit."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

__all__ = ["FirstGradients", "add_gradients"]


def add_gradients(digest: Any, model: nn.Module) -> None:  # digest: hashlib's
    """Feed every gradient to ``digest``, by name; a sharded one with the part that is here."""
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        if parameter.grad is not None:
            gradient: Any = parameter.grad.detach()
            gradient = getattr(gradient, "_local_tensor", gradient)
            digest.update(gradient.cpu().contiguous().flatten().view(torch.uint8).numpy())


class FirstGradients:
    """Called after every step; takes the fingerprint of the first step's gradients, and then does nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.fingerprint = ""

    def __call__(self, _: Any) -> None:
        """A step is over."""
        if not self.fingerprint:
            digest = hashlib.sha256()
            add_gradients(digest, self._model)
            self.fingerprint = digest.hexdigest()
