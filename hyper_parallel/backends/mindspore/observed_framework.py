"""MindSpore, as a step is observed on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import mindspore

from hyper_parallel.backends.mindspore.graph import is_in_backward
from hyper_parallel.backends.mindspore.ops import tensors_in
from hyper_parallel.backends.mindspore.planner.blocks import TREE, device_of, require_cell
from hyper_parallel.backends.mindspore.planner.meters import meter_for
from hyper_parallel.backends.mindspore.planner.plan_regions import apply_plan
from hyper_parallel.backends.mindspore.planner.rule_regions import apply_rules
from hyper_parallel.backends.mindspore.planner.survey import on_backward
from hyper_parallel.backends.mindspore.storages import storage_key
from hyper_parallel.backends.mindspore.wrappers import checkpoint_wrapper, swap_wrapper
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device import CPU

__all__ = ["FRAMEWORK", "MindSporeObserved"]


class MindSporeObserved:
    """See :class:`~hyper_parallel.backends.step_observation.framework.ObservedFramework`."""

    name = "mindspore"
    version = str(mindspore.__version__)
    rest = "activations, gradients and workspace"
    how_to_return_gradients = "have the step return what mindspore.value_and_grad gives"
    how_to_repeat = "have the step use one batch"
    tree = TREE
    require_model = staticmethod(require_cell)
    is_in_backward = staticmethod(is_in_backward)
    checkpoint_wrapper = staticmethod(checkpoint_wrapper)
    swap_wrapper = staticmethod(swap_wrapper)
    apply_plan = staticmethod(apply_plan)
    apply_rules = staticmethod(apply_rules)

    def meter(self, model: Any) -> Any | None:  # planning's Meter
        """See the protocol."""
        device = device_of(model, "record")
        is_simulated = SwapManager().backends.get(("mindspore simulated", device)) is not None
        return None if device == CPU and not is_simulated else meter_for(device, who="record")

    def on_backward(self, value: Any, callback: Callable[..., None]) -> None:
        """See the protocol. MindSpore has hooks of single tensors only."""
        called: list[bool] = []

        def once() -> None:
            if not called:
                called.append(True)
                callback()

        on_backward(value, once)

    def gradients(self, model: Any, result: Any) -> Iterable[tuple[str, Any]]:
        """See the protocol. A step returns its gradients, beside its loss or alone; one number alone is a loss."""
        tensors = tensors_in((result,))
        if any(tensor.size > 1 for tensor in tensors):
            yield from ((f"result {at}", tensor) for at, tensor in enumerate(tensors))

    def bytes_of(self, gradient: Any) -> bytes:
        """See the protocol."""
        compat.wait_for_ops()
        if gradient.dtype == mindspore.bfloat16:  # numpy has no such numbers; float32 holds each of them exactly
            gradient = gradient.astype(mindspore.float32)
        values: bytes = gradient.asnumpy().tobytes()
        return values

    def peak_parts(self, model: Any, *, is_simulated: bool) -> dict[str, int]:
        """See the protocol. The simulated device counts what ops make, which weights are not."""
        if is_simulated:
            return {}
        storages = {storage_key(one): int(one.untyped_storage().nbytes()) for one in model.get_parameters()}
        return {"weights": sum(storages.values())}


FRAMEWORK: Final = MindSporeObserved()
