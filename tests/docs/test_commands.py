"""The commands that the pages show: all are understood, and those about the reader's own model run, in their order."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from hyper_parallel.cli.command_line import build_parser, main
from scripts import docs_commands

from .blocks import PAGES, ROOT, blocks_of

SHOWN = [
    (f"{page}:{block.line}", shlex.split(line, comments=True)[1:])
    for page in PAGES
    for block in blocks_of(page, (ROOT / page).read_text())
    if block.language == "bash"
    for line in block.text.splitlines()
    if line.startswith("hyper-parallel ")
]


def test_every_command_that_is_shown_is_understood() -> None:
    assert len(SHOWN) >= 7
    for where, words in SHOWN:
        parsed = build_parser().parse_args(words)
        assert parsed.command == words[0], where


def test_the_commands_about_a_model_run(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of("docs/cli.md", (ROOT / "docs/cli.md").read_text())
    (train,) = [block.text for block in blocks if block.info == 'python title="train.py"']
    Path("train.py").write_text(train)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    for where, words in SHOWN:
        if where.startswith("docs/cli.md") and words[0] not in ("demo", "doctor"):
            assert main(words) == 0, f"{where}: {words}"
    sys.modules.pop("train", None)
    assert Path("report.html").read_text().lstrip().lower().startswith("<!doctype html>")
    assert Path("figure.svg").read_text().lstrip().startswith("<svg")
    assert json.loads(Path("trace.json").read_text())["traceEvents"]


def test_every_command_has_its_place_on_the_page() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    for name in docs_commands.subcommands(build_parser()):
        assert f"<!-- command: {name} -->" in page
        assert f"usage: hyper-parallel {name}" in docs_commands.on_page_markdown(f"<!-- command: {name} -->")


def test_a_command_that_does_not_exist_ends_the_build() -> None:
    with pytest.raises(
        ValueError, match=r"cannot show the command 'dance', because there is none; known are demo, doctor"
    ):
        docs_commands.on_page_markdown("<!-- command: dance -->")
