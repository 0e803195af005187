"""Who imports whom: the table of docs/architecture.md, read from the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel

ROOT = Path(hyper_parallel.__file__).parent
FRAMEWORKS = {"torch", "mindspore", "transformers"}
MAY_IMPORT = {
    "errors": set(),
    "fates": set(),
    "config": {"errors"},
    "_version": set(),
    "core": {"fates", "errors", "config", "core", "platform.platform", "platform.eager"},
    "simulation": {"fates", "errors", "config", "core", "simulation"},
    "testing": {"fates", "errors", "config", "core", "simulation", "testing"},
    "platform": {"fates", "_version", "errors", "config", "core", "platform", "backends"},
    "backends": {"fates", "_version", "errors", "config", "core", "simulation", "planner", "platform", "backends"},
    "planner": {"fates", "errors", "config", "planner", "platform.platform"},
    "report": {"fates", "errors", "config", "report"},
    "cli": {
        "fates",
        "errors",
        "config",
        "core",
        "simulation",
        "testing",
        "platform",
        "backends",
        "planner",
        "report",
        "cli",
        "_version",
    },
    "integrations": {"fates", "errors", "config", "core", "platform", "backends", "planner", "report", "integrations"},
    "__init__": {"fates", "errors", "config", "core", "platform", "planner", "report", "_version"},
}
FILES = sorted(ROOT.rglob("*.py"))


def imported_modules(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module)
    return found


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = room_of(path)
    for module in imported_modules(path):
        top = module.split(".")[0]
        if top in FRAMEWORKS:
            assert room in ("platform", "backends"), f"{path} imports {module}; only platform/ and backends/ may"
            framework = path.relative_to(ROOT).parts[1]
            assert framework == top, f"{path} imports {module} outside {room}/{top}/"
        if top == "hyper_parallel" and module != "hyper_parallel":
            target = module.removeprefix("hyper_parallel.")
            allowed = MAY_IMPORT[room]
            assert any(target == name or target.startswith(name + ".") for name in allowed), (
                f"{path} ({room}) imports {module}; it may import {sorted(allowed)}"
            )


def test_the_rule_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import torch.nn\nfrom hyper_parallel.cli import demo\n")
    assert imported_modules(bad) == ["torch.nn", "hyper_parallel.cli"]


def run_fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600).stdout


def test_importing_the_package_imports_no_framework() -> None:
    code = (
        "import sys, hyper_parallel, hyper_parallel.platform, hyper_parallel.testing, hyper_parallel.core.overlap;"
        "hyper_parallel.CheckpointPolicy, hyper_parallel.SwapManager, hyper_parallel.configure, hyper_parallel.stats();"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'mindspore', 'numpy'}))"
    )
    assert run_fresh(code).strip() == "[]"


def test_every_name_of_the_door_resolves() -> None:
    names = hyper_parallel.__all__
    assert sorted(names) == sorted(set(names))
    assert set(names) <= set(dir(hyper_parallel))
    for name in names:
        assert getattr(hyper_parallel, name) is not None
    for function in ("swap", "checkpoint", "swap_wrapper", "checkpoint_wrapper", "swap_tensor_wrapper", "stats"):
        assert callable(getattr(hyper_parallel, function))


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute .swop.; it has .*swap_wrapper"):
        hyper_parallel.swop  # noqa: B018
