"""Runs a program with and without us and judges the difference.

Verdicts
--------
``equal``      every output, gradient and error kind is the same, bitwise. Where an error is planned inside a recompute, or
               something is changed in place: the same as under hooks that keep every value, or with tensors by position,
               because any hooks and the way arguments come move when and how often torch recomputes, and what it notices.
``guarded``    we raise InPlaceChangeError where torch's own check raises for the bare program, and its checkpoint hides it or
               raises elsewhere.
``refused``    we raise InPlaceChangeError where the run without us is right. Promised only as the lesser evil, and good only
               where the program changes something in place.
``exact``      torch's own run raises or is wrong (its checkpoint replays a change twice), and our numbers are those of
               the same program with every saved value copied at the moment it was saved.
``unjudged``   torch's own checkpoint hides a change in place that the bare program raises for, and either an error is planned
               inside the recompute, which the exact run does not have, or the program has state, which torch's checkpoint
               changes twice; or two runs without us differ. There is nothing to compare with.
``mismatch``   anything else, and anything that a run leaves behind. Where every region ran from a tape, also effects of forward
               (counters, caches, prints, buffers) that are not those of a run that recomputes nothing. Where the schedule
               changes a weight before backward, also what is equal to torch's checkpoint, which recomputes with the changed
               weight, and neither right nor an error by name.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any

import torch

import hyper_parallel
from fuzz import doors, effects, harness, rare
from fuzz.program import OURS, RECOMPUTED, Program, Span, ops_of, spans_of
from fuzz.source import program_to_source
from fuzz.vocabulary import EFFECTS, FUNCTIONS, SPECS, STATE

__all__ = ["Verdict", "features_of", "judge", "signature"]

_GOOD = ("equal", "refused", "guarded", "exact", "unjudged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of one program."""

    kind: str
    detail: str = ""
    features: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether every promise was kept."""
        return self.kind in _GOOD


def compiled(program: Program, device: str = "cpu") -> dict[str, Any]:
    """The names that the program's source defines."""
    names = {
        **vars(doors),
        **FUNCTIONS,
        "State": rare.State,
        "Effects": effects.Effects,
        "torch": torch,
        "DEVICE": device,
    }
    exec(compile(program_to_source(program), "<fuzzed program>", "exec"), names)
    return names


def judge(program: Program, device: str = "cpu") -> Verdict:
    """Run it and say what came of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = compiled(program, device)
        reference = harness.run_once(names, doors.Plain(), device)
        ours = harness.run_once(names, hyper_parallel, device)
        verdict = _compare_effects(names, ours, device)
        names["LOGS_EFFECTS"] = False
        for outcome in (reference, ours):
            outcome.entries = harness.without_effects(outcome.entries)
        if verdict is None:
            verdict = _compare(program, names, reference, ours, device)
    return dataclasses.replace(verdict, features=tuple(sorted({*features_of(program), *_observed(reference, ours)})))


def _compare_effects(names: dict[str, Any], ours: Any, device: str) -> Verdict | None:
    """What forward left behind, against a run that recomputes nothing: torch's own checkpoint repeats every effect."""
    found = harness.effects_among(ours.entries)
    has_raised = any(value == "in-place" for _, value in ours.entries)  # and ended the schedule there
    if not found or has_raised or not harness.effects_happen_once(ours.facts):
        return None
    wanted = harness.effects_among(harness.run_once(names, doors.Plain("exact"), device).entries)
    expected, got = _first_difference(wanted, found)
    if expected == got:
        return None
    return Verdict(kind="mismatch", detail=f"without us {harness.shown(expected)}\nwith us    {harness.shown(got)}")


def _compare(program: Program, names: dict[str, Any], reference: Any, ours: Any, device: str) -> Verdict:
    # Where no door of ours is used, what is left is torch's own.
    is_ours = any(span.kind in OURS for span in spans_of(program.body))
    faults = harness.faults_of(names, reference, ours, device) if is_ours else []
    if faults:
        return Verdict(kind="mismatch", detail="; ".join(faults))
    expected, got = _first_difference(reference.entries, ours.entries)
    if harness.changes_a_weight(names) and not harness.is_right_until_it_raises(names, ours, device):
        is_repeated = harness.run_once(names, doors.Plain(), device).entries == reference.entries
        detail = f"neither right nor an error by name; first difference: with us {harness.shown(got)}"
        return Verdict(kind="mismatch" if is_repeated else "unjudged", detail=detail)
    if expected == got:
        return Verdict(kind="equal")
    detail = f"without us {harness.shown(expected)}\nwith us    {harness.shown(got)}"
    if any(str(entry[1]).startswith(("ours:", "unexpected:")) for entry in ours.entries if isinstance(entry[1], str)):
        return Verdict(kind="mismatch", detail=detail)
    bare = harness.run_once(names, doors.Plain("bare"), device)
    is_hidden = any(
        value == "in-place" for _, value in bare.entries
    )  # torch's own check sees it, its checkpoint does not
    if got[1] == "in-place" and writes_anything(program):
        return Verdict(kind="guarded" if is_hidden else "refused", detail=detail)
    if is_hidden and bare.entries == ours.entries:
        return Verdict(kind="guarded", detail=detail)
    is_checkpointed = any(span.kind in RECOMPUTED for span in spans_of(program.body))
    plans_an_error = any(action.kind == "fail_backward" for thread in program.threads for action in thread)
    # Before the exact run, which has no recompute and so never meets the planned error: where both agree with us, the
    # answer must not depend on which is asked.
    may_be_moved = plans_an_error or writes_anything(program)
    # Torch's checkpoint keeps the random states of those devices alone that it finds among the positional arguments.
    loses_draws = device != "cpu" and any(span.passing == "kwargs" for span in spans_of(program.body))
    if is_checkpointed and (may_be_moved or loses_draws) and _equals_another_way(names, ours, device):
        return Verdict(kind="equal")
    exact = harness.run_once(names, doors.Plain("exact"), device)
    # What a backward inside forward saves is what it was handed, and that may be our copy of a value that changes later.
    may_be_exact = is_checkpointed or any(SPECS[op.name].takes_gradient for op in ops_of(program.body))
    if exact.entries == ours.entries and (may_be_exact or expected[1] != "in-place"):
        return Verdict(kind="exact", detail=detail)
    raised = next((at for at, (_, value) in enumerate(ours.entries) if value == "in-place"), None)
    if raised is not None and writes_anything(program) and exact.entries[:raised] == ours.entries[:raised]:
        return Verdict(kind="refused", detail=detail)  # and before it, right where torch's checkpoint is wrong
    has_state = any(op.name in STATE or op.name in EFFECTS for op in ops_of(program.body))
    if is_checkpointed and is_hidden and (plans_an_error or has_state):
        return Verdict(kind="unjudged", detail=detail)
    # Torch's attention on a CPU leaves parts of its output unset for some strides; two plain runs then differ.
    if harness.run_once(names, doors.Plain(), device).entries != reference.entries:
        return Verdict(kind="unjudged", detail=detail)
    return Verdict(kind="mismatch", detail=detail)


def _equals_another_way(names: dict[str, Any], ours: Any, device: str) -> bool:
    """Under hooks torch replays less often, and a tape runs no Python again: a planned error may come later, or not at all."""
    ways = (doors.Plain("alike"), doors.Plain("hooked"), doors.Plain("once"))
    return any(harness.run_once(names, way, device).entries == ours.entries for way in ways)


def signature(detail: str) -> str:
    """What two failures of the same kind have in common: the words of the last line, without numbers."""
    line = detail.splitlines()[-1] if detail else ""
    if "error" in line:
        return re.sub(r"[\d\W]+", " ", line.split("error", 1)[1])[:60]
    return re.sub(r"[\d\W]+", " ", line)[:12]


_NOTHING = ("end", None)


def _first_difference(expected: list[Any], got: list[Any]) -> tuple[Any, Any]:
    for one, other in zip(expected, got):
        if one != other:
            return one, other
    longer = max(len(expected), len(got))
    if len(expected) == len(got):
        return _NOTHING, _NOTHING
    shorter = min(len(expected), len(got))
    return (expected[shorter], _NOTHING) if longer == len(expected) else (_NOTHING, got[shorter])


def writes_anything(program: Program) -> bool:
    """Whether something is changed in place, by the model or by its caller."""
    if any(action.kind in ("edit", "change_weight") for thread in program.threads for action in thread):
        return True
    return any(SPECS[op.name].writes or set("be") & set(SPECS[op.name].weights) for op in ops_of(program.body))


def features_of(program: Program) -> set[str]:
    """What the program contains, for counting."""
    features = {f"op:{op.name}" for op in ops_of(program.body)}
    features |= {f"span:{span.kind}" for span in spans_of(program.body)}
    features |= {f"action:{action.kind}" for thread in program.threads for action in thread}
    features |= {f"timing:{program.settings.timing}", f"tiers:{'+'.join(program.settings.tiers)}"}
    features |= {f"dtype:{tensor.dtype}" for tensor in (*program.weights, *program.inputs)}
    for span in spans_of(program.body):
        features |= {f"nested:{inner.kind} in {span.kind}" for inner in span.body if isinstance(inner, Span)}
        if span.policy is not None:
            features |= {f"policy form:{span.policy.form}"}
            features |= {f"policy:{answer}" for _, answer in span.policy.table}
        features |= {f"passing:{span.passing}", f"form:{span.form}"}
        if span.kind.endswith("_wrapper"):
            features |= {f"module:{span.module}", f"keyword:{span.keyword.partition('=')[0]}"}
    features |= {f"weight hook:{weight.hook}" for weight in program.weights}
    flags = {
        "threads": len(program.threads) > 1,
        "wild": program.is_wild,
        "retain": any(action.retain for thread in program.threads for action in thread),
        "leaf that is no parameter": not all(weight.is_parameter for weight in program.weights),
        "frozen weight": not all(weight.requires_grad for weight in program.weights),
        "empty input": any(0 in tensor.shape for tensor in program.inputs),
        "capped": program.settings.host_limit is not None,
        "verify": program.settings.verify,
    }
    return features | {name for name, is_set in flags.items() if is_set}


def _observed(reference: Any, ours: Any) -> set[str]:
    """What happened, for counting."""
    seen = {f"error:{value.split(':')[0]}" for _, value in reference.entries if isinstance(value, str)}
    backwards = (" backward ", " grad ", " double ")
    if any(value.__class__ is tuple and any(word in label for word in backwards) for label, value in reference.entries):
        seen.add("did:backward")
    facts = ours.facts
    if facts is None:
        return seen
    for name in (
        "swapped_out_bytes",
        "swapped_in_bytes",
        "prefetch_hits",
        "misses",
        "shared_copies",
        "recomputed_bytes",
    ):
        if getattr(facts, name):
            seen.add(f"did:{name}")
    return seen | {f"kept:{reason}" for reason in facts.kept_count} | {f"replayed:{why}" for why in facts.replayed_ops}
