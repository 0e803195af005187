"""Which framework a command runs on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hyper_parallel.cli import framework
from hyper_parallel.cli.command_line import main
from hyper_parallel.cli.failures import CommandError
from hyper_parallel.platform import platform as platforms

NAME = "HYPER_PARALLEL_PLATFORM"


def model_of(package: str) -> Any:
    """An object whose class has a base of this package, as a user's model has."""
    base = type("Base", (), {"__module__": f"{package}.nn.modules"})
    return type("Model", (base,), {})()


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The frameworks that were chosen, in order; none is imported."""
    chosen: list[str] = []
    creators = {name: (lambda name=name: chosen.append(name)) for name in framework.FRAMEWORKS}
    monkeypatch.setattr(framework, "_CREATE", creators)
    monkeypatch.setattr(framework, "framework_in_use", lambda: "any")
    monkeypatch.delenv(NAME, raising=False)
    return chosen


@pytest.mark.parametrize("package", ["torch", "mindspore"])
def test_a_model_says_by_itself_which_framework_it_is_of(created: list[str], package: str) -> None:
    framework.use_model("a:b", model_of(package))
    assert created == [package]


def test_a_model_of_no_framework_is_left_to_the_library(created: list[str]) -> None:
    framework.use_model("a:b", SimpleNamespace())
    assert created == []


def test_a_framework_that_was_asked_for_is_not_overruled(created: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, " Torch ")
    framework.use_model("a:b", model_of("torch"))
    assert created == []
    with pytest.raises(
        CommandError, match=r"^a:b makes a model of mindspore, and .* says torch;.*--platform mindspore$"
    ):
        framework.use_model("a:b", model_of("mindspore"))


def test_no_framework_is_a_message_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ImportError("get_platform: cannot choose a platform; install one: pip install torch")

    monkeypatch.setattr(framework, "framework_in_use", missing)
    with pytest.raises(CommandError, match="pip install torch"):
        framework.require_framework()


@pytest.mark.parametrize(
    ("installed", "asked", "says"),
    [
        (("torch", "mindspore"), "", True),
        (("torch", "mindspore"), "torch", False),
        (("torch",), "", False),
        (("mindspore",), "", False),
    ],
)
def test_a_choice_that_nobody_made_is_said(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], asked: str, says: bool
) -> None:
    monkeypatch.setattr(framework, "_is_installed", installed.__contains__)
    monkeypatch.setattr(framework, "framework_in_use", lambda: "mindspore")
    monkeypatch.setenv(NAME, asked)
    said = "both frameworks are installed, and this ran on mindspore; --platform torch runs it on the other one"
    assert framework.not_chosen() == (said if says else "")


def test_what_is_installed_is_known_without_importing_it() -> None:
    assert framework._is_installed("pytest")
    assert not framework._is_installed("surely-not-installed")


def test_what_was_asked_for_holds_inside_and_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = platforms.platform
    monkeypatch.delenv(NAME, raising=False)
    with framework.asked_platform("mindspore"):
        assert os.environ[NAME] == "mindspore"
        assert platforms.platform is None
    assert NAME not in os.environ
    monkeypatch.setenv(NAME, "torch")
    with pytest.raises(ZeroDivisionError), framework.asked_platform("mindspore"):
        raise ZeroDivisionError
    with framework.asked_platform(None):
        assert os.environ[NAME] == "torch"
    assert os.environ[NAME] == "torch"
    assert platforms.platform is before


def test_the_option_reaches_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_torch_model.py").write_text(
        "import torch\ndef make():\n    model = torch.nn.Linear(2, 2)\n"
        "    return model, lambda: model(torch.ones(1, 2)).sum().backward()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["saved", "a_torch_model:make", "--platform", "mindspore"]) == 1
    assert "makes a model of torch, and --platform or HYPER_PARALLEL_PLATFORM says mindspore" in capsys.readouterr().err
    assert main(["saved", "a_torch_model:make", "--platform", "torch"]) == 0
    assert "saved for backward" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["saved", "a_torch_model:make", "--platform", "tensorflow"])
    assert "invalid choice: 'tensorflow'" in capsys.readouterr().err
