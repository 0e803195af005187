"""Known vulnerabilities of the packages that this project asks for, as one command of `make check`.

    python scripts/audit.py

It asks the package index through pip-audit. Without an answer in time it says so by name and lets the check go on: a
network's trouble is no vulnerability. A known one in a package that `requirements/` or `pyproject.toml` names fails; one in a
package that only came along is shown. Exit status: 0 nothing known, or nobody to ask; 1 something must be done.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 25
ACCEPTED: dict[str, str] = {}  # by id of the vulnerability: why it does not concern us


def named_packages(texts: Iterable[str]) -> set[str]:
    """Packages that requirement lines name, in the index's spelling."""
    lines = (line.split("#")[0].strip() for text in texts for line in text.splitlines())
    matches = (re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line) for line in lines)
    return {re.sub(r"[-_.]+", "-", match.group()).lower() for match in matches if match}


def _asked_for() -> set[str]:
    texts = [path.read_text() for path in sorted((ROOT / "requirements").glob("*.txt"))]
    project = (ROOT / "pyproject.toml").read_text()
    quoted = re.findall(r'"([A-Za-z0-9._-]+)\s*(?:[<>=!~][^"]*)?"', project)
    return named_packages([*texts, "\n".join(quoted), "torch"])


def verdict(dependencies: list[dict[str, Any]], asked_for: set[str], accepted: dict[str, str]) -> tuple[int, list[str]]:
    """The exit status and what to print, from pip-audit's own list."""
    audited = [dependency for dependency in dependencies if "vulns" in dependency]
    if not audited:
        return 0, ["audit: skipped; because the index in reach knows none of the installed packages"]
    status, lines = 0, []
    for dependency in audited:
        name = re.sub(r"[-_.]+", "-", dependency["name"]).lower()
        for known in dependency["vulns"]:
            names = {known["id"], *known.get("aliases", ())}
            if names & set(accepted):
                continue
            fixed = ", ".join(known.get("fix_versions", ())) or None
            cure = f"raise its pin to a fixed release ({fixed})" if fixed else "no release fixes it yet: replace it"
            place = "" if name in asked_for else " (it only came along; not our pin)"
            lines.append(
                f"audit: {name} {dependency['version']} has {known['id']}{place}; {cure}, or accept it by id in "
                "scripts/audit.py with the reason"
            )
            status |= name in asked_for
    lines.append(f"audit: {len(audited)} of {len(dependencies)} installed packages were looked up")
    return int(status), lines


def main() -> int:
    """The command."""
    if importlib.util.find_spec("pip_audit") is None:
        print("audit: skipped; because pip-audit is not installed; `make install` installs it")
        return 0
    command = [sys.executable, "-m", "pip_audit", "--local", "--progress-spinner", "off", "--timeout", "5"]
    try:
        done = subprocess.run(
            [*command, "--format", "json"], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        dependencies = json.loads(done.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        print(f"audit: skipped; because the index did not answer within {LIMIT_S} s")
        return 0
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"audit: skipped; because the index is not in reach ({last[:200]})")
        return 0
    status, lines = verdict(dependencies, _asked_for(), ACCEPTED)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
