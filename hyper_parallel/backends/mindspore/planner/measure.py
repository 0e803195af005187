"""What a step really takes on MindSpore, as the model is now, and the identity of a step."""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mindspore

from hyper_parallel._version import __version__
from hyper_parallel.backends.mindspore.planner.blocks import TREE, device_of, require_cell
from hyper_parallel.backends.mindspore.planner.meters import meter_for
from hyper_parallel.backends.mindspore.planner.survey import find_blocks_of_step, surveyed
from hyper_parallel.backends.mindspore.planner.trial_guard import restored_after
from hyper_parallel.backends.planning.blocks import fingerprint_of
from hyper_parallel.backends.planning.engine_settings import settings_of_plans
from hyper_parallel.backends.planning.links import HostProbe
from hyper_parallel.backends.planning.measure import incomplete, measure
from hyper_parallel.backends.planning.survey import Survey, require_step
from hyper_parallel.config import current_config
from hyper_parallel.planner.step_identity import StepIdentity
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.records.step_measure import StepMeasure

__all__ = ["identify_step", "link_probe", "measure_step"]


def link_probe(model: Any, *, who: str) -> HostProbe:
    """See ``planner.backend``."""
    require_cell(model, who)
    return HostProbe()


def measure_step(
    model: Any,
    step: Callable[[], Any],
    *,
    steps: int = 3,
    warmup: int = 2,
    is_guarded: bool = False,
    blocks: Sequence[str] = (),
) -> StepMeasure:
    """Run the step a few times and leave no trace; or leave that to a caller who guards the whole.

    The peak of each moment is not measured here, so that ``blocks`` says nothing.
    """
    who = "measure_step"
    require_cell(model, who)
    require_step(step, who)
    meter = meter_for(device_of(model, who), who=who)
    try:
        with contextlib.nullcontext() if is_guarded else restored_after(model, who=who):
            return measure(step, meter, steps=steps, warmup=warmup)
    except Exception as error:
        if not meter.is_out_of_memory(error):
            raise
        compat.end_failed_gradient()
    return incomplete(meter)


def identify_step(
    model: Any, step: Callable[[], Any], *, blocks: str | Sequence[str] | None = None
) -> StepIdentity | None:
    """Run one step and write down what it is; None where not even that fits on the device."""
    who = "fit_memory"
    require_cell(model, who)
    require_step(step, who)
    found = find_blocks_of_step(model, blocks, step, who=who)
    meter = meter_for(device_of(model, who), who=who)
    with restored_after(model, who=who):
        try:
            with surveyed(model, found) as survey:
                step()
        except Exception as error:
            if not meter.is_out_of_memory(error):
                raise
            compat.end_failed_gradient()
            meter.release_cached()
            return None
        gc.collect()
        meter.wait()
        base_bytes = meter.active_bytes()
    survey.check(who, found)
    device = f"{meter.device_name}, {meter.total_bytes()} bytes"
    return StepIdentity(facts=tuple(_facts(model, device, survey)), base_bytes=base_bytes)


def _facts(model: Any, device: str, survey: Survey) -> list[str]:
    config = current_config()
    return [
        f"library: {__version__}",
        f"mindspore: {mindspore.__version__}",
        f"device: {device}",
        f"settings: {settings_of_plans(config)}",
        f"model: {type(model).__name__} {fingerprint_of(TREE, model)}, values {_digest(_values(model))}",
        f"inputs: {', '.join(map(_shown, survey.inputs.tensors)) if survey.inputs is not None else 'none'}",
        f"calls: {len(survey.calls)} of blocks, {_digest(_calls(survey))}",
    ]


def _shown(shape: Any) -> str:
    return f"{shape} {shape.dtype}"


def _values(model: Any) -> Iterable[str]:
    """Which parameters are trained, and the buffers."""
    for path, parameter in TREE.named_parameters(model):
        yield f"{path} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
    for path, cell in TREE.named(model):
        for name, buffer in cell._buffers.items():
            if buffer is not None:
                yield f"{path}.{name} {tuple(buffer.shape)} {buffer.dtype}"


def _calls(survey: Survey) -> Iterable[str]:
    """Every call of a block: what it was given, and which ops it ran, as a set."""
    for call, shapes in zip(survey.calls, survey.shapes):
        ops = sorted({f"{op.module}::{op.name}" for op in call.ops})
        yield f"{call.block} {', '.join(map(_shown, shapes))} {' '.join(ops)}"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
