"""Runs a program with us and without us, and compares everything that a user could see, bitwise.

equal      every value, and every kind of error
flushed    every value but for less than 1e-36: in a backward that recomputes, also with MindSpore's own recompute, some kernels
           flush numbers below 1.2e-38 to zero that they keep elsewhere
refused    with us an error by name where the program writes in place, and everything before it equal
mismatch   anything else, and anything left behind: records, far memory, hooks
"""

from __future__ import annotations

import dataclasses
import gc
import random
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import mindspore
import numpy as np
from fuzz.program import Action, Program, Span, ops_of, spans_of
from mindspore import ops

import hyper_parallel as hp
from hyper_parallel.errors import InPlaceChangeError
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.testing import simulated_accelerator

from .lowering import Doors, Model, PlannedError, Tick
from .operations import SPECS

__all__ = ["Verdict", "features_of", "judge", "prepare", "signature"]

_FLUSHED = 1e-36
Entry = tuple[str, Any]  # a label, and bytes with a shape or the kind of an error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of one program."""

    kind: str
    detail: str = ""
    features: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether every promise was kept."""
        return self.kind in ("equal", "flushed", "refused")


def prepare() -> None:
    """Once in a process, before the first program."""
    mindspore.set_device("CPU")
    mindspore.runtime.launch_blocking()


# ---------------------------------------------------------------- one run


class _Run:
    """One program's schedule. Each method without an underscore is one kind of action."""

    def __init__(self, program: Program, doors: Doors) -> None:
        self._program = program
        self._tick = Tick()
        self._model = Model(program, doors, self._tick)
        self._are_ours = doors.are_ours
        self.entries: list[Entry] = []
        self._positions = tuple(range(len(program.inputs)))
        weights = self._model.trained()
        self._train = mindspore.value_and_grad(self._model, self._positions, weights)
        self._half = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)(self._model, weights)
        self._gradients: list[Any] | None = None  # of the weights, added up until the next step
        self._batches: dict[int, list[Any]] = {}
        self._waiting: dict[int, Any] = {}  # batches whose forward has run: their losses

    def perform(self) -> list[Entry]:
        """All actions; an error ends the graphs, not the schedule."""
        self._model.set_train()
        for number, action in enumerate(self._program.threads[0]):
            label = f"{number} {action.kind} {action.batch}"
            try:
                getattr(self, action.kind)(label, action)
            except Exception as error:
                self.entries.append((f"{label} error", _kind_of(error)))
                self._forget_graphs()
                if self.entries[-1][1] == "in-place":
                    break  # what was added up before it depends on where it is noticed
            finally:
                self._tick.left = None
            self.entries.extend((f"{label} state", state) for owner in self._model.owners for state in owner.state())
        self._forget_graphs()
        return self.entries

    def _forget_graphs(self) -> None:
        compat.end_failed_gradient()
        self._waiting.clear()
        self._batches.clear()

    def _batch(self, number: int) -> list[Any]:
        if number not in self._batches:
            self._batches[number] = [
                mindspore.Tensor(
                    np.random.RandomState(1000 * number + index).standard_normal(one.shape).astype(np.float32)
                )
                for index, one in enumerate(self._program.inputs)
            ]
        return self._batches[number]

    def _seed(self, number: int) -> None:
        seed = self._program.seed + number
        mindspore.set_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def _log(self, label: str, values: Any) -> None:
        self.entries.extend((f"{label} {index}", _seen(value)) for index, value in enumerate(values))

    def _take(self, label: str, gradients: Any) -> None:
        of_inputs, of_weights = gradients
        of_inputs = (of_inputs,) if isinstance(of_inputs, mindspore.Tensor) else of_inputs
        self._log(f"{label} input", of_inputs)
        self._log(f"{label} weight", of_weights)
        if self._gradients is None:
            self._gradients = list(of_weights)
        else:
            self._gradients = [one + other for one, other in zip(self._gradients, of_weights)]

    # ------------------------------------------------------------------ actions

    def train(self, label: str, action: Action) -> None:
        self._seed(action.batch)
        loss, gradients = self._train(*self._batch(action.batch))
        self._log(f"{label} out", [*self._model.seen, loss])
        self._take(label, gradients)

    def forward(self, label: str, action: Action) -> None:
        self._seed(action.batch)
        self._model.set_grad(True)
        try:
            loss = self._model(*self._batch(action.batch))
        finally:
            self._model.set_grad(False)
        self._waiting[action.batch] = loss
        self._log(f"{label} out", [*self._model.seen, loss])

    def backward(self, label: str, action: Action) -> None:
        loss = self._waiting.pop(action.batch, None)
        if loss is None:
            return
        self._model.set_grad(True)
        try:
            gradients = self._half(*self._batch(action.batch), mindspore.Tensor(np.float32(0.5)))
        finally:
            self._model.set_grad(False)
        self._take(label, gradients)

    def eval(self, label: str, action: Action) -> None:
        self._seed(action.batch)
        with compat.no_grad():
            loss = self._model(*[mindspore.Tensor(value.asnumpy()) for value in self._batch(action.batch)])
        self._log(f"{label} out", [*self._model.seen, loss])

    def drop(self, label: str, action: Action) -> None:
        self._forget_graphs()

    def step(self, label: str, action: Action) -> None:
        if self._gradients is None:
            return
        self._log(f"{label} total", self._gradients)
        for weight, gradient in zip(self._model.trained(), self._gradients):
            weight.copy_(weight - gradient * 0.01)
        self._gradients = None
        self._log(f"{label} weight", self._model.trained())

    def fail_forward(self, label: str, action: Action) -> None:
        self._tick.left, self._tick.in_backward = action.at, False
        self.train(label, action)

    def fail_backward(self, label: str, action: Action) -> None:
        """Without us nothing runs again, so that the error comes with us alone; what follows must be the same."""
        self._tick.left, self._tick.in_backward = action.at, True
        self._seed(action.batch)
        try:
            self._train(*self._batch(action.batch))
        except PlannedError:
            if not self._are_ours:
                raise
        self._forget_graphs()


def _seen(value: Any) -> Any:
    array = value if isinstance(value, np.ndarray | np.generic) else value.asnumpy()
    array = np.where(np.isnan(array), np.float32("nan"), array).astype(array.dtype)
    return array.shape, str(array.dtype), np.ascontiguousarray(array).tobytes()


def _kind_of(error: Exception) -> str:
    """What sort of error a user would see."""
    if isinstance(error, PlannedError):
        return "planned"
    if isinstance(error, InPlaceChangeError) or "modified by an inplace operation" in str(error):
        return "in-place"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _run_ours(program: Program) -> tuple[list[Entry], list[str], Any]:
    """One run on a fresh simulated device, what it left behind, and the counters."""
    hp.SwapManager().reset()
    settings = dataclasses.asdict(program.settings)
    timing, seed = settings.pop("timing"), settings.pop("seed")
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        if "disk" in settings["tiers"]:
            settings["disk_path"] = folder
        with simulated_accelerator(timing, seed=seed, **settings) as simulation:
            entries = _Run(program, Doors(are_ours=True)).perform()
            gc.collect()
            facts = hp.stats()
            faults += [str(violation) for violation in getattr(simulation, "violations", ())]
        if facts.live_records:
            faults.append(f"{facts.live_records} records outlived every graph")
        faults += [
            f"{tier.live_bytes} bytes of {tier.name} far memory are still lent"
            for tier in hp.stats().tiers
            if tier.live_bytes
        ]
    while compat.has_saved_tensors_hooks():
        faults.append("saved-tensor hooks were left on this thread")
        compat.pop_saved_tensors_hooks()
    return entries, faults, facts


# ---------------------------------------------------------------- the verdict


def judge(program: Program) -> Verdict:
    """Run it both ways and say what came of it."""
    plain = _Run(program, Doors(are_ours=False)).perform()
    try:
        ours, faults, facts = _run_ours(program)
    except Exception as error:
        compat.end_failed_gradient()
        return Verdict(kind="mismatch", detail=f"with us, at the end: {type(error).__name__}: {error}")
    features = tuple(sorted({*features_of(program), *_observed(plain, facts)}))
    verdict = _compare(program, plain, ours)
    if verdict.is_good and faults:
        verdict = Verdict(kind="mismatch", detail="; ".join(faults))
    return dataclasses.replace(verdict, features=features)


def signature(detail: str) -> str:
    """What two failures of the same kind have in common: the words of the last line, without numbers."""
    line = detail.splitlines()[-1] if detail else ""
    return re.sub(r"[\d\W]+", " ", line)[:40]


def _compare(program: Program, plain: list[Entry], ours: list[Entry]) -> Verdict:
    differences = (pair for pair in zip(plain, ours) if pair[0] != pair[1])
    expected, got = next(differences, (("end", len(plain)), ("end", len(ours))))
    if expected == got:
        return Verdict(kind="equal")
    detail = f"without us {_shown(expected)}\nwith us    {_shown(got)}"
    if len(plain) == len(ours) and all(map(_is_flushed, plain, ours)):
        return Verdict(kind="flushed", detail=detail)
    is_refused = got[1] == "in-place" and any(SPECS[op.name].writes for op in ops_of(program.body))
    return Verdict(kind="refused" if is_refused else "mismatch", detail=detail)


def _is_flushed(one: Entry, other: Entry) -> bool:
    """Whether two entries are equal, or differ by what may be lost where subnormal numbers become zero."""
    if one == other or one[0] != other[0] or not (_is_array(one[1]) and _is_array(other[1])):
        return one == other
    if one[1][:2] != other[1][:2]:
        return False
    values, others = (np.frombuffer(value[2], value[1]).astype(np.float64) for value in (one[1], other[1]))
    return bool(np.all((values == others) | (np.abs(values - others) < _FLUSHED)))


def _is_array(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], bytes)


def _shown(entry: Entry) -> str:
    label, value = entry
    if not _is_array(value):
        return f"{label}: {value!r}"[:400]
    shape, dtype, data = value
    return f"{label}: {shape} {dtype} {np.frombuffer(data, dtype)[:6].tolist()}"


def features_of(program: Program) -> Iterator[str]:
    """What the program contains, for counting."""
    yield from (f"op:{op.name}" for op in ops_of(program.body))
    for span in spans_of(program.body):
        yield f"span:{span.kind}"
        yield from (f"nested:{inner.kind} in {span.kind}" for inner in span.body if isinstance(inner, Span))
        yield f"passing:{span.passing}"
        if span.policy is not None:
            yield f"policy form:{span.policy.form}"
            yield from (f"policy:{answer}" for _, answer in span.policy.table)
    yield from (f"action:{action.kind}" for action in program.threads[0])
    yield from (f"timing:{program.settings.timing}", f"tiers:{'+'.join(program.settings.tiers)}")
    if program.settings.host_limit is not None:
        yield "capped"


def _observed(plain: list[Entry], facts: Any) -> Iterator[str]:
    """What happened, for counting."""
    yield from (f"error:{value.split(':')[0]}" for label, value in plain if label.endswith("error"))
    names = ("swapped_out_bytes", "swapped_in_bytes", "prefetch_hits", "misses", "recomputed_bytes", "saved_bytes")
    yield from (f"did:{name}" for name in names if getattr(facts, name))
