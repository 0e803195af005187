"""Draws programs. One generator, two sources of choices: a fast random one for long runs, hypothesis for shrinking."""

from __future__ import annotations

import dataclasses
from typing import Any

from fuzz.choices import Choices, HypothesisChoices, RandomChoices, chance, settings_of
from fuzz.program import Action, Op, Policy, Program, Span, Tensor
from fuzz.territory import POLICIES, TERRITORIES, WIDE, Territory
from fuzz.vocabulary import SPECS

__all__ = ["Choices", "HypothesisChoices", "RandomChoices", "generate", "program_number"]

_KEYWORDS = ("debug", "early_stop", "function", "preserve_rng_state", "determinism_check")
"""Of torch's checkpoint; at a wrapper's call they are the module's."""


class _Draft:
    """One program in the making."""

    def __init__(self, choices: Choices, territory: Territory) -> None:
        self.choices = choices
        self.territory = territory
        self.left = choices.integer(2, 18)  # operations
        self.families = territory.families if chance(choices, 45) else territory.calm_families
        self.spans_left = choices.integer(1, 6)

    def rarely(self, options: tuple[str, ...]) -> str:
        """One of the options, where the territory has them."""
        percent = self.territory.rare_percent
        return self.choices.one_of(options) if percent and chance(self.choices, percent) else "none"

    def ref(self) -> int:
        """Mostly recent values, sometimes far back."""
        return self.choices.one_of((0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 5, 9))

    def outs(self) -> tuple[int, ...]:
        """Mostly all that is there, so that backward wants it; sometimes a few, so that branches are dead."""
        newest = self.choices.one_of((12, 12, 12, 6, 3, 0, 0))
        return tuple(range(newest)) or tuple(self.ref() for _ in range(self.choices.one_of((1, 2, 3))))

    def body(self, depth: int, longest: int) -> tuple[Op | Span, ...]:
        nodes: list[Op | Span] = []
        while len(nodes) < longest and (self.left > 0 or len(nodes) < 2):
            if self.spans_left and depth < 3 and chance(self.choices, 35):
                self.spans_left -= 1
                nodes.append(self.span(depth))
            else:
                nodes.append(self.op())
        return tuple(nodes)

    def op(self) -> Op:
        self.left -= 1
        name = self.choices.one_of(self.choices.one_of(self.families))
        spec = SPECS[name]
        return Op(
            name=name,
            ins=tuple(self.ref() for _ in range(spec.ins)),
            weights=tuple(self.choices.integer(0, 3) for _ in spec.weights),
            number=self.choices.integer(0, 3) if spec.has_number else 0,
        )

    def span(self, depth: int) -> Span:
        choices = self.choices
        kind = choices.one_of(self.territory.span_kinds)
        is_checkpoint = kind.startswith("checkpoint")
        return Span(
            kind=kind,
            body=self.body(depth + 1, choices.one_of((3, 2, 1, 4, 6, 8))),
            outs=choices.one_of(((0,), (0,), (0, 1), (0, 1, 2), (self.ref(),), (0, self.ref(), self.ref()))),
            form=choices.one_of(("tuple", "list", "dict")),
            passing=choices.one_of(("args", "args", "kwargs", "nested")),
            calls=choices.one_of((1, 1, 1, 2)),
            swap_inputs=is_checkpoint and chance(choices, 50),
            policy=self.policy() if is_checkpoint and chance(choices, self.territory.policy_percent) else None,
            tensor_policy="none"
            if is_checkpoint
            else choices.one_of(("none", "none", "none", "none", "none", "save_even", "all_save")),
            early_stop=not chance(choices, 10),
            config=self.config() if chance(choices, 10) else (),
            **(self.call() if kind.endswith("_wrapper") else {}),
        )

    def call(self) -> dict[str, str]:
        """How a wrapper is called, where the territory has more than one way."""
        percent = self.territory.call_percent
        if not percent:
            return {"module": self.rarely(("module", "forward_hook", "backward_hook"))}
        choices = self.choices
        module = choices.one_of(("module", "other_weights", "weights_inside")) if chance(choices, percent) else "none"
        keyword = f"{choices.one_of(_KEYWORDS)}={choices.one_of(('True', 'False', 'C[0]'))}"
        return {"module": module, "keyword": keyword if chance(choices, percent) else "none"}

    def region(self, body: tuple[Op | Span, ...]) -> Span:
        """One recomputed region around all of it, or around its first nodes alone, so that no op outside raises first."""
        choices = self.choices
        kind = choices.one_of(("checkpoint_wrapper", "checkpoint"))
        return Span(
            kind=kind,
            body=body[: choices.one_of((1, 2, 20))],
            outs=self.outs(),
            swap_inputs=chance(choices, 50),
            policy=self.policy() if chance(choices, self.territory.policy_percent) else None,
            early_stop=not chance(choices, 10),
            **(self.call() if kind.endswith("_wrapper") else {}),
        )

    def policy(self) -> Policy:
        choices = self.choices
        form = choices.one_of(("function", "list", "bools", "cycle", "function"))
        names = {choices.one_of(self.territory.policy_ops) for _ in range(choices.integer(0, 10))}
        table = tuple((name, choices.one_of(POLICIES)) for name in sorted(names))
        return Policy(form=form, table=table, otherwise=choices.one_of(POLICIES[::-1]))

    def config(self) -> tuple[tuple[str, Any], ...]:
        choices = self.choices
        return (
            ("min_bytes", choices.one_of((0, 16, 64))),
            ("tail_bytes", choices.one_of((0, 64, 1024))),
            ("window_bytes", choices.one_of((0, 64, 4096))),
            ("prefetch_bytes", choices.one_of((0, 64, 4096))),
        )


def _tensors(choices: Choices) -> dict[str, tuple[Tensor, ...]]:
    rows = choices.one_of((3, 2, 1, 5, 16, 3, 2, 1, 5, 16, 0))
    columns = choices.one_of((4, 2, 1, 8, 32))
    usual = choices.one_of(("float32", "float32", "float64", "bfloat16"))

    def dtype() -> str:
        return choices.one_of((usual,) * 6 + ("float32", "float64", "bfloat16"))

    def shape() -> tuple[int, ...]:
        return choices.one_of(((columns, columns), (2 * columns, columns), (columns, 2 * columns), (columns,)))

    def tensor(of: tuple[int, ...], frozen_percent: int) -> Tensor:
        return Tensor(shape=of, dtype=dtype(), requires_grad=not chance(choices, frozen_percent))

    return {
        "weights": tuple(tensor(shape(), 20) for _ in range(choices.integer(1, 4))),
        "inputs": tuple(tensor((rows, columns), 15) for _ in range(choices.integer(1, 2))),
        "constants": (Tensor(shape=(rows, columns), dtype=dtype(), requires_grad=False),),
    }


# ---------------------------------------------------------------- schedules


def _f(batch: int) -> Action:
    return Action(kind="forward", batch=batch)


def _b(batch: int, retain: bool = False) -> Action:
    return Action(kind="backward", batch=batch, retain=retain)


def _schedule(choices: Choices) -> tuple[tuple[Action, ...], ...]:
    at = choices.integer(0, 25)
    eval_, drop, edit, step = (Action(kind=kind) for kind in ("eval", "drop", "edit", "step"))
    threads: tuple[tuple[Action, ...], ...] = choices.one_of(
        (
            ((_f(0), _b(0)),),
            ((_f(0), _b(0), step, _f(1), _b(1), step, _f(0), _b(0)),),
            ((_f(0), _b(0), _f(1), _b(1), step, _f(2), _b(2)),),
            ((_f(0), _f(1), _b(0), _b(1)),),
            ((_f(0), _f(1), _b(1), _b(0)),),
            ((_f(0), _f(1), _b(0), _f(2), _b(1), _f(3), _b(2), _b(3)),),
            ((_f(0), _b(0, True), _b(0)),),
            ((_f(0), _b(0, True), _f(1), _b(0, True), _b(1), _b(0)),),
            ((_f(0), Action(kind="grad", at=at, retain=True), _b(0)),),
            ((_f(0), Action(kind="grad", at=at, retain=True), Action(kind="grad", at=at + 1), _f(0), _b(0)),),
            ((_f(0), Action(kind="double"), step, _f(1), _b(1)),),
            ((_f(0), drop, _f(1), _b(1)),),
            ((_f(0), _f(0), _b(0)),),
            ((_f(0), eval_, _b(0)),),
            ((_f(0), edit, _b(0)),),
            ((Action(kind="fail_forward", at=at), _f(0), _b(0), step, _f(1), _b(1)),),
            ((_f(0), Action(kind="fail_forward", batch=1, at=at), _b(0), _f(1), _b(1)),),
            ((_f(0), Action(kind="fail_backward", at=at), _f(0), _b(0), step, _f(1), _b(1)),),
            ((_f(0), Action(kind="fail_backward", at=at, retain=True), _b(0), _f(1), _b(1)),),
            ((_f(0), _b(0), step, _f(1), _b(1)), (_f(0), _f(1), _b(1), _b(0))),
            ((_f(0), _b(0, True), _b(0)), (_f(0), Action(kind="grad", at=at, retain=True), _b(0))),
        )
    )
    return threads


_DOUBLE = Action(kind="double")
_DOUBLES: tuple[tuple[Action, ...], ...] = (
    (_f(0), _DOUBLE),
    (_f(0), _DOUBLE, Action(kind="step"), _f(1), _DOUBLE, Action(kind="step"), _f(0), _b(0)),
    (_f(0), _b(0, True), _DOUBLE, _f(1), _b(1)),
    (_f(0), _f(1), _DOUBLE, Action(kind="double", batch=1)),
    (_f(0), Action(kind="grad", retain=True), _DOUBLE, Action(kind="step"), _f(0), _DOUBLE),
)


def _weight_changes(choices: Choices) -> tuple[Action, ...]:
    """A schedule that changes a weight in place. After the first error by name a run ends."""
    change = Action(kind="change_weight", at=choices.integer(0, 25))
    step = Action(kind="step")
    schedules: tuple[tuple[Action, ...], ...] = (
        (_f(0), change, _b(0)),
        (_f(0), _b(0), step, _f(1), change, _b(1)),
        (_f(0), _f(1), change, _b(1)),
        (_f(0), change, _f(1), _b(1), _b(0)),
        (_f(0), _b(0, True), change, _b(0)),
        (_f(0), change, _f(0), _b(0)),
    )
    return choices.one_of(schedules)


def generate(choices: Choices, territory: Territory = WIDE) -> Program:
    """One program."""
    draft = _Draft(choices, territory)
    is_wild = chance(choices, 10)
    body = draft.body(0, 20)
    if territory.autocast_percent and chance(choices, territory.autocast_percent):
        body = (Span(kind="autocast", body=body),)
    program = Program(
        body=body,
        outs=draft.outs(),
        threads=_schedule(choices),
        settings=settings_of(choices),
        seed=choices.integer(0, 99),
        is_wild=is_wild,
        **_tensors(choices),
    )
    if territory.double_percent and chance(choices, territory.double_percent):
        program = dataclasses.replace(program, threads=(choices.one_of(_DOUBLES),))
    if territory.weight_percent and chance(choices, territory.weight_percent):
        program = dataclasses.replace(program, threads=(_weight_changes(choices),), is_wild=False)
        if chance(choices, 60):
            program = dataclasses.replace(program, body=(draft.region(program.body),))
    return _with_rare_parts(program, draft) if territory.rare_percent else program


def _with_rare_parts(program: Program, draft: _Draft) -> Program:
    weights = tuple(
        dataclasses.replace(
            weight, is_parameter=draft.rarely(("leaf",)) == "none", hook=draft.rarely(("tensor", "accumulated"))
        )
        for weight in program.weights
    )
    at = draft.choices.integer(0, 25)
    both = Action(kind="both", at=at)
    shared = ((_f(0), both, _b(0)), (_f(0), _f(1), both, _b(1), both, _b(0)))
    threads = program.threads if draft.rarely(("both",)) == "none" else (draft.choices.one_of(shared),)
    return dataclasses.replace(program, weights=weights, threads=threads)


def program_number(seed: int, number: int, territory: str = "wide") -> Program:
    """The ``number``-th program of a long run with this seed."""
    return generate(RandomChoices(seed * 1_000_000_007 + number), TERRITORIES[territory])
