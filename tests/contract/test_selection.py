"""Choosing the platform: each rule in a fresh process, because the choice and the imports belong to a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel.platform.platform as platform_module
from hyper_parallel.platform import get_platform, get_torch_platform

FAKE_MINDSPORE = "class Tensor: pass\n"


def fresh(code: str, *, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter; ``path`` is searched for modules before everything else."""
    clean = {name: value for name, value in os.environ.items() if name != "HYPER_PARALLEL_PLATFORM"}
    entries = [str(path)] if path is not None else []
    clean["PYTHONPATH"] = os.pathsep.join([*entries, *(entry for entry in sys.path if entry)])
    return subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:hyper_parallel", "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def says(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    "module", ["hyper_parallel.platform", "hyper_parallel.platform.platform", "hyper_parallel.core.overlap"]
)
def test_importing_imports_no_framework(module):
    code = f"import sys, {module}; print([name for name in ('torch', 'mindspore', 'numpy') if name in sys.modules])"
    assert says(fresh(code)) == "[]"


@pytest.mark.parametrize("value", ["tensorflow", "torch,mindspore"])
def test_an_unknown_platform_lists_the_two(value, monkeypatch):
    monkeypatch.setattr(platform_module, "platform", None)
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", value)
    with pytest.raises(ValueError, match=rf"cannot choose '{value}', .* set it to one of torch, mindspore"):
        get_platform()
    assert platform_module.platform is None


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_means_unset(value, monkeypatch):
    monkeypatch.setattr(platform_module, "platform", None)
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", value)
    monkeypatch.setattr(platform_module, "_imports", lambda framework: framework == "torch")
    monkeypatch.setattr(platform_module, "get_torch_platform", lambda: "the torch platform")
    assert get_platform() == "the torch platform"


@pytest.mark.parametrize("value", ["torch", "TORCH", "Torch"])
def test_the_environment_names_torch_in_any_case(value, monkeypatch):
    monkeypatch.setattr(platform_module, "platform", None)
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", value)
    chosen = get_platform()
    assert type(chosen).__name__ == "TorchPlatform"
    assert chosen.platform_type is platform_module.PlatformType.PYTORCH
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "mindspore")
    assert get_platform() is get_torch_platform() is platform_module.platform is chosen


def test_mindspore_comes_first_when_it_imports(tmp_path):
    (tmp_path / "mindspore.py").write_text(FAKE_MINDSPORE)
    code = (
        "import hyper_parallel.platform.platform as p\n"
        "p.get_mindspore_platform = lambda: 'the MindSpore platform'\n"
        "print(p.get_platform())"
    )
    assert says(fresh(code, path=tmp_path)) == "the MindSpore platform"


def test_torch_comes_next_when_mindspore_does_not_import(tmp_path):
    (tmp_path / "mindspore.py").write_text("raise ImportError('no library')")
    code = "from hyper_parallel.platform import get_platform; print(type(get_platform()).__name__)"
    assert says(fresh(code, path=tmp_path)) == "TorchPlatform"


def test_without_a_framework_the_error_says_how_to_install_each(tmp_path):
    for name in ("mindspore", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    result = fresh("from hyper_parallel.platform import get_platform; get_platform()", path=tmp_path)
    assert result.returncode == 1
    assert "ImportError: get_platform: cannot choose a platform" in result.stderr
    for name in ("torch", "mindspore"):
        assert f"pip install {name}" in result.stderr  # a command that also works for a clone


@pytest.mark.parametrize("environment", [{}, {"HYPER_PARALLEL_PLATFORM": "mindspore"}])
def test_an_import_error_inside_our_backend_is_shown(tmp_path, environment):
    (tmp_path / "mindspore.py").write_text(FAKE_MINDSPORE)
    code = (
        "import sys, importlib.abc\n"
        "class Broken(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'hyper_parallel.platform.mindspore.platform':\n"
        "            raise ImportError('our backend is broken')\n"
        "sys.meta_path.insert(0, Broken())\n"
        "from hyper_parallel.platform import get_platform\n"
        "get_platform()"
    )
    result = fresh(code, path=tmp_path, **environment)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("ImportError: our backend is broken")


def test_the_names_of_the_module():
    assert platform_module.HYPER_PARALLEL_PLATFORM == "HYPER_PARALLEL_PLATFORM"
    assert platform_module.HYPER_PARALLEL_PLATFORM_TORCH == "torch"
    assert platform_module.HYPER_PARALLEL_PLATFORM_MINDSPORE == "mindspore"
    assert [kind.name for kind in platform_module.PlatformType] == ["MINDSPORE", "PYTORCH"]
