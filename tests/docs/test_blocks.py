"""Every Python block of the README and the docs runs, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

from hyper_parallel.testing import simulated_accelerator

from .blocks import PAGES, ROOT, Block, blocks_of, complaints

PRINTS = 'text title="prints"'
WITH_PYTHON = [
    page
    for page in PAGES
    if page != "docs/mindspore.md"  # its blocks run in tests/on_mindspore/test_trainers.py
    and any(b.language == "python" for b in blocks_of(page, (ROOT / page).read_text()))
]


def run(block: Block, namespace: dict[str, Any]) -> str:
    """Run it, on the simulated accelerator unless it makes one itself; what it printed."""
    printed = io.StringIO()
    on = contextlib.nullcontext() if "simulated_accelerator" in block.text else simulated_accelerator()
    with contextlib.redirect_stdout(printed), on:
        exec(block.compiled(), namespace)
    return printed.getvalue()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the same
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_every_block_runs(page: str) -> None:
    namespace: dict[str, Any] = {"__name__": f"page {page}"}
    unrun: dict[str, Any] = {}
    printed = None
    for block in blocks_of(page, (ROOT / page).read_text()):
        if block.info == PRINTS:
            assert printed is not None, f"{block.where}: no block before it was run"
            assert printed == block.text, f"{block.where}: the block before it prints something else"
        elif block.language == "python":
            printed = None
            if block.needs:
                assert complaints(block, namespace, unrun) == []
            else:
                printed = run(block, namespace)


def test_every_block_says_what_it_is() -> None:
    known = {"python", "text", "bash", "toml", "mermaid", "console", "yaml"}
    nameless = {
        block.where
        for page in PAGES
        if page not in ("docs/log.md", "docs/architecture.md", "docs/trust.md", "docs/mindspore.md")
        for block in blocks_of(page, (ROOT / page).read_text())
        if block.language not in known
    }
    assert nameless == set()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# needs a GPU\nimport hyper_parallel as hp\nhp.swop_wrapper(1)\n", "hyper_parallel has no swop_wrapper"),
        ("# needs a GPU\nfrom hyper_parallel import Budget\n", "hyper_parallel has no Budget"),
        ("# needs a GPU\nimport hyper_paralel\n", "there is no module hyper_paralel"),
        ("# needs a GPU\nprint(thing)\n", "thing is defined nowhere on the page"),
        (
            "# needs a GPU\nimport hyper_parallel as hp\nhp.fit_memory(1, 2, budjet='2GiB')\n",
            "fit_memory takes no budjet=",
        ),
        (
            "# needs a GPU\nfrom hyper_parallel.integrations import fsdp\nfsdp.apply(1, budjet='2GiB')\n",
            "apply takes no budjet=",
        ),
    ],
)
def test_what_is_not_run_is_still_read(text: str, complaint: str) -> None:
    assert complaints(Block("page.md", 3, "python", text), {}, {}) == [f"page.md:3: {complaint}"]


def test_a_package_that_the_block_needs_may_be_missing() -> None:
    text = "# needs surely_not_installed\nimport surely_not_installed\nsurely_not_installed.go()\n"
    assert complaints(Block("page.md", 1, "python", text), {}, {}) == []


def test_blocks_in_notes_are_found_with_their_lines() -> None:
    page = '# Title\n\n??? note "A note"\n\n    ```python\n    x = 1\n    ```\n\n```text title="prints"\n1\n```\n'
    assert blocks_of("page.md", page) == [
        Block("page.md", 6, "python", "x = 1\n"),
        Block("page.md", 10, PRINTS, "1\n"),
    ]
