"""The site builds without a warning, holds every page and public name, and shows what was measured from where it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import hyper_parallel as hp
from scripts import docs_results, docs_roles

from .blocks import PAGES, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return target


def text_of(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text()


def test_every_page_is_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    for page in PAGES:
        name = Path(page).stem
        if name not in ("README", "index"):
            assert f'href="{name}/"' in home, page


def test_every_public_name_has_its_place_in_the_api(site: Path) -> None:
    api = text_of(site, "api")
    headings = set(re.findall(r'id="hyper_parallel[\w.]*\.(\w+)"', api))
    assert set(hp.__all__) - {"__version__"} <= headings
    assert "Run <code>function(*args, **kwargs)</code> and keep only what" in api
    assert ":class:" not in api


def test_measurements_are_those_of_the_results(site: Path) -> None:
    page = text_of(site, "performance")
    bars = (ROOT / "benchmarks/results/frontier_h200_202611.md").read_text()
    rows = [line for line in bars.partition("## The bars")[2].splitlines() if line.startswith("| 8192")]
    assert rows
    for row in rows:
        assert f"<td>{row.split('|')[2].strip()}</td>" in page
    for result in (ROOT / "benchmarks/results").glob("*.md"):
        assert f'href="../benchmarks/results/{result.stem}/"' in page
        assert (site / "benchmarks/results" / result.stem / "index.html").is_file()
    assert (site / "benchmarks/results/frontier_h200_202611.json").is_file()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("index.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert loaded == [], page


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("<!-- results: nowhere.md -->", r"cannot show the result nowhere\.md, because there is no such file; known are disk"),
        ("<!-- results: overhead_cpu_202611.md # Moon -->", r"cannot show 'Moon' of overhead_cpu_202611\.md, .* no such section"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_filled_ends_the_build(place: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        docs_results.filled(f"before\n\n{place}\n")


def test_a_place_is_filled_with_its_section_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_results, "RESULTS", tmp_path)
    text = "# Title\n\nFirst.\n\n## Table\n\n[raw](a.json), [other](https://x.org)\n\n### Deeper\n\nLast.\n"
    (tmp_path / "a.md").write_text(text)
    assert docs_results.filled("a\n<!-- results: a.md # Deeper -->\nb") == "a\nLast.\nb"
    assert docs_results.filled("<!-- results: a.md -->") == "First."
    assert (
        docs_results.filled("<!-- results: a.md # Table -->")
        == "[raw](benchmarks/results/a.json), [other](https://x.org)"
    )
    assert docs_results.filled("<!-- results: all -->") == "* [Title](benchmarks/results/a.md)"


def test_links_out_of_the_docs_become_words() -> None:
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="trust.md"))
    text = "[a log](../benchmarks/results/a.log), [the policy](../SECURITY.md), [choose](choose.md)"
    assert docs_results.on_page_markdown(text, page) == (
        "[a log](benchmarks/results/a.log), the policy (`SECURITY.md`), [choose](choose.md)"
    )


def test_docstrings_become_markdown() -> None:
    assert docs_roles.as_markdown("See :class:`~a.B` and :func:`c`.") == "See `a.B` and `c`."
    assert (
        docs_roles.as_markdown("Tree.\n\n::\n\n    a\n      b\n\nEnd.")
        == "Tree.\n\n```text\n    a\n      b\n```\n\nEnd."
    )


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_the_front_pages_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
