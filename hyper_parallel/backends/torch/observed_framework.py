"""Torch, as a step is observed on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

from hyper_parallel.backends.torch.graph import is_in_backward
from hyper_parallel.backends.torch.planner.blocks import TREE, device_of, require_module
from hyper_parallel.backends.torch.planner.meters import meter_for
from hyper_parallel.backends.torch.planner.plan_regions import apply_plan
from hyper_parallel.backends.torch.planner.rule_regions import apply_rules
from hyper_parallel.backends.torch.planner.survey import on_backward
from hyper_parallel.backends.torch.wrappers import checkpoint_wrapper, swap_wrapper
from hyper_parallel.core.activation_checkpoint.swap import SwapManager

__all__ = ["FRAMEWORK", "TorchObserved"]


class TorchObserved:
    """See :class:`~hyper_parallel.backends.step_observation.framework.ObservedFramework`."""

    name = "torch"
    version = str(torch.__version__)
    rest = "activations and workspace"
    how_to_return_gradients = "have the step run a backward"
    how_to_repeat = "have the step use one batch, and torch.use_deterministic_algorithms(True)"
    tree = TREE
    require_model = staticmethod(require_module)
    is_in_backward = staticmethod(is_in_backward)
    on_backward = staticmethod(on_backward)
    checkpoint_wrapper = staticmethod(checkpoint_wrapper)
    swap_wrapper = staticmethod(swap_wrapper)
    apply_plan = staticmethod(apply_plan)
    apply_rules = staticmethod(apply_rules)

    def meter(self, model: nn.Module) -> Any | None:  # planning's Meter
        """See the protocol."""
        device = device_of(model, "record")
        is_simulated = SwapManager().backends.get(("torch simulated", device.type)) is not None
        return None if device.type == "cpu" and not is_simulated else meter_for(device, who="record")

    def gradients(self, model: nn.Module, result: Any) -> Iterable[tuple[str, Any]]:
        """See the protocol. Of a sharded gradient it is the part that is here."""
        for name, parameter in model.named_parameters():
            gradient: Any = None if parameter.grad is None else parameter.grad.detach()
            yield name, getattr(gradient, "_local_tensor", gradient)

    def bytes_of(self, gradient: torch.Tensor) -> Any:  # numpy.ndarray
        """See the protocol."""
        return gradient.cpu().contiguous().flatten().view(torch.uint8).numpy()

    def peak_parts(self, model: nn.Module, *, is_simulated: bool) -> dict[str, int]:
        """See the protocol."""
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return {"weights": _bytes_of(parameters), "gradients": _bytes_of(gradients)}


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


FRAMEWORK: Final = TorchObserved()
