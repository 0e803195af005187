"""Files from others are data: an error that names the file, or a valid record, and nothing else ever happens."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.errors import CheckpointFileError
from hyper_parallel.platform.torch import checkpoint_files
from security.loaders import LOADERS, attempt, mutated_file

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 600
_SLICE = 2000


def test_the_slice_of_every_check(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    command = [sys.executable, str(_ROOT / "scripts" / "mutate_files.py"), "--files", str(_SLICE), "--seed", "2026"]
    done = subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(output.read_text())
    assert record["files"] == _SLICE
    for name in LOADERS:
        assert record["counts"][f"{name}: refused"] > 100, "most broken files are refused"
        assert record["counts"][f"{name}: read"] > 0, "some mutations reach past every check"


@pytest.mark.parametrize("name", list(LOADERS))
def test_every_sample_is_good(name: str, tmp_path: Path) -> None:
    loader = LOADERS[name]
    verdicts = [attempt(loader, sample, tmp_path) for sample in loader.samples]
    assert all(verdict in ("read", "refused") for verdict, _ in verdicts), verdicts
    assert verdicts[0] == ("read", "")


def test_a_mutated_file_is_the_same_every_time() -> None:
    assert all(mutated_file(3, number)[1] == mutated_file(3, number)[1] for number in range(200))
    assert len({mutated_file(3, number)[1] for number in range(200)}) > 150


class _Careless:
    """What the judge must catch."""

    @staticmethod
    def raises(path: Path) -> Any:
        raise KeyError(str(path))

    @staticmethod
    def writes(path: Path) -> Any:
        (path.parent / "beside").write_text("x")

    @staticmethod
    def starts_a_process(path: Path) -> Any:
        subprocess.run(["true"], check=True)

    @staticmethod
    def is_silent(path: Path) -> Any:
        raise CheckpointFileError("cannot read it")

    @staticmethod
    def unpickles(path: Path) -> Any:
        import pickle

        return pickle.loads(path.read_bytes())


@pytest.mark.parametrize("how", ["raises", "writes", "starts_a_process", "is_silent", "unpickles"])
def test_the_judge_sees_a_careless_reader(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    careless = dataclasses.replace(LOADERS["pt"], load=getattr(_Careless, how))
    verdict, why = attempt(careless, LOADERS["pt"].samples[2], tmp_path / "here")
    assert (verdict, bool(why)) == ("wrong", True)


# ------------------------------------------------------------------ what the fuzzer found, by name


def _safetensors_with_aliases(path: Path, text: str) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, path, metadata={"hyper_parallel.aliases": text})


@pytest.mark.parametrize("text", ["{", "[]", '{"v": "nobody"}', '{"v": ["w"]}', "[" * 5000, "null", '{"v": null}'])
def test_a_broken_list_of_tied_weights_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w"
    _safetensors_with_aliases(path, text)
    with pytest.raises(CheckpointFileError, match=r"cannot read .*/w; because its list of tied weights is broken"):
        checkpoint_files.load(path, "safetensors")


@pytest.mark.parametrize("end", ["Infinity", "NaN", "1e400", "[" * 900 + "]" * 900, '"x"', "null"])
def test_a_header_whose_ends_are_no_numbers_is_refused(tmp_path: Path, end: str) -> None:
    path = tmp_path / "w"
    header = f'{{"w":{{"dtype":"F32","shape":[1],"data_offsets":[0,{end}]}}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(CheckpointFileError, match=r"cannot read .*/w; because it is not a safetensors file"):
        checkpoint_files.load(path, "safetensors")


def test_an_archive_that_spans_disks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w"
    checkpoint_files.save({"w": torch.ones(2)}, path, "pt")
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x06\x07") + 16] = 9  # the number of disks
    path.write_bytes(data)
    with pytest.raises(CheckpointFileError, match=r"the archive is missing or damaged .*multiple disks"):
        checkpoint_files.load(path, "pt")


def test_an_archive_that_is_larger_inside_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/data.pkl", b"\0" * 10**7)
    with pytest.raises(CheckpointFileError, match=r"its \d+ bytes would unpack to 10000000; save it again without"):
        checkpoint_files.load(path, "pt")
