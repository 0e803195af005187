"""The identity of a step on torch: everything that a fitted plan depends on.

One step is run for it, with every block replayed and its inputs swapped, which is the least memory there is: shapes and
ops are only known when they run.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel._version import __version__
from hyper_parallel.backends.planning.engine_settings import settings_of_plans
from hyper_parallel.backends.torch import native
from hyper_parallel.backends.torch.planner.blocks import device_of, fingerprint_of, require_module
from hyper_parallel.backends.torch.planner.meters import Meter, meter_for
from hyper_parallel.backends.torch.planner.module_calls import find_blocks_of_step
from hyper_parallel.backends.torch.planner.survey import Survey, require_step, surveyed
from hyper_parallel.backends.torch.planner.trial_guard import restored_after
from hyper_parallel.config import current_config
from hyper_parallel.planner.step_identity import StepIdentity
from hyper_parallel.platform.torch import compat

__all__ = ["identify_step"]


def identify_step(
    model: Any, step: Callable[[], Any], *, blocks: str | Sequence[str] | None = None
) -> StepIdentity | None:
    """Run one step and write down what it is; None where not even that fits on the device."""
    who = "fit_memory"
    require_module(model, who)
    require_step(step, who)
    found = find_blocks_of_step(model, blocks, step, who=who)
    device = device_of(model, who)
    meter = meter_for(device, who=who)
    with restored_after(model, device, who=who):
        try:
            with surveyed(model, found, who=who) as survey:
                step()
        except Exception as error:
            if not meter.is_out_of_memory(error):
                raise
            meter.release_cached()
            return None
        gc.collect()
        meter.wait()
        base_bytes = meter.active_bytes()  # with gradients, as it is between two steps that accumulate
    survey.check(who, found)
    return StepIdentity(facts=tuple(_facts(model, meter, survey)), base_bytes=base_bytes)


def _facts(model: nn.Module, meter: Meter, survey: Survey) -> list[str]:
    config = current_config()
    return [
        f"library: {__version__}",
        f"torch: {torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}",
        f"device: {meter.device_name}, {meter.total_bytes()} bytes",
        f"tapes: {'on' if native.load() is not None else 'off'}",
        f"settings: {settings_of_plans(config)}",
        f"model: {type(model).__name__} {fingerprint_of(model)}, values {_digest(_values(model))}",
        f"compiled: {', '.join(_compiled(model, survey)) or 'nothing'}",
        f"inputs: {', '.join(map(_shown, survey.inputs.tensors)) if survey.inputs is not None else 'none'}",
        f"calls: {len(survey.calls)} of blocks, {_digest(_calls(survey))}",
    ]


def _shown(shape: Any) -> str:
    return f"{shape} {shape.dtype}"


def _values(model: nn.Module) -> Iterable[str]:
    """Which parameters are trained, and the buffers."""
    for path, parameter in model.named_parameters():
        yield f"{path} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
    for path, buffer in model.named_buffers():
        yield f"{path} {tuple(buffer.shape)} {buffer.dtype}"


def _calls(survey: Survey) -> Iterable[str]:
    """Every call of a block: what it was given, and which ops it ran.

    The ops are a set: in a mixture of experts their number and their sizes depend on the data.
    """
    for call, shapes in zip(survey.calls, survey.shapes):
        ops = sorted({f"{op.module}::{op.name}.{op.overload}" for op in call.ops})
        yield f"{call.block} {', '.join(map(_shown, shapes))} {' '.join(ops)}"


def _compiled(model: nn.Module, survey: Survey) -> Iterable[str]:
    """The blocks that are compiled, and by which backend."""
    modules = dict(model.named_modules())
    for name in dict.fromkeys(call.block for call in survey.calls):
        backend = compat.compiler_name(modules[name])
        if backend is not None:
            yield f"{name} {backend}"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
