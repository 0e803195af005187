"""The fuzzer itself: programs survive as text, scripts run alone, and a broken engine does not get past it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import hyper_parallel
from fuzz import harness
from fuzz.doors import Plain, copy_with_strides
from fuzz.generate import program_number
from fuzz.oracle import compiled, features_of, judge, signature, writes_anything
from fuzz.program import (
    BLOCKS,
    THEIRS,
    Action,
    Op,
    Policy,
    Program,
    Settings,
    Span,
    Tensor,
    from_json,
    spans_of,
    to_json,
)
from fuzz.shrink import shrink
from fuzz.source import program_to_script, program_to_source
from fuzz.vocabulary import EFFECTS, FUNCTIONS, RARE, SPECS, STATE
from hyper_parallel.backends.torch import ops, region_state, selective
from hyper_parallel.backends.torch.region_state import RegionState
from hyper_parallel.core.activation_checkpoint import wrapper
from hyper_parallel.core.activation_checkpoint.packed import KeptValue, SwappedValue
from hyper_parallel.core.activation_checkpoint.python_state import PythonState
from hyper_parallel.core.activation_checkpoint.record import Record

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_STEP = (Action(kind="forward"), Action(kind="backward"))


@pytest.fixture(autouse=True)
def _on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")


def small(*body: Op | Span, threads: tuple[tuple[Action, ...], ...] = (_STEP,), **fields: Any) -> Program:
    """A program over one matrix and one input."""
    given = {
        "weights": (Tensor(shape=(4, 4)),),
        "inputs": (Tensor(shape=(3, 4)),),
        "constants": (Tensor(shape=(3, 4), requires_grad=False),),
    }
    return Program(body=body, threads=threads, **{**given, **fields})


def swapped(*body: Op | Span) -> Span:
    return Span(kind="swap", body=body)


def op(name: str, *ins: int) -> Op:
    return Op(name=name, ins=ins or (0,) * SPECS[name].ins, weights=(0,) * len(SPECS[name].weights))


CHAIN = small(
    swapped(op("linear"), op("tanh"), op("linear"), op("gelu"), op("linear")),
    settings=Settings(window_bytes=0),  # so that everything really leaves
)


def test_a_program_survives_as_text() -> None:
    for number in range(200):
        program = program_number(3, number)
        assert from_json(to_json(program)) == program


def test_the_same_number_is_the_same_program_and_another_number_another() -> None:
    assert program_number(3, 5) == program_number(3, 5)
    assert len({to_json(program_number(3, number)) for number in range(100)}) > 95


def test_a_few_hundred_programs_contain_every_operation_span_policy_and_action() -> None:
    seen: set[str] = set()
    for number in range(1500):
        seen |= features_of(program_number(4, number))
    assert {f"op:{name}" for name in SPECS.keys() - STATE.keys() - EFFECTS.keys()} <= seen
    for kind in ("swap", "swap_wrapper", "checkpoint", "checkpoint_wrapper", "plain", *BLOCKS, *THEIRS):
        assert f"span:{kind}" in seen
        assert f"nested:{kind} in checkpoint" in seen
        assert f"nested:{kind} in swap" in seen
    for policy in ("MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE", "MUST_SWAP"):
        assert f"policy:{policy}" in seen
    for kind in ("grad", "double", "eval", "edit", "drop", "step", "fail_forward", "fail_backward", "both"):
        assert f"action:{kind}" in seen
    assert {"threads", "wild", "retain", "frozen weight", "empty input", "capped", "verify"} <= seen
    assert {"leaf that is no parameter", "weight hook:tensor", "weight hook:accumulated"} <= seen
    assert {"module:module", "module:forward_hook", "module:backward_hook"} <= seen


def test_state_that_forward_writes_has_a_territory_of_its_own() -> None:
    seen: set[str] = set()
    for number in range(300):
        seen |= features_of(program_number(4, number, "state"))
    assert {f"op:{name}" for name in STATE} <= seen


def test_how_layers_are_called_has_a_territory_of_its_own() -> None:
    seen: set[str] = set()
    for number in range(300):
        seen |= features_of(program_number(4, number, "calls"))
    names = ("debug", "early_stop", "function", "preserve_rng_state", "determinism_check")
    assert {f"keyword:{name}" for name in names} <= seen
    assert {"module:other_weights", "module:weights_inside", "action:change_weight"} <= seen


def _without_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegionState, "changed", lambda self: {})


def _without_weights_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegionState, "_has_place", lambda self, value: False)


def _without_watching_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_state._Saves, "pack", lambda self, tensor: self._pack(tensor))


def _with_keywords_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper's call hands the module's keywords on under their own names, where torch takes some for itself."""
    monkeypatch.setattr(wrapper, "keep_apart", lambda module, kwargs, taken: (module, kwargs))


@pytest.mark.parametrize(
    "sabotage",
    [_without_versions, _without_weights_by_place, _without_watching_what_is_saved, _with_keywords_for_torch],
)
def test_a_region_that_reads_other_weights_or_keywords_is_noticed(
    sabotage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "0")  # a tape has checks of its own
    sabotage(monkeypatch)
    assert any(not judge(program_number(5, number, "calls")).is_good for number in range(200))


def test_effects_and_second_derivatives_have_territories_of_their_own() -> None:
    seen: set[str] = set()
    for number in range(300):
        seen |= features_of(program_number(4, number, "effects"))
    assert {f"op:{name}" for name in EFFECTS} <= seen
    doubled = ["action:double" in features_of(program_number(4, number, "second")) for number in range(100)]
    assert sum(doubled) > 60


def test_effects_that_happen_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python runs again they do, and are not compared. Here they are."""
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "0")
    region = Span(kind="checkpoint", body=(Op(name="effect_prints", ins=(0,)), Op(name="tanh", ins=(0,))))
    program = Program(
        weights=(Tensor(shape=(4, 4)),),
        inputs=(Tensor(shape=(3, 4)),),
        constants=(),
        body=(region,),
        threads=((Action(kind="forward"), Action(kind="backward")),),
    )
    assert judge(program).kind == "equal"
    monkeypatch.setattr(harness, "effects_happen_once", lambda facts: True)
    assert judge(program).kind == "mismatch"


def _without_putting_state_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PythonState, "put_back", lambda self: lambda: None)


def _without_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegionState, "_copied", lambda self, tensor, place: place.tensor)


@pytest.mark.parametrize("sabotage", [_without_putting_state_back, _without_stand_ins])
def test_a_region_that_finds_other_state_is_noticed(sabotage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch)
    assert any(not judge(program_number(5, number, "state")).is_good for number in range(200))


def test_the_first_territory_keeps_its_numbers() -> None:
    """The recorded runs name programs by number; a new operation must not renumber them."""
    texts = [to_json(program_number(0, number, "first")) for number in range(300)]
    assert not any(name in text for text in texts for family in RARE.values() for name in family)
    builds = [program_to_source(from_json(text)).partition("def build")[2] for text in texts]
    digest = hashlib.sha256("".join(builds).encode()).hexdigest()
    assert digest[:16] == "00468bedf74a43f7"


def test_a_program_written_before_a_field_existed_is_still_read() -> None:
    data = json.loads(to_json(program_number(0, 7, "first")))
    for tensor in data["weights"] + data["inputs"] + data["constants"]:
        del tensor["is_parameter"], tensor["hook"]
    for span in _spans_in(data["body"]):
        del span["module"], span["keyword"]
    assert from_json(json.dumps(data)) == program_number(0, 7, "first")


def _spans_in(body: list[Any]) -> list[Any]:
    return [span for node in body if "body" in node for span in (node, *_spans_in(node["body"]))]


def test_every_operation_runs_and_has_a_gradient_where_it_should() -> None:
    without = {"detach", "empty", "embedding", "constant", "weight_view", "branch", "fresh_leaf", "fresh_parameter"}
    for name in SPECS:
        program = small(swapped(op(name)))
        verdict = judge(program)
        assert verdict.is_good, f"{name}: {verdict.detail}"
        if name not in without:
            assert "did:backward" in verdict.features, name


def test_the_source_of_a_program_reads_like_code() -> None:
    program = small(
        Span(
            kind="checkpoint",
            body=(op("linear"), swapped(op("add", 0, 1))),
            swap_inputs=True,
            policy=Policy(table=(("mm", "MUST_SWAP"),)),
        )
    )
    source = program_to_source(program)
    assert source[source.index("def build") :] == (
        "def build(hp, W, C, tick):\n"
        "    def span1(v0, v1):\n"
        "        v2 = add(v1, v0)\n"
        "        return v2\n"
        "    def span0(v0):\n"
        "        v1 = linear(v0, W[0])\n"
        "        v3 = hp.swap(span1, v0, v1)\n"
        "        return v3\n"
        "    policy0 = function_policy(hp, {'mm': 'MUST_SWAP'}, 'PREFER_RECOMPUTE')\n"
        "    def model(v0):\n"
        "        v4 = hp.checkpoint(span0, v0, swap_inputs=True, policy_fn=policy0)\n"
        "        return [v4]\n"
        "    return model\n"
    )


def test_a_script_runs_alone(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(program_to_script(CHAIN, "A chain."))
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "results, all equal" in done.stdout


def test_an_error_that_hooks_move_is_judged_by_a_run_under_hooks() -> None:
    """Under anybody's saved-tensor hooks torch replays a nested checkpoint less often; the planned error is never reached."""
    program = program_number(0, 16839, "first")
    names = compiled(program)
    plain, hooked, ours = (harness.run_once(names, way, "cpu") for way in (Plain(), Plain("hooked"), hyper_parallel))
    planned = ("0: 1 fail_backward 0 error", "planned")
    assert planned in plain.entries
    assert planned not in hooked.entries
    assert ours.entries == hooked.entries
    assert judge(program).kind == "equal"


def test_a_planned_error_that_only_our_run_meets_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_number(0, 16839, "first")
    run_once = harness.run_once

    def with_one_error_more(names: dict[str, Any], way: Any, device: str) -> Any:
        outcome = run_once(names, way, device)
        if not isinstance(way, Plain):
            outcome.entries[-1] = ("0: 4 backward 1 error", "planned")
        return outcome

    monkeypatch.setattr(harness, "run_once", with_one_error_more)
    assert judge(program).kind == "mismatch"


def test_a_planned_error_that_a_tape_never_meets_is_judged_by_a_run_whose_python_runs_once() -> None:
    """Torch's reentrant checkpoint raises in backward; where our region runs its Python again, the planned error comes first."""
    inner = Span(kind="torch_reentrant", body=(op("square"), op("amax"), op("hooked"), op("square")))
    program = small(
        Span(kind="checkpoint", body=(op("foreign_thinned"), inner, op("batch_norm"))),
        inputs=(Tensor(shape=(0, 1)),),
        threads=((Action(kind="forward"), Action(kind="fail_backward", at=9, retain=True)),),
    )
    names = compiled(program)
    plain, once = (harness.run_once(names, way, "cpu").entries for way in (Plain(), Plain("once")))
    assert plain[-1] == ("0: 1 fail_backward 0 error", "planned")
    assert once[-1] == ("0: 1 fail_backward 0 error", "other")
    assert judge(program).kind == "equal"


@pytest.mark.parametrize(("repeats", "kind"), [(True, "mismatch"), (False, "unjudged")])
def test_a_program_whose_plain_run_does_not_repeat_itself_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, repeats: bool, kind: str
) -> None:
    run_once, runs = harness.run_once, []

    def with_other_results(names: dict[str, Any], way: Any, device: str) -> Any:
        outcome = run_once(names, way, device)
        runs.append(way)
        is_plain = isinstance(way, Plain) and way.way == "plain"
        outcome.entries[-1] = ("last", "plain" if is_plain and repeats else str(len(runs)))
        return outcome

    monkeypatch.setattr(harness, "run_once", with_other_results)
    assert judge(CHAIN).kind == kind


def test_a_graph_that_is_a_cycle_without_us_is_not_our_leak() -> None:
    """``save_on_cpu`` keeps a value that is on the CPU itself, also one that the graph's last node saved of its own output."""
    program = small(
        Span(kind="checkpoint", body=(op("foreign_shake_"),), policy=Policy(otherwise="MUST_SWAP")),
        Span(kind="save_on_cpu", body=(op("function_dirty_"),)),
        inputs=(Tensor(shape=(0, 1)),),
        threads=((Action(kind="forward"),),),
    )
    names = compiled(program)
    hooked, ours = (harness.run_once(names, way, "cpu") for way in (Plain("hooked"), hyper_parallel))
    assert hooked.left_values
    assert not hooked.left_bytes
    assert any("records outlived" in fault for fault in ours.faults)
    assert judge(program).kind == "equal"


def test_an_input_without_elements_that_such_a_cycle_keeps_is_not_our_leak() -> None:
    """It is marked, and as long as a marked tensor lives, the hooks for it stay on."""
    program = small(
        Span(kind="swap", body=()),
        op("mark"),
        Span(kind="save_on_cpu", body=(op("foreign_sprinkled"),)),
        inputs=(Tensor(shape=(0, 1)),),
        threads=((Action(kind="forward"),),),
    )
    names = compiled(program)
    plain, ours = (harness.run_once(names, way, "cpu") for way in (Plain(), hyper_parallel))
    assert plain.left_values
    assert ours.faults == ["saved-tensor hooks were left on this thread"]
    assert judge(program).kind == "equal"


def test_the_exact_run_is_the_bare_run_where_nothing_is_changed_in_place() -> None:
    """Its copies keep their strides, so the same kernels run, whichever those are on this processor."""
    expanded = torch.randn(4, 1, dtype=torch.float64).expand(4, 32)
    columns = torch.randn(6, 40)[:, 3:20].t()
    for value in (expanded, columns, torch.randn(3, 4)):
        copy = copy_with_strides(value)
        assert (copy.stride(), copy.storage_offset()) == (value.stride(), value.storage_offset())
        assert copy.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
        assert torch.equal(copy, value)
    names = compiled(program_number(0, 16839, "first"))  # products of expanded and sliced values, in double precision
    exact, bare = (harness.run_once(names, Plain(way), "cpu") for way in ("exact", "bare"))
    assert exact.entries == bare.entries


def test_every_script_defines_what_it_needs() -> None:
    for number in range(25):
        program = program_number(6, number)
        names: dict[str, Any] = {"__name__": "script"}
        exec(compile(program_to_script(program), "<script>", "exec"), names)
        # A script knows equal and different only; the judge knows what torch itself gets wrong.
        verdict = judge(program)
        assert names["main"](names, "cpu") == 0 or verdict.kind != "equal" or writes_anything(program)


def test_a_script_fails_when_the_engine_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(program_to_script(CHAIN), "<script>", "exec"), names)
    _without_waiting_for_loads(monkeypatch)
    assert names["main"](names, "cpu") == 1
    assert "with us" in capsys.readouterr().out


def _without_waiting_for_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from hyper_parallel.core.activation_checkpoint.residency import Move, next_residency

    def finish_load(self: Record) -> None:
        self.residency = next_residency(self.residency, Move.FINISH_LOAD)

    monkeypatch.setattr(Record, "finish_load", finish_load)


def _without_ordering_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "_order_owner", lambda self, current=None: None)


def _without_the_version_check_of_swapped_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwappedValue, "_raise_changed", lambda self: None)


def _without_the_version_check_of_kept_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptValue, "unpack", lambda self: self.tensor)


@pytest.mark.parametrize(
    "sabotage",
    [
        _without_waiting_for_loads,
        _without_ordering_the_owner,
        _without_the_version_check_of_swapped_values,
        _without_the_version_check_of_kept_values,
    ],
)
def test_a_broken_engine_is_found_within_a_few_hundred_programs(sabotage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch)
    assert any(not judge(program_number(5, number, "first")).is_good for number in range(400))


def _with_trust_in_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every op that draws said so."""
    for key, facts in list(ops.KNOWN.items()):
        monkeypatch.setitem(ops.KNOWN, key, dataclasses.replace(facts, may_draw=facts.is_random))
    monkeypatch.setattr(ops, "_TAGGED", {*ops._TAGGED, FUNCTIONS["foreign_wave"].__globals__["_NAMESPACE"]})


def _with_a_cache_of_parameters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if autocast remembered no other leaf."""
    monkeypatch.setattr(selective, "is_weight_cast", lambda args: isinstance(args[0], torch.nn.Parameter))


@pytest.mark.parametrize(
    ("sabotage", "territory"),
    [(_with_trust_in_tags, "foreign"), (_with_a_cache_of_parameters_alone, "autocast")],
)
def test_what_only_reading_had_found_is_found_in_its_territory(
    sabotage: Any, territory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    assert any(not judge(program_number(5, number, territory)).is_good for number in range(400))


def test_what_a_broken_engine_does_shrinks_to_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_ordering_the_owner(monkeypatch)
    program = next(program for number in range(400) if not judge(program := program_number(5, number, "first")).is_good)
    wanted = signature(judge(program).detail)

    def still_fails(candidate: Program) -> bool:
        found = judge(candidate)
        return not found.is_good and signature(found.detail) == wanted

    smaller = shrink(program, still_fails, most_tries=400)
    assert still_fails(smaller)
    assert len(smaller.body) <= 3
    assert len(list(spans_of(smaller.body))) <= 2
