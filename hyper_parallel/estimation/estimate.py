"""``estimate``: how much each way would gain, before anything is installed, built or run.

The expected errors are those of ``benchmarks/results/estimate_202611.md``, where estimates are compared with measured steps: the
largest error of the steps that the device limits, rounded up. A test holds them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from hyper_parallel.config import parse_bytes, show_bytes
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.estimation import ways
from hyper_parallel.estimation.cards import Card, card_named
from hyper_parallel.estimation.config_file import shape_from_config, shape_from_file
from hyper_parallel.estimation.shape import ModelShape, near_misses
from hyper_parallel.estimation.step_model import StepModel

__all__ = [
    "ERRORS",
    "OPTIMIZERS",
    "USABLE_SHARE",
    "Estimate",
    "ExpectedErrors",
    "WayEstimate",
    "estimate",
    "summary_rows",
]

USABLE_SHARE: Final = 0.9
"""Of the card's memory, as for ``fit_memory(..., "auto")``: the rest is the allocator's reserve."""
OPTIMIZERS: Final[Mapping[str, float]] = {"adamw": 2.0, "adamw-fp32": 0.0, "adamw-8bit": 0.0, "sgd": 0.0, "none": 0.0}
"""States for each trained weight, in items of its dtype; ``adamw-fp32`` keeps 12 bytes (a float32 copy of the weight beside two
states) and ``adamw-8bit`` 2 bytes instead."""
_STATE_BYTES: Final[Mapping[str, float]] = {"adamw-fp32": 12.0, "adamw-8bit": 2.0}
_ITEM_BYTES: Final[Mapping[str, int]] = {"bf16": 2, "fp16": 2, "bfloat16": 2, "float16": 2}
_MOST_TOKENS: Final = 2**30
_SEQUENCE_STEP: Final = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedErrors:
    """By how much an estimate may be wrong, as shares of the measured number."""

    memory: float
    seconds: float
    ratio: float


ERRORS: Final[Mapping[str, ExpectedErrors]] = {
    "compared": ExpectedErrors(memory=0.10, seconds=0.15, ratio=0.10),
    "adapters": ExpectedErrors(memory=0.10, seconds=0.25, ratio=0.20),
    "fused kernels": ExpectedErrors(memory=0.15, seconds=0.15, ratio=0.10),
    "experts": ExpectedErrors(memory=0.10, seconds=0.35, ratio=0.15),
    "launch-bound": ExpectedErrors(memory=0.20, seconds=0.75, ratio=0.50),
    "another card": ExpectedErrors(memory=0.10, seconds=0.40, ratio=0.20),
}
"""``compared``: every step. The others add to it where their name applies; ``another card`` is a guess."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WayEstimate:
    """One way of keeping activations."""

    name: str
    how: str
    """What to write for it."""
    activation_bytes: int
    peak_bytes: int
    """With weights, gradients and optimizer states."""
    host_bytes: int
    """Of host memory that swapped values take."""
    step_seconds: float
    """Forward and backward."""
    ratio: float
    """To the plain step."""
    fits: bool
    longest_sequence: int
    """At this batch, in steps of 128 tokens; 0: none fits."""
    largest_batch: int
    """At this sequence; 0: none fits."""
    errors: ExpectedErrors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one step would take, in every way. Printed, it is a table."""

    shape: ModelShape
    tokens: int
    batch: int
    card: Card
    optimizer: str
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    ways: tuple[WayEstimate, ...]
    notes: tuple[str, ...]

    def way(self, name: str) -> WayEstimate:
        """One way by its name: ``plain``, ``recompute``, ``inputs``, ``swap`` or ``plan``."""
        for one in self.ways:
            if one.name == name:
                return one
        known = [one.name for one in self.ways]
        raise KeyError(f"estimate: there is no way {name!r}; known are {', '.join(known)}{near_misses(name, known)}")

    @property
    def fixed_bytes(self) -> int:
        """Weights, gradients and optimizer states."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    def to_json(self) -> dict[str, Any]:
        """Numbers and words only, with a schema number."""
        return {"schema": 1, **dataclasses.asdict(self), "fixed_bytes": self.fixed_bytes}

    def summary(self) -> str:
        """The table and its notes, as plain text."""
        heads, rows = summary_rows(self)
        widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
        lines = [
            "  ".join(
                cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))
            )
            for row in (heads, *rows)
        ]
        return "\n".join([*(line.rstrip() for line in lines), *self.notes])

    def __str__(self) -> str:
        return self.summary()


def estimate(
    model: ModelShape | Mapping[str, Any] | str | os.PathLike[str],
    *,
    tokens: int,
    batch: int = 1,
    card: Card | str = "h200",
    dtype: str = "bf16",
    optimizer: str = "adamw",
    lora_rank: int | None = None,
    has_float32_adapters: bool | None = None,
    kernels: str | None = None,
    budget: int | str | None = None,
) -> Estimate:
    """How much memory and time a training step would take, plain and with this library. Nothing is run.

    Args:
        model: a :class:`ModelShape`, a Hugging Face ``config.json`` (its path, its folder or its content).
        tokens: of one sequence.
        batch: sequences in a step.
        card: a name from the table of cards (``h200``, ``a100-80gb``, ``rtx-4090``, ...) or a :class:`Card`.
        dtype: ``bf16`` or ``fp16``, of weights and activations.
        optimizer: ``adamw`` (two states in the weights' dtype), ``adamw-fp32``, ``adamw-8bit``, ``sgd`` or ``none``.
        lora_rank: adapters of this rank on every linear, other weights frozen; 0 or None: all weights are trained.
        has_float32_adapters: PEFT's default for LoRA; False: ``autocast_adapter_dtype=False``. None: as the shape says.
        kernels: ``transformers``, ``torch`` or ``liger``: which kernels run norms, activation and loss.
        budget: the peak that the plan must keep, weights included, such as ``"20GiB"``; None: the peak of ``recompute``.

    Returns:
        Memory, step time, longest sequence and largest batch of every way, and the expected errors.

    Raises:
        ValueError, TypeError: a setting that cannot be; near misses are shown.
        BudgetTooSmallError: no way stays below the budget.
        OSError: the config file cannot be read.
    """
    shape = _shape_of(model, lora_rank=lora_rank, has_float32_adapters=has_float32_adapters, kernels=kernels)
    for name, value in (("tokens", tokens), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"estimate: {name} must be a whole number, got {value!r}")
        if not 1 <= value <= _MOST_TOKENS:
            raise ValueError(f"estimate: {name} is {value}; it must be 1 or more, and at most {_MOST_TOKENS}")
    item_bytes = _choice("dtype", dtype, _ITEM_BYTES, " float32 steps were not measured, so they are not estimated.")
    adapter_item = 4 if shape.has_float32_adapters else item_bytes
    states = _choice("optimizer", optimizer, OPTIMIZERS, "") * adapter_item + _STATE_BYTES.get(optimizer, 0.0)
    chosen = card if isinstance(card, Card) else card_named(card)
    step = StepModel(shape=shape, tokens=tokens, batch=batch, card=chosen, item_bytes=item_bytes)
    trained = shape.trained_parameters
    sizes = _Sizes(
        weights=item_bytes * shape.parameters + adapter_item * shape.adapter_parameters,
        gradients=adapter_item * trained,
        states=int(states * trained),
    )
    allowed = None if budget is None else parse_bytes(budget, name="estimate: budget")
    found = _ways_of(step, sizes, allowed)
    return Estimate(
        shape=shape,
        tokens=tokens,
        batch=batch,
        card=chosen,
        optimizer=optimizer,
        weight_bytes=sizes.weights,
        gradient_bytes=sizes.gradients,
        optimizer_bytes=sizes.states,
        ways=found,
        notes=_notes(step, found),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    weights: int
    gradients: int
    states: int

    @property
    def all(self) -> int:
        return self.weights + self.gradients + self.states


def _shape_of(model: Any, **changes: Any) -> ModelShape:
    if isinstance(model, ModelShape):
        shape = model
    elif isinstance(model, str | os.PathLike):
        shape = shape_from_file(model)
    elif isinstance(model, Mapping):
        shape = shape_from_config(model)
    else:
        raise TypeError(f"estimate: model must be a ModelShape or a Hugging Face config, got {type(model).__name__}")
    return dataclasses.replace(shape, **{name: value for name, value in changes.items() if value is not None})


def _choice(name: str, word: Any, known: Mapping[str, Any], reason: str) -> Any:
    if word not in known:
        raise ValueError(
            f"estimate: unknown {name} {word!r}; known are {', '.join(known)}{near_misses(word, known, otherwise='.')}{reason}"
        )
    return known[word]


def _ways_of(step: StepModel, sizes: _Sizes, budget: int | None) -> tuple[WayEstimate, ...]:
    plain = ways.kept(step)
    swapped = ways.swapped(step)
    at = sizes.all + ways.recomputed(step).activation_bytes if budget is None else float(budget)
    shown = f'"{math.ceil(10 * at / 2**30) / 10}GiB"' if budget is None else str(budget)
    plan = ways.planned(step, at - sizes.all)
    if plan is None:
        raise _too_small(at, sizes, sizes.all + ways.smallest_plan(step))
    of_swap = f"hp.swap_wrapper(layer) on the first {swapped.layers_swapped} of {step.shape.layers} layers"
    rows: tuple[tuple[str, str, ways.Outcome, Callable[[StepModel], float]], ...] = (
        ("plain", "nothing", plain, _least(ways.kept)),
        ("recompute", "hp.checkpoint_wrapper(layer)", ways.recomputed(step), _least(ways.recomputed)),
        (
            "inputs",
            "hp.checkpoint_wrapper(layer, swap_inputs=True)",
            ways.inputs_swapped(step),
            _least(ways.inputs_swapped),
        ),
        ("swap", of_swap if swapped.layers_swapped else "the link hides no whole layer", swapped, _least(ways.swapped)),
        ("plan", f"hp.fit_memory(model, step, {shown})", plan, ways.smallest_plan),
    )
    usable = USABLE_SHARE * step.card.memory_bytes
    return tuple(
        WayEstimate(
            name=name,
            how=how,
            activation_bytes=int(outcome.activation_bytes),
            peak_bytes=int(sizes.all + outcome.activation_bytes),
            host_bytes=int(outcome.host_bytes),
            step_seconds=outcome.seconds,
            ratio=outcome.seconds / plain.seconds,
            fits=sizes.all + outcome.activation_bytes <= usable,
            longest_sequence=_longest(step, least, usable - sizes.all),
            largest_batch=_largest(step, least, usable - sizes.all),
            errors=_errors_of(name, cases_of(step)),
        )
        for name, how, outcome, least in rows
    )


def _too_small(budget: float, sizes: _Sizes, least: float) -> BudgetTooSmallError:
    error = BudgetTooSmallError(
        f"estimate: {show_bytes(budget)} cannot hold this step; the smallest peak estimated is {show_bytes(least)} (weights, "
        f"gradients and optimizer states {show_bytes(sizes.all)}). Raise the budget, or shorten the sequence."
    )
    error.smallest_peak_bytes = int(least)
    return error


def _errors_of(way: str, cases: tuple[str, ...]) -> ExpectedErrors:
    """Of one way. Whole layers swapped as far as the link hides them were never compared with a measured step."""
    applying = [ERRORS[case] for case in cases]
    ratio = max(errors.ratio for errors in applying)
    return ExpectedErrors(
        memory=max(errors.memory for errors in applying),
        seconds=max(errors.seconds for errors in applying),
        ratio={"plain": 0.0, "swap": 2 * ratio}.get(way, ratio),
    )


def _least(way: Callable[[StepModel], ways.Outcome]) -> Callable[[StepModel], float]:
    return lambda step: way(step).activation_bytes


def _longest(step: StepModel, least: Callable[[StepModel], float], most_bytes: float) -> int:
    """The longest sequence, at the step's batch, in steps of 128 tokens."""

    def fits(count: int) -> bool:
        return least(dataclasses.replace(step, tokens=count * _SEQUENCE_STEP)) <= most_bytes

    return _SEQUENCE_STEP * _last_that_fits(fits)


def _largest(step: StepModel, least: Callable[[StepModel], float], most_bytes: float) -> int:
    """The largest batch of the step's sequences."""
    return _last_that_fits(lambda count: least(dataclasses.replace(step, batch=count)) <= most_bytes)


def _last_that_fits(fits: Callable[[int], bool]) -> int:
    """The last number from 1 on that fits while the one after it does not; 0 where 1 does not fit."""
    high = 1
    while fits(high):
        high *= 2
        if high > _MOST_TOKENS:
            return _MOST_TOKENS
    low = high // 2  # fits, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def cases_of(step: StepModel) -> tuple[str, ...]:
    """Which of :data:`ERRORS` apply to a step."""
    applying = {
        "compared": True,
        "adapters": step.shape.lora_rank > 0,
        "fused kernels": step.shape.kernels == "liger",
        "experts": step.shape.experts > 0,
        "launch-bound": step.host_seconds > step.device_seconds,
        "another card": not step.card.is_measured,
    }
    return tuple(name for name, applies in applying.items() if applies)


_REASONS: Final[Mapping[str, str]] = {
    "adapters": "with adapters the host is nearly as slow as the device, and that is not modelled",
    "fused kernels": "fused kernels write over their inputs, and that is not modelled",
    "experts": "small matmuls of experts and the gathers around them are slower than large ones",
    "launch-bound": "the host issues ops more slowly than the device runs them, and hosts differ: measure this one",
    "another card": "only steps on an H200 were compared",
}


def _notes(step: StepModel, found: tuple[WayEstimate, ...]) -> tuple[str, ...]:
    plain = found[0]
    notes = [f"Plain step, forward and backward: {plain.step_seconds * 1e3:.0f} ms ±{plain.errors.seconds:.0%}."]
    notes += [f"Expected errors are larger here: {_REASONS[case]}." for case in cases_of(step) if case in _REASONS]
    if step.shape.lora_rank and not step.shape.has_float32_adapters:
        notes.append(
            "Adapters have the weights' dtype (PEFT: autocast_adapter_dtype=False). In float32, PEFT's default, every linear "
            "saves a float32 copy of its input: has_float32_adapters=True, --lora-float32."
        )
    if not any(one.fits for one in found):
        notes.append(
            f"Nothing fits {step.card.name}: shorten the sequence, lower the batch, or train fewer weights (lora_rank)."
        )
    return tuple(notes)


def summary_rows(found: Estimate) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table."""
    heads = ["way", "peak", "activations", "step", "longest", "batch"]
    return heads, [
        [
            one.name,
            show_bytes(one.peak_bytes) + ("" if one.fits else ", too much"),
            f"{show_bytes(one.activation_bytes)} ±{one.errors.memory:.0%}",
            f"{one.ratio:.2f} ±{one.errors.ratio:.0%}" if one.errors.ratio else f"{one.ratio:.2f}",
            f"{one.longest_sequence:,}" if one.longest_sequence else "none",
            f"{one.largest_batch:,}" if one.largest_batch else "none",
        ]
        for one in found.ways
    ]
