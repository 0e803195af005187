"""Which of the measured plans ``fit_memory`` answers with: a device whose bytes and seconds are written down here."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from hyper_parallel.errors import BudgetTooSmallError, SwapImpossibleError
from hyper_parallel.planner import fit
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.planning import Planning
from hyper_parallel.planner.profile import Link, Profile
from hyper_parallel.planner.simple_plans import RECOMPUTED, RECOMPUTED_SWAPPED, SWAPPED, simple_plans
from hyper_parallel.records.step_measure import StepMeasure

from .small import KIND, small_profile

Said = StepMeasure | Exception | list[StepMeasure]  # a list: one after the other

SEARCHED, ALONE = "searched", "left alone"
WAYS = {way.name for way in simple_plans(small_profile())}
AUTO = "the preset 'auto'"
FITS = 125  # below the 131 of the step left alone; the smallest searched plan needs 121


def measure(peak_bytes: int, step_seconds: float, *, is_complete: bool = True, retries: int = 0) -> StepMeasure:
    return StepMeasure(
        peak_bytes=peak_bytes,
        step_seconds=step_seconds,
        reserved_bytes=peak_bytes,
        swapped_out_bytes=0,
        exposed_copy_seconds=0.0,
        late_loads=0,
        misses=0,
        is_complete=is_complete,
        retries=retries,
    )


class Applied:
    def __init__(self, device: PaperDevice, plan: Plan) -> None:
        self.device, self.plan = device, plan

    def __enter__(self) -> Applied:
        self.device.plan = self.plan
        return self

    def __exit__(self, *exc: object) -> None:
        self.device.plan = None


class PaperDevice:
    """The framework's half of planning, with scripted measurements."""

    def __init__(self, profile: Profile, script: Mapping[str, Said]) -> None:
        self.profile, self.script = profile, script
        self.plan: Plan | None = None
        self.measured: list[str] = []
        self.steps: list[int] = []

    def world(self) -> None:
        return None

    @contextlib.contextmanager
    def guarded(self, model: Any, *, who: str) -> Iterator[None]:
        yield

    def profile_memory(self, model: Any, step: Any, **_: Any) -> Profile:
        return self.profile

    def apply_plan(self, model: Any, plan: Plan) -> Applied:
        return Applied(self, plan)

    def measure_step(self, model: Any, step: Any, *, steps: int, **_: Any) -> StepMeasure:
        assert self.plan is not None
        self.steps.append(steps)
        reason = self.plan.blocks[0].reason
        name = ALONE if self.plan.does_nothing else reason if reason in WAYS else SEARCHED
        self.measured.append(name)
        answer = self.script[name]
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def fitted(
    monkeypatch: pytest.MonkeyPatch, script: Mapping[str, Said], *, budget: int = FITS, **changes: Any
) -> tuple[Applied, PaperDevice]:
    device = PaperDevice(small_profile(**changes), script)
    monkeypatch.setattr(fit, "planner_backend", lambda: device)
    return fit.fit_memory(None, lambda: None, budget, attempts=1, steps=1), device


def script(**seconds: float) -> dict[str, StepMeasure | Exception]:
    """Everything fits; seconds by way."""
    return {
        SEARCHED: measure(FITS, seconds["searched"]),
        RECOMPUTED.name: measure(FITS - 2, seconds["recomputed"]),
        RECOMPUTED_SWAPPED.name: measure(FITS - 3, seconds["swapped"]),
        AUTO: measure(FITS - 1, seconds.get("auto", 9.0)),
        SWAPPED.name: measure(FITS - 4, seconds.get("swapped_whole", 99.0)),
    }


def test_every_block_recomputed_is_the_answer_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    applied, device = fitted(monkeypatch, script(searched=1.506, recomputed=1.300, swapped=1.350))
    assert applied.plan.blocks[0].reason == RECOMPUTED.name
    assert (applied.plan.predicted_peak_bytes, applied.plan.predicted_step_seconds) == (FITS - 2, 1.300)
    # "elementwise" comes to the searched plan here, so it is not measured again.
    assert device.measured == [SEARCHED, RECOMPUTED.name, RECOMPUTED_SWAPPED.name, AUTO, SWAPPED.name]


def test_a_preset_is_the_answer_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    applied, _ = fitted(monkeypatch, script(searched=1.5, recomputed=1.5, swapped=1.5, auto=1.2))
    assert applied.plan.blocks[0].reason == AUTO
    assert applied.plan.predicted_step_seconds == 1.2


def test_a_way_that_is_predicted_to_be_much_slower_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block more is recomputed than in the searched plan: 8 % where forward is short, a third where it is long."""
    said = script(searched=1.0, recomputed=0.5, swapped=0.5, auto=1.0)
    _, device = fitted(monkeypatch, said)
    assert RECOMPUTED.name in device.measured
    ops = tuple(dataclasses.replace(op, seconds=20 * op.seconds) for op in KIND.ops)
    _, device = fitted(monkeypatch, said, kind=dataclasses.replace(KIND, ops=ops))
    assert RECOMPUTED.name not in device.measured


def test_a_simple_plan_is_measured_with_one_step_unless_it_promises_to_be_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = script(searched=1.3, recomputed=1.35, swapped=1.25, auto=1.4)
    device = PaperDevice(small_profile(), said)
    monkeypatch.setattr(fit, "planner_backend", lambda: device)
    applied = fit.fit_memory(None, lambda: None, FITS, attempts=1, steps=4)
    assert applied.plan.blocks[0].reason == RECOMPUTED_SWAPPED.name
    assert list(zip(device.measured, device.steps)) == [
        (SEARCHED, 2),  # of the four that were asked for: a step is predicted to take a second here
        (RECOMPUTED.name, 1),
        (RECOMPUTED_SWAPPED.name, 1),
        (RECOMPUTED_SWAPPED.name, 2),
        (AUTO, 1),
        (SWAPPED.name, 1),
        (RECOMPUTED_SWAPPED.name, 2),  # the answer, applied anew
    ]


def test_an_answer_that_is_slower_when_it_is_applied_anew_gives_way_to_a_steady_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: dict[str, Said] = {**script(searched=1.5, recomputed=1.30, swapped=1.25)}
    said[RECOMPUTED_SWAPPED.name] = [measure(FITS - 3, 1.25), measure(FITS - 3, 1.45)]
    applied, device = fitted(monkeypatch, said)
    assert device.measured.count(RECOMPUTED_SWAPPED.name) == 2
    assert applied.plan.blocks[0].reason == RECOMPUTED.name
    assert applied.plan.predicted_step_seconds == 1.30


def test_an_answer_that_misses_the_budget_when_it_is_applied_anew_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, Said] = {**script(searched=1.5, recomputed=1.30, swapped=1.25)}
    said[RECOMPUTED_SWAPPED.name] = [measure(FITS, 1.25), measure(FITS + 1, 1.25)]
    applied, _ = fitted(monkeypatch, said)
    assert applied.plan.blocks[0].reason == RECOMPUTED.name


def test_an_answer_that_is_slower_anew_and_still_the_fastest_predicts_the_slower_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: dict[str, Said] = {**script(searched=1.5, recomputed=1.50, swapped=1.25)}
    said[RECOMPUTED_SWAPPED.name] = [measure(FITS - 3, 1.25), measure(FITS - 3, 1.40)]
    applied, _ = fitted(monkeypatch, said)
    assert applied.plan.blocks[0].reason == RECOMPUTED_SWAPPED.name
    assert applied.plan.predicted_step_seconds == 1.40


def test_inputs_swapped_is_the_answer_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    applied, _ = fitted(monkeypatch, script(searched=3.04, recomputed=1.5, swapped=1.40))
    assert applied.plan.blocks[0].reason == RECOMPUTED_SWAPPED.name


@pytest.mark.parametrize(("recomputed", "is_kept"), [(1.0, True), (0.995, True), (0.991, True), (0.989, False)])
def test_a_searched_plan_stays_while_it_is_within_one_per_cent(
    monkeypatch: pytest.MonkeyPatch, recomputed: float, is_kept: bool
) -> None:
    applied, _ = fitted(monkeypatch, script(searched=1.0, recomputed=recomputed, swapped=2.0))
    assert (applied.plan.blocks[0].reason not in WAYS) == is_kept


def test_a_correction_that_leads_to_the_same_plan_mends_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """13 s were predicted. The corrected plan is the same one, so it is not measured again, and keeps the parts of its peak."""
    device = PaperDevice(small_profile(), script(searched=10.0, recomputed=20.0, swapped=20.0, auto=20.0))
    device.script[SEARCHED] = measure(121, 10.0)
    monkeypatch.setattr(fit, "planner_backend", lambda: device)
    applied = fit.fit_memory(None, lambda: None, FITS, attempts=3, steps=1)
    assert device.measured.count(SEARCHED) == 1
    assert applied.plan.predicted_step_seconds == pytest.approx(10.0)
    assert applied.plan.predicted_peak_bytes == 121
    assert applied.plan.predicted.peak_where != "measured step"


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_searched_plan_that_missed_its_prediction_is_answered_with_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    device = PaperDevice(small_profile(), script(searched=1.0, recomputed=2.0, swapped=2.0))
    device.script[SEARCHED] = measure(FITS - 8, 1.0)
    monkeypatch.setattr(fit, "planner_backend", lambda: device)
    applied = fit.fit_memory(None, lambda: None, FITS, attempts=attempts, steps=1)
    assert applied.plan.blocks[0].reason not in WAYS
    assert applied.plan.predicted_peak_bytes == FITS - 8
    assert sum(applied.plan.predicted.peak_parts.values()) == FITS - 8
    assert applied.plan.predicted_step_seconds == pytest.approx(1.0)


def test_two_plans_in_a_row_that_are_no_faster_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made with corrections that swing, they would go on to swing."""
    profile = small_profile()
    first = Planning(profile).plan(FITS, None)
    plans = [
        dataclasses.replace(first, settings=dataclasses.replace(first.settings, window_bytes=at)) for at in range(5)
    ]
    seconds = [12.0, 10.0, 11.0, 10.5, 1.0]
    device = PaperDevice(profile, {way: measure(FITS, 20.0) for way in WAYS})
    searched = iter(zip(plans, seconds))

    def next_plan(self: Any, *_: Any) -> Plan:
        plan, device.script[SEARCHED] = next((plan, measure(FITS, time)) for plan, time in searched)
        return plan

    monkeypatch.setattr(fit, "planner_backend", lambda: device)
    monkeypatch.setattr(fit._Fit, "_plan", next_plan)
    applied = fit.fit_memory(None, lambda: None, FITS, attempts=5, steps=1)
    assert device.measured.count(SEARCHED) == 4
    assert applied.plan.settings.window_bytes == 1


def test_a_faster_simple_plan_that_does_not_fit_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    said = script(searched=2.0, recomputed=1.0, swapped=1.0)
    said[RECOMPUTED.name] = measure(FITS + 1, 1.0)
    said[RECOMPUTED_SWAPPED.name] = measure(FITS, float("inf"), is_complete=False)
    applied, _ = fitted(monkeypatch, said)
    assert applied.plan.blocks[0].reason not in WAYS


def test_a_step_that_fits_is_left_alone_without_another_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    applied, device = fitted(monkeypatch, {ALONE: measure(131, 1.0)}, budget=1000)
    assert applied.plan.does_nothing
    assert device.measured == [ALONE]


def test_swapping_whole_blocks_is_the_answer_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits, and so does the searched plan."""
    fast = Link(out_bytes_per_second=1e3, in_bytes_per_second=1e3)
    said = script(searched=2.0, recomputed=2.0, swapped=2.0, swapped_whole=1.2)
    applied, _ = fitted(monkeypatch, said, link=fast)
    assert applied.plan.blocks[0].reason == SWAPPED.name
    assert applied.plan.predicted_step_seconds == 1.2


def test_swapping_whole_blocks_is_not_measured_where_the_link_rules_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Link(out_bytes_per_second=0.5, in_bytes_per_second=0.5)
    applied, device = fitted(monkeypatch, script(searched=10.0, recomputed=2.0, swapped=2.0), link=slow)
    assert SWAPPED.name not in device.measured
    assert applied.plan.blocks[0].reason == RECOMPUTED.name


def test_no_budget_is_refused_that_swapping_whole_blocks_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """101 bytes: the simulation says that nothing fits, and only measuring knows better."""
    said: dict[str, StepMeasure | Exception] = {
        RECOMPUTED.name: measure(110, 1.0),
        RECOMPUTED_SWAPPED.name: measure(105, 1.0),
        SWAPPED.name: measure(101, 9.0),
    }
    applied, device = fitted(monkeypatch, said, budget=101)
    assert applied.plan.blocks[0].reason == SWAPPED.name
    assert not applied.plan.recipes[0].regions[0].is_replayed
    anew = SWAPPED.name
    assert device.measured == [RECOMPUTED.name, RECOMPUTED_SWAPPED.name, SWAPPED.name, anew]


def test_blocks_that_cannot_be_swapped_as_a_whole_are_not_an_error_of_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, StepMeasure | Exception] = {
        RECOMPUTED.name: measure(110, 1.0),
        RECOMPUTED_SWAPPED.name: measure(105, 1.0),
        SWAPPED.name: SwapImpossibleError("no"),
    }
    text = r"the smallest peak found is 105 B, measured with .*inputs swapped \(.*activations 5 B\)"
    with pytest.raises(BudgetTooSmallError, match=text) as caught:
        fitted(monkeypatch, said, budget=101)
    assert caught.value.smallest_peak_bytes == 105


def test_a_budget_below_weights_gradients_and_states_is_refused_without_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(BudgetTooSmallError, match=r"99 B cannot hold this step; the smallest peak found is"):
        fitted(monkeypatch, {}, budget=99)


def test_a_searched_plan_that_misses_gives_way_to_a_simple_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    said = script(searched=1.0, recomputed=2.0, swapped=3.0)
    said[SEARCHED] = measure(FITS + 50, 1.0)
    applied, _ = fitted(monkeypatch, said)
    assert applied.plan.blocks[0].reason == RECOMPUTED.name


def test_a_plan_whose_allocator_retries_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is within the budget by active bytes, and faster than the one that is answered."""
    said = script(searched=1.0, recomputed=2.0, swapped=3.0)
    said[SEARCHED] = measure(FITS - 1, 1.0, retries=2)
    applied, _ = fitted(monkeypatch, said)
    assert applied.plan.blocks[0].reason == RECOMPUTED.name
    assert applied.history[0]["retries"] == 2


def test_where_every_plan_retries_the_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, StepMeasure | Exception] = {way: measure(FITS - 1, 1.0, retries=1) for way in (*WAYS, SEARCHED)}
    with pytest.raises(BudgetTooSmallError, match=r"1 allocator retries.*had to give back memory and ask again"):
        fitted(monkeypatch, said)


def test_after_a_plan_that_missed_every_block_recomputed_is_measured_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = PaperDevice(small_profile(), script(searched=10.0, recomputed=20.0, swapped=20.0, auto=20.0))
    monkeypatch.setattr(fit, "planner_backend", lambda: device)
    fit.fit_memory(None, lambda: None, FITS, attempts=3, steps=1)
    assert device.measured[:2] == [SEARCHED, RECOMPUTED.name]
