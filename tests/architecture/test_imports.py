"""Who imports whom: the table of docs/architecture.md, compared with the imports in the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel

ROOT = Path(hyper_parallel.__file__).parent
FRAMEWORKS = {"torch", "mindspore", "transformers"}
PAGE = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")


def import_table() -> dict[str, set[str]]:
    """For every package, what its row in docs/architecture.md names, and the package itself."""
    section = PAGE.split("\n## Packages and who imports whom\n", 1)[1].split("\n## ", 1)[0]
    found: dict[str, set[str]] = {}
    for line in section.split("\n"):
        if line.startswith("| `"):
            packages, allowed, _ = line.strip("|").split("|")
            for package in re.findall(r"`([\w.]+)`", packages):
                assert package not in found, f"{package} has two rows"
                found[package] = {package, *re.findall(r"`([\w.]+)`", allowed)}
    return found


MAY_IMPORT = import_table()
FILES = sorted(ROOT.rglob("*.py"))


class _WithoutTypeChecking(ast.NodeTransformer):
    """Drops the imports that only a type checker makes."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def imported_modules(path: Path, *, at_run_time: bool = False) -> list[str]:
    found = []
    tree = ast.parse(path.read_text())
    for node in ast.walk(_WithoutTypeChecking().visit(tree) if at_run_time else tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module)
    return found


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_imports_only_what_it_may(path: Path) -> None:
    package = package_of(path)
    trainers = imported_modules(path, at_run_time=True) if package == "integrations" else None
    for module in imported_modules(path):
        top = module.split(".")[0]
        if top in FRAMEWORKS and (trainers is None or module in trainers):
            assert package in ("platform", "backends"), f"{path} imports {module}; only platform/ and backends/ may"
            framework = path.relative_to(ROOT).parts[1]
            assert framework == top, f"{path} imports {module} outside {package}/{top}/"
        if top == "hyper_parallel" and module != "hyper_parallel":
            target = module.removeprefix("hyper_parallel.")
            allowed = MAY_IMPORT[package]
            assert any(target == name or target.startswith(name + ".") for name in allowed), (
                f"{path} ({package}) imports {module}; it may import {sorted(allowed)}"
            )


def test_every_package_has_a_row() -> None:
    assert set(MAY_IMPORT) == {package_of(path) for path in FILES}


def test_the_table_lets_nothing_import_upward() -> None:
    assert "report" not in MAY_IMPORT["planner"]
    assert "planner" not in MAY_IMPORT["report"]
    assert MAY_IMPORT["records"] == {"records", "errors", "fates"}
    assert not {"cli", "integrations"} & set().union(*(MAY_IMPORT[name] - {name} for name in MAY_IMPORT))


def test_the_rule_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import torch.nn\nfrom hyper_parallel.cli import demo\n")
    assert imported_modules(bad) == ["torch.nn", "hyper_parallel.cli"]
    bad.write_text("if TYPE_CHECKING:\n    import torch.nn\nelse:\n    import transformers\n")
    assert imported_modules(bad) == ["torch.nn", "transformers"]
    assert imported_modules(bad, at_run_time=True) == ["transformers"]


def run_fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600).stdout


def test_importing_the_package_imports_no_framework() -> None:
    code = (
        "import sys, hyper_parallel, hyper_parallel.platform, hyper_parallel.testing, hyper_parallel.core.overlap;"
        "[getattr(hyper_parallel, name) for name in hyper_parallel.__all__];"
        "hyper_parallel.CheckpointPolicy, hyper_parallel.SwapManager, hyper_parallel.configure, hyper_parallel.stats();"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'mindspore', 'numpy'}))"
    )
    assert run_fresh(code).strip() == "[]"


PUBLIC_NAMES = """
Card CheckpointPolicy Estimate HyperParallelError ModelShape Plan Profile SwapConfig SwapManager SwapStats __version__ apply_plan
apply_rules checkpoint checkpoint_wrapper configure estimate fit_memory get_platform list_ops plan_memory print_saved
profile_memory stats swap swap_tensor_wrapper swap_wrapper
"""


def test_the_public_names_are_these_and_each_of_them_resolves() -> None:
    names = hyper_parallel.__all__
    assert names == sorted(PUBLIC_NAMES.split())
    assert set(names) <= set(dir(hyper_parallel))
    for name in names:
        assert getattr(hyper_parallel, name) is not None
    everything: dict[str, object] = {}
    exec("from hyper_parallel import *", everything)
    assert set(names) <= set(everything)
    for function in ("swap", "checkpoint", "swap_wrapper", "checkpoint_wrapper", "swap_tensor_wrapper", "stats"):
        assert callable(getattr(hyper_parallel, function))


def test_importing_the_package_imports_no_other_module_of_it() -> None:
    code = (
        "import sys, hyper_parallel; print(sorted(name for name in sys.modules if name.startswith('hyper_parallel')))"
    )
    assert run_fresh(code).strip() == "['hyper_parallel', 'hyper_parallel._version']"


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute .swop.; did you mean swap\? It has .*swap_wrapper"):
        hyper_parallel.swop  # noqa: B018
