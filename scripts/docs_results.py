"""The site's hook: what was measured is shown from ``benchmarks/results``, never copied by hand.

* The files of ``benchmarks/results`` are part of the site, under the path that pages link to from the repository.
* Links to other files of the repository, which the site does not have, become their words and path.
* ``<!-- results: FILE.md # Heading -->`` in a page is replaced by that section of the file, ``<!-- results: all -->`` by a list
  of what there is. A file or heading that does not exist ends the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_RELATIVE = re.compile(r"\]\((?!\w+://|#)")
_OUTSIDE = re.compile(r"\[(?P<words>[^\]\n]+)\]\(\.\./(?P<path>[^)\n]+)\)")
_PLACE = re.compile(r"<!-- results: (?P<file>[\w.]+)(?: # (?P<heading>[^\n]+?))? -->")


def on_files(files: Any, config: Any, **_: Any) -> Any:  # mkdocs.structure.files.Files
    """Add the results to the site's files."""
    from mkdocs.structure.files import File

    for path in sorted(RESULTS.rglob("*")):
        if path.is_file():
            name = f"benchmarks/results/{path.relative_to(RESULTS).as_posix()}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:  # mkdocs.structure.pages.Page
    """Fill the places, and let links from the repository's folders work on the site."""
    if page.file.src_uri.startswith("benchmarks/results/"):
        return markdown.replace("](../../docs/", "](../../")
    return _OUTSIDE.sub(
        r"\g<words> (`\g<path>`)", filled(markdown).replace("](../benchmarks/results/", "](benchmarks/results/")
    )


def filled(markdown: str) -> str:
    """A page with its places filled from the results."""
    return _PLACE.sub(lambda place: section(place["file"], place["heading"]), markdown)


def section(name: str, heading: str | None) -> str:
    """A section of a result without its heading, everything before the first section, or the list of results."""
    if name == "all":
        return "\n".join(f"* [{_title(path)}](benchmarks/results/{path.name})" for path in sorted(RESULTS.glob("*.md")))
    path = RESULTS / name
    if not path.is_file():
        known = ", ".join(sorted(found.name for found in RESULTS.glob("*.md")))
        raise ValueError(f"docs: cannot show the result {name}, because there is no such file; known are {known}")
    sections = _sections(path.read_text())
    if (heading or "") not in sections:
        known = ", ".join(filter(None, sections))
        raise ValueError(f"docs: cannot show {heading!r} of {name}, because it has no such section; known are {known}")
    return _RELATIVE.sub("](benchmarks/results/", sections[heading or ""]).strip()


def _title(path: Path) -> str:
    return path.read_text().partition("\n")[0].lstrip("# ")


def _sections(text: str) -> dict[str, str]:
    """Heading (without its marks) to text; what stands under the title goes by the empty heading."""
    found, heading = {"": ""}, ""
    for line in text.splitlines()[1:]:
        if re.match(r"#{2,} ", line):
            heading = line.lstrip("# ").strip()
            found[heading] = ""
        else:
            found[heading] += line + "\n"
    return found
