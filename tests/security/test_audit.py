"""The audit of our packages: what fails the check, and what must not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(_ROOT / "scripts")])
    import audit

    return audit


def _package(name: str, *known: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": list(known)}


_KNOWN = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["1.1"]}


def test_a_vulnerability_of_our_own_pin_fails_and_says_what_to_do(audit: Any) -> None:
    status, lines = audit.verdict([_package("Safe_Tensors", _KNOWN), _package("other")], {"safe-tensors"}, {})
    assert status == 1
    assert lines == [
        "audit: safe-tensors 1.0 has PYSEC-1; raise its pin to a fixed release (1.1), or accept it by id in scripts/audit.py "
        "with the reason",
        "audit: 2 of 2 installed packages were looked up",
    ]


def test_one_that_only_came_along_is_shown(audit: Any) -> None:
    status, lines = audit.verdict([_package("pip", {"id": "PYSEC-2", "fix_versions": []})], {"numpy"}, {})
    assert status == 0
    assert lines[0].startswith("audit: pip 1.0 has PYSEC-2 (it only came along; not our pin); no release fixes it yet")


def test_one_that_was_accepted_by_any_of_its_names_is_silent(audit: Any) -> None:
    status, lines = audit.verdict([_package("numpy", _KNOWN)], {"numpy"}, {"CVE-1": "does not concern us"})
    assert (status, len(lines)) == (0, 1)


def test_an_index_that_knows_nothing_is_named(audit: Any) -> None:
    status, lines = audit.verdict([{"name": "numpy", "skip_reason": "not found"}], {"numpy"}, {})
    assert (status, lines) == (0, ["audit: skipped; because the index in reach knows none of the installed packages"])


def test_what_we_ask_for_is_read_from_our_own_files(audit: Any) -> None:
    asked = audit._asked_for()
    assert {"torch", "numpy", "safetensors", "hypothesis", "mindspore", "pip-audit"} <= asked
    assert audit.named_packages(["# no\nPy_Test.X>=1  # yes\n\n"]) == {"py-test-x"}


def test_without_a_network_the_check_goes_on(tmp_path: Path) -> None:
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    environment = {**os.environ, **nowhere, "https_proxy": nowhere["HTTPS_PROXY"], "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(_ROOT / "scripts" / "audit.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("audit: skipped; because ")
