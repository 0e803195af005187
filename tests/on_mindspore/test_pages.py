"""What the pages say of MindSpore beside the blocks that run in ``test_trainers.py``: the README's block, and the commands."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.cli.command_line import main
from tests.docs.blocks import ROOT, blocks_of


def test_the_block_of_the_readme_runs() -> None:
    (block,) = [one for one in blocks_of("README.md", (ROOT / "README.md").read_text()) if one.needs == "mindspore"]
    names: dict[str, Any] = {"__name__": "page"}
    exec(block.compiled(), names)
    assert len(names["gradients"]) == 6 * 4


def test_the_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "docs/mindspore.md"
    blocks = blocks_of(page, (ROOT / page).read_text())
    (train,) = [block.text for block in blocks if block.info == 'python title="train.py"']
    lines = [line for block in blocks if block.language == "bash" for line in block.text.splitlines()]
    commands = [
        words[1:] for words in (shlex.split(line, comments=True) for line in lines) if words[0] == "hyper-parallel"
    ]
    assert [words[0] for words in commands] == ["doctor", "demo", "saved", "bench", "report"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    Path("train.py").write_text(train)
    for words in commands[2:]:
        assert main(words) == 0, words
    sys.modules.pop("train", None)
    said = " ".join(capsys.readouterr().out.split())  # a narrow screen breaks lines
    assert "saved for backward: " in said
    assert said.count("bitwise equal") == 4, "two ways, in two tables"
    assert json.loads(Path("run.json").read_text())["versions"]["framework"] == "mindspore"
    assert Path("report.html").exists()
