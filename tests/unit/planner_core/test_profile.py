"""The profile as a record: what it refuses, and that a file gives back exactly what was written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.errors import PlanError
from hyper_parallel.planner.profile import (
    BaseBytes,
    Block,
    BlockKind,
    Cut,
    CutRegion,
    FarCaps,
    Link,
    OpProfile,
    Profile,
)

from .small import KIND, F, G, small_profile
from .stack_profile import stack_profile


@pytest.mark.parametrize(
    "profile", [small_profile(), stack_profile("8k"), stack_profile("32k")], ids=lambda p: p.model_fingerprint
)
def test_a_file_gives_back_what_was_written(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def change(data: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    if value is None:
        del data[path[-1]]
    else:
        data[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("schema",), "hyper_parallel.profile/9", r"schema is 'hyper_parallel.profile/9', this version reads"),
        (("schema",), None, r"schema is None"),
        (("blocks",), {}, r"Profile.blocks: expected a list, got \{\}"),
        (("blocks",), [], r"Profile.blocks: 0 blocks"),
        (("blocks", 0, "kind"), 4, r"blocks.0 is of kind 4; there are 1 kinds"),
        (("blocks", 0, "kind"), "0", r"Profile.blocks\[0\].kind: expected int, got '0'"),
        (("blocks", 0, "kind"), True, r"Profile.blocks\[0\].kind: expected int, got True"),
        (("blocks", 0, "input_bytes"), -1, r"Block.input_bytes: -1 is negative"),
        (("blocks", 0, "colour"), "red", r"Profile.blocks\[0\]: unknown colour; known are name, kind, input_bytes"),
        (
            ("kinds", 0, "ops", 0, "seconds"),
            "fast",
            r"Profile.kinds\[0\].ops\[0\].seconds: expected a finite number, got 'fast'",
        ),
        (("kinds", 0, "ops", 0, "seconds"), None, r"Profile.kinds\[0\].ops\[0\]: missing seconds"),
        (("kinds", 0, "ops", 0, "kept_bytes"), 11, r"keeps 11 bytes of an output of 10"),
        (("kinds", 0, "ops", 1, "inputs"), [1], r"op 1 \(::g#0\).inputs names op 1; known are -1..0"),
        (("base", "weights"), float("nan"), r"Profile.base.weights: expected int, got nan"),
        (
            ("measured", "step_seconds"),
            float("inf"),
            r"Profile.measured.step_seconds: expected a finite number, got inf",
        ),
        (("link", "out_bytes_per_second"), 0, r"bytes per second must be above 0"),
    ],
)
def test_a_file_with_one_thing_wrong(path: tuple[Any, ...], value: Any, text: str, tmp_path: Path) -> None:
    target = tmp_path / "profile.json"
    small_profile().save(target)
    data = json.loads(target.read_text())
    change(data, path, value)
    target.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=rf"Profile.load: .*profile.json is not a Profile that can be read: .*{text}"):
        Profile.load(target)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", r"Expecting value"),
        (b"\xff\xfe", r"decode"),
        (b"[1, 2]", r"expected an object, got \[1, 2\]"),
        (b"[" * 100_000, r"recursion"),
    ],
)
def test_what_is_no_profile_at_all(content: bytes, text: str, tmp_path: Path) -> None:
    target = tmp_path / "profile.json"
    target.write_bytes(content)
    with pytest.raises(PlanError, match=rf"(?i)is not a Profile that can be read: .*{text}"):
        Profile.load(target)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"Profile.load: cannot read .*nothing.json: No such file"):
        Profile.load(tmp_path / "nothing.json")


def test_a_file_too_large_to_be_ours(tmp_path: Path) -> None:
    target = tmp_path / "profile.json"
    with target.open("wb") as file:
        file.truncate(256 * 2**20 + 1)
    with pytest.raises(PlanError, match=r"has 268435457 bytes; more than 268435456 is no file of ours"):
        Profile.load(target)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BaseBytes(weights=-1), r"BaseBytes.weights: -1 is negative"),
        (lambda: OpProfile(name="", seconds=0.0), r"OpProfile.name: is empty"),
        (lambda: OpProfile(name="f", seconds=-1.0), r"OpProfile.seconds: -1.0 is negative"),
        (
            lambda: OpProfile(name="v", seconds=0.0, alias=0, output_bytes=1),
            r"shares the storage of op 0 and cannot own bytes too",
        ),
        (lambda: CutRegion(module="", first_op=2, stop_op=2), r"CutRegion '': 2..2 is empty"),
        (lambda: Cut(regions=()), r"Cut.regions: is empty"),
        (
            lambda: Cut(
                regions=(CutRegion(module="a", first_op=0, stop_op=2), CutRegion(module="b", first_op=1, stop_op=3))
            ),
            r"'a' ends after 'b' begins",
        ),
        (lambda: BlockKind(name="B", ops=()), r"BlockKind B: has 0 ops"),
        (lambda: dataclasses.replace(KIND, input_kept_by=(2,)), r"input_kept_by names op 2; known are 0..1"),
        (lambda: BlockKind(name="B", ops=(dataclasses.replace(F, kept_by=(2,)), G)), r"kept_by names op 2"),
        (
            lambda: BlockKind(
                name="B", ops=(F, G), cuts=(Cut(regions=(CutRegion(module="", first_op=0, stop_op=3),)),)
            ),
            r"region '' ends at 3 of 2",
        ),
        (lambda: Link(out_bytes_per_second=1.0, in_bytes_per_second=0.0), r"must be above 0"),
        (lambda: FarCaps(host_bytes=-5), r"FarCaps.host_bytes: -5 is negative"),
        (lambda: small_profile(blocks=0), r"Profile.blocks: 0 blocks"),
        (
            lambda: small_profile(blocks=1, base=None) and Block(name="", kind=-1, input_bytes=0),
            r"Block.kind: -1 is negative",
        ),
    ],
)
def test_a_record_checks_itself(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_a_kind_without_cuts_is_one_region() -> None:
    assert KIND.cuts == (Cut(regions=(CutRegion(module="", first_op=0, stop_op=2),)),)
