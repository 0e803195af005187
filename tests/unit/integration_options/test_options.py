"""What can be read, what is refused, and what is said when a package is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel import integrations
from hyper_parallel.errors import MissingPackageError
from hyper_parallel.integrations import Treatment
from hyper_parallel.integrations.packages import needed

ADAPTERS = ("accelerate", "ddp", "fsdp", "lightning", "peft", "pipelining", "transformers", "trl")


def test_boundary_is_what_one_gets_for_nothing() -> None:
    assert Treatment() == Treatment(what="boundary")
    assert Treatment(budget="20GiB").what is None


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"what": "bondary"}, ValueError, "unknown treatment 'bondary'; known are .*recompute; did you mean boundary"),
        ({"what": "zzz"}, ValueError, "known are boundary, attention, elementwise, auto, swap, recompute$"),
        ({"what": "swap", "budget": "1GiB"}, ValueError, "both say what to do; give one of them"),
        ({"budget": "much"}, ValueError, "much"),
        ({"what": {"mlp": "swap"}}, ValueError, "cannot read the rule 'mlp'"),
        ({"what": 7}, TypeError, "a mapping of rules, a Plan, a policy, or budget=...; got 7"),
    ],
)
def test_bad_options_are_refused_at_once(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Treatment(**options)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(
        MissingPackageError, match=r"^here: cannot work without .*'no_such_trainer'.*pip install no_such_trainer$"
    ):
        needed("no_such_trainer.core", who="here")
    with pytest.raises(ImportError, match="'no_such_trainer'"):
        needed("no_such_trainer", who="here", otherwise="no_such_either")
    assert needed("no_such_trainer", who="here", otherwise="json.decoder").__name__ == "json.decoder"


def test_a_broken_package_raises_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_trainer.py").write_text("import its_own_missing_part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'its_own_missing_part'"):
        needed("broken_trainer", who="here")


@pytest.mark.parametrize("adapter", ["accelerate", "lightning", "peft", "transformers", "trl"])
def test_each_adapter_says_what_to_install(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"hyper_parallel.integrations.{adapter}")
    real = importlib.import_module

    def without(name: str, *args: Any) -> Any:
        if name.partition(".")[0] in (adapter, "pytorch_lightning"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(MissingPackageError, match=f"pip install {adapter}$"):
        module.callback() if hasattr(module, "callback") else module.apply(*[None] * (1 + (adapter == "accelerate")))


def test_importing_the_adapters_imports_no_trainer() -> None:
    code = (
        "import sys, importlib;"
        f"[importlib.import_module('hyper_parallel.integrations.' + name) for name in {ADAPTERS!r}];"
        "print(sorted({name.split('.')[0] for name in sys.modules} & "
        "{'torch', 'transformers', 'trl', 'peft', 'lightning', 'accelerate'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == "[]"


def test_an_adapter_is_under_a_hundred_lines() -> None:
    folder = Path(integrations.__file__).parent
    assert {
        name: len((folder / f"{name}.py").read_text().splitlines())
        for name in ADAPTERS
        if len((folder / f"{name}.py").read_text().splitlines()) >= 100
    } == {}
