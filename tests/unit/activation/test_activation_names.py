"""The names that others rely on, pinned; enums by name and value; statistics by field."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import pickle
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy, errors
from hyper_parallel.core.activation_checkpoint import policy
from hyper_parallel.core.activation_checkpoint.residency import MOVES, Move, Residency, next_residency
from hyper_parallel.fates import Fate

CORE = "hyper_parallel.core.activation_checkpoint"
DOORS = {
    "CheckpointPolicy",
    "checkpoint",
    "checkpoint_wrapper",
    "swap",
    "swap_wrapper",
    "swap_tensor_wrapper",
    "SwapManager",
}


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            CORE,
            DOORS,
        ),
        (
            "hyper_parallel.backends.torch",
            {"swap_wrapper", "SwapWrapper", "ActivationWrapper", "AsyncSaveOnCpu", "base_check_fn"}
            | {"ActivationPolicy", "FuncModule"},
        ),
        (f"{CORE}.activation_checkpoint", {"CheckpointPolicy", "checkpoint", "checkpoint_wrapper"}),
        (f"{CORE}.swap", {"SwapTensor", "Storage", "SwapGroup", "SwapManager"}),
        (
            "hyper_parallel",
            {*DOORS, "SwapConfig", "configure", "stats", "get_platform"},
        ),
    ],
)  # fmt: skip
def test_names_exist_where_they_are_looked_for(module: str, names: set[str]) -> None:
    found = importlib.import_module(module)
    assert names <= set(found.__all__)
    for name in names:
        assert not inspect.ismodule(getattr(found, name)), f"{module}.{name} is a module, not the thing itself"


def test_the_door_hands_out_the_same_objects_as_the_rooms() -> None:
    core = importlib.import_module(CORE)
    for name in core.__all__:
        assert getattr(hp, name) is getattr(core, name)


@pytest.mark.parametrize("name", ["CheckpointPolicy", "checkpoint", "checkpoint_wrapper"])
def test_the_doors_live_in_their_own_file(name: str) -> None:
    assert getattr(hp, name).__module__ == f"{CORE}.activation_checkpoint"


@pytest.mark.parametrize("name", ["SwapTensor", "Storage", "SwapGroup", "SwapManager"])
def test_the_explicit_interface_is_imported_from_one_module(name: str) -> None:
    module = importlib.import_module(f"{CORE}.swap")
    assert name in module.__all__
    assert getattr(module, name).__name__ == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'swop'; did you mean swap\? It has .*swap_wrapper"):
        _ = hp.swop


def test_the_policies_by_name_and_value() -> None:
    assert {member.name: member.value for member in CheckpointPolicy} == {
        "MUST_SAVE": 0, "PREFER_SAVE": 1, "MUST_RECOMPUTE": 2, "PREFER_RECOMPUTE": 3, "MUST_SWAP": 4,
    }  # fmt: skip
    assert CheckpointPolicy.__mro__[1] is enum.Enum
    assert CheckpointPolicy.MUST_SWAP != 4
    assert pickle.loads(pickle.dumps(CheckpointPolicy.MUST_SWAP)) is CheckpointPolicy.MUST_SWAP
    from hyper_parallel.backends.torch import ActivationPolicy

    assert {member.name: member.value for member in ActivationPolicy} == {"SAVE": 0, "SWAP": 1}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("checkpoint", ["function", "args", "swap_inputs", "policy_fn", "context_fn", "early_stop", "kwargs"]),
        ("swap", ["function", "args", "policy_fn", "kwargs"]),
        ("swap_tensor_wrapper", ["tree", "tag"]),
    ],
)
def test_signatures(name: str, parameters: list[str]) -> None:
    found = [parameter for parameter in inspect.signature(getattr(hp, name)).parameters if parameter != "swap_config"]
    assert found == parameters


def test_every_error_has_one_root_that_is_a_runtime_error() -> None:
    assert issubclass(errors.HyperParallelError, RuntimeError)
    for name in errors.__all__:
        cls = getattr(errors, name)
        assert issubclass(cls, errors.HyperParallelError | Warning)
    assert issubclass(errors.SwapStateWarning, UserWarning)
    assert issubclass(errors.PolicyError, TypeError)


def test_statistics_are_frozen_and_serialise() -> None:
    stats = hp.stats()
    assert type(stats) is hp.SwapStats
    assert {field.name for field in dataclasses.fields(stats)} >= {
        "schema", "saved_bytes", "recomputed_bytes", "swapped_out_bytes", "swapped_in_bytes", "kept_bytes", "kept_count",
        "hidden_copy_us", "exposed_copy_us", "peak_resident_bytes", "pinned_bytes", "prefetch_hits", "late_loads", "misses",
        "shared_copies", "shared_bytes", "live_records", "tiers", "replayed_ops", "overruled", "bytes_by_tag",
    }  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError, match="misses"):
        stats.misses = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="item assignment"):
        stats.kept_bytes["x"] = 3  # type: ignore[index]
    plain = json.loads(json.dumps(stats.as_dict()))
    assert plain["schema"] == stats.schema
    assert plain["misses"] == 0


# ---------------------------------------------------------------------- policies as values


class _Op:
    def __init__(self, name: str) -> None:
        self.name = name


def test_an_op_answers_to_all_its_names() -> None:
    assert policy.op_names("aten.mm.default") == ("aten.mm.default", "aten.mm", "mm")
    assert policy.op_names(_Op("MatMul")) == ("MatMul",)
    assert policy.op_label(_Op("MatMul")) == "MatMul"


def test_a_table_of_names_is_a_value() -> None:
    table = policy.ByOpName({"mm": CheckpointPolicy.MUST_SAVE, "aten.exp": CheckpointPolicy.MUST_SWAP})
    assert table == policy.ByOpName({"mm": CheckpointPolicy.MUST_SAVE, "aten.exp": CheckpointPolicy.MUST_SWAP})
    assert hash(table) == hash(pickle.loads(pickle.dumps(table)))
    assert table(None, "aten.mm.default") is CheckpointPolicy.MUST_SAVE
    assert table(None, "aten.exp.default") is CheckpointPolicy.MUST_SWAP
    assert table(None, _Op("mm")) is CheckpointPolicy.MUST_SAVE
    assert table(None, "aten.sin.default") is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("given", [["mm", _Op("MatMul")], ("mm", _Op("MatMul")), {"mm", "MatMul"}])
def test_a_list_saves_these_and_recomputes_the_rest(given: Any) -> None:
    made = policy.as_op_policy(given, where="here")
    assert made(None, "aten.mm.default") is CheckpointPolicy.MUST_SAVE
    assert made(None, _Op("MatMul")) is CheckpointPolicy.MUST_SAVE
    assert made(None, "aten.add.Tensor") is CheckpointPolicy.PREFER_RECOMPUTE


FATES = {"MUST_SAVE": "save", "PREFER_SAVE": "save", "MUST_RECOMPUTE": "recompute", "PREFER_RECOMPUTE": "recompute"}


@pytest.mark.parametrize("answer", list(CheckpointPolicy))
def test_every_answer_of_an_op_policy_is_one_fate(answer: CheckpointPolicy) -> None:
    fate = policy.fate_of_op(answer, "aten.mm.default", where="here")
    assert fate.value == FATES.get(answer.name, "swap")


def test_bools_are_taken_and_nothing_else() -> None:
    assert policy.fate_of_op(True, "op", where="here") is Fate.SAVE
    assert policy.fate_of_op(False, "op", where="here") is Fate.RECOMPUTE
    for bad in (0, 1, 4, "MUST_SWAP", None):
        with pytest.raises(
            errors.PolicyError, match=r"here: the policy answered .* for op aten\.mm\.default; known answers"
        ):
            policy.fate_of_op(bad, "aten.mm.default", where="here")


# ---------------------------------------------------------------------- the table of moves


def test_the_table_is_the_whole_machine() -> None:
    assert {(state.value, move.value): target.value for (state, move), target in MOVES.items()} == {
        ("device", "start_offload"): "d2h",
        ("d2h", "finish_offload"): "host",
        ("d2h", "cancel_offload"): "device",
        ("host", "start_load"): "h2d",
        ("h2d", "finish_load"): "device",
    }


@pytest.mark.parametrize("state", list(Residency))
@pytest.mark.parametrize("move", list(Move))
def test_a_move_that_is_not_in_the_table_raises(state: Residency, move: Move) -> None:
    if (state, move) in MOVES:
        assert next_residency(state, move) is MOVES[state, move]
        return
    with pytest.raises(errors.SwapStateError, match=f"record: cannot {move.value} while {state.value}; legal now: "):
        next_residency(state, move)


def test_states_compare_with_plain_strings() -> None:
    assert Residency.DEVICE == "device"
    assert str(Residency.H2D) == "h2d"
