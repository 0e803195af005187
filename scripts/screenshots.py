"""The pictures of the report in the documentation, light and dark, from a report that the demo wrote.

    hyper-parallel demo -o build/demo
    python -m scripts.screenshots build/demo/report.html

Needs Chromium, as the tests of the page do.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.integration.report.browser import CHROMIUM, browser

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def main(report: str) -> None:
    """Open the report twice and keep what is seen."""
    if CHROMIUM is None:
        sys.exit("screenshots: cannot open the report, because there is no chromium here; Debian: apt install chromium")
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as page:
        for theme in ("light", "dark"):
            page.open(Path(report), theme=theme, width=1160)
            page.screenshot(IMAGES / f"report-{theme}.png")
            assert page.problems() == [], page.problems()


if __name__ == "__main__":
    main(*sys.argv[1:])
