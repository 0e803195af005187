"""``hyper-parallel estimate``: no device, no framework; what it prints, and how it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hyper_parallel.backends.torch import machine
from hyper_parallel.cli.command_line import main

SHAPE = [
    "--width",
    "4096",
    "--layers",
    "32",
    "--heads",
    "32",
    "--kv-heads",
    "8",
    "--hidden",
    "14336",
    "--vocabulary",
    "128256",
]
DEVICE = machine.Accelerator(
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=79 * 2**30,
    free_bytes=70 * 2**30,
    out_bytes_per_second=41e9,
    in_bytes_per_second=42e9,
    copy_seconds=1e-5,
    pin_seconds_per_byte=1e-10,
)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["estimate", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_it_prints_every_way_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = answer(capsys, *SHAPE, "--tokens", "8192", "--card", "a100-80gb", "--lora", "16")
    assert (code, err) == (0, "")
    assert "8.03 billion weights, 32 layers, LoRA of rank 16, 8,192 tokens × 1" in out
    for way in ("plain", "recompute", "inputs", "swap", "plan"):
        assert way in out
    assert "±10%" in out
    assert "hp.checkpoint_wrapper(layer, swap_inputs=True) (2.00 GiB of host memory)" in out


@pytest.mark.parametrize("width", [60, 80])
def test_no_line_is_wider_than_a_narrow_screen(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = answer(capsys, *SHAPE, "--tokens", "8192", "--lora", "16")
    assert code == 0
    assert max(map(len, out.splitlines())) <= width


def test_json_is_one_value_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 128256, "tie_word_embeddings": True}))
    code, out, _ = answer(capsys, "--config", str(tmp_path), "--tokens", "4096", "--json", "--budget", "30GiB")
    found = json.loads(out)
    assert code == 0
    assert found["shape"]["has_tied_embedding"] is True
    assert found["ways"][-1]["peak_bytes"] <= 30 * 2**30


def test_memory_and_link_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(
        capsys, *SHAPE, "--tokens", "8192", "--card", "h100", "--memory", "40GiB", "--link", "12GB", "--json"
    )
    card = json.loads(out)["card"]
    assert (card["memory_bytes"], card["link_bytes_per_second"], card["flops"]) == (40 * 2**30, 12e9, 989e12)


def test_here_takes_memory_and_link_as_doctor_measures_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "accelerators", lambda: (DEVICE,))
    _, out, _ = answer(capsys, *SHAPE, "--tokens", "8192", "--here", "--json")
    card = json.loads(out)["card"]
    assert (card["name"], card["memory_bytes"], card["link_bytes_per_second"]) == ("h100", 79 * 2**30, 41e9)


def test_here_refuses_what_it_cannot_know(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "accelerators", lambda: ())
    code, _, err = answer(capsys, *SHAPE, "--tokens", "8192", "--here")
    assert code == 1
    assert "torch sees no accelerator in this machine; name a --card instead" in err
    monkeypatch.setattr(machine, "accelerators", lambda: (dataclasses.replace(DEVICE, name="Abacus 3"),))
    code, _, err = answer(capsys, *SHAPE, "--tokens", "8192", "--here")
    assert code == 1
    assert "unknown card 'Abacus 3'" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["--tokens", "64"],
            2,
            "the model is not known: give --config config.json, or --width, --layers, --heads, --hidden",
        ),
        ([*SHAPE, "--tokens", "64", "--config", "c.json"], 2, "leave out the numbers of its shape, or --config"),
        ([*SHAPE, "--tokens", "64", "--here", "--card", "h100"], 2, "leave it out, or --card"),
        ([*SHAPE, "--tokens", "64", "--card", "h10"], 1, "unknown card 'h10'; did you mean"),
        (["--config", "absent.json", "--tokens", "64"], 1, "cannot open absent.json: No such file or directory"),
        ([*SHAPE, "--tokens", "8192", "--budget", "1GiB"], 1, "1.00 GiB cannot hold this step"),
        ([*SHAPE, "--tokens", "8192", "--lora-float32"], 1, "there are no adapters"),
    ],
)
def test_a_mistake_is_answered(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, out, err = answer(capsys, *arguments)
    assert (found, out) == (code, "")
    assert words in err


def test_no_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["estimate", *SHAPE, "--tokens", "0"])
    assert "argument --tokens: '0' is no whole number of 1 or more" in capsys.readouterr().err
