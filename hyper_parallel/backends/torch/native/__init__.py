"""The native recorder: a C++ extension that is built once for each torch and Python, and loaded from a cache.

It records tapes, and it answers what the swap engine asks of each saved tensor (``sources.h``, ``copies.h``, ``graph_walk.h``).

Everything works without it. ``load()`` answers None where it is switched off or cannot be built, and ``why_not()`` says why.
``HYPER_PARALLEL_NATIVE=0`` switches it off, ``HYPER_PARALLEL_NATIVE_CACHE`` names another folder for what is built.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["is_wanted", "load", "why_not"]

_LOG = logging.getLogger("hyper_parallel")
_SOURCES = Path(__file__).parent
_NAME = "_hyper_parallel_tape"
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
_FAULTS = "-DHYPER_PARALLEL_FAULTS"
_TEST_BUILDS = {
    "faults": (_FAULTS,),
    "address": (_FAULTS, "-fsanitize=address", "-g", "-O1", "-fno-omit-frame-pointer"),
    "thread": (_FAULTS, "-fsanitize=thread", "-g", "-O1", "-fno-omit-frame-pointer"),
}
"""Builds for tests, named by ``HYPER_PARALLEL_NATIVE_BUILD``: with named faults (``faults.h``), and with a sanitizer, whose
library the process must load first (``LD_PRELOAD``)."""
_LIBRARIES = ("torch", "torch_cpu", "c10", "torch_python")
_BUILD_TIMEOUT_S = 1800  # a build takes one minute on an idle core
_PROGRESS_S = 20
_SWITCH = "HYPER_PARALLEL_NATIVE"
_SWITCHED_OFF = getattr(os.environ, "encodevalue", str)("0")
_ENCODED_SWITCH = getattr(os.environ, "encodekey", str)(_SWITCH)


class _CannotBuildError(Exception):
    """Why there is no native recorder on this machine."""


def is_wanted() -> bool:
    """Whether the environment leaves the native recorder on."""
    # Every call of a region asks. os.environ encodes a name and raises for one that is not set; the table behind it does not.
    return getattr(os.environ, "_data", os.environ).get(_ENCODED_SWITCH) != _SWITCHED_OFF


def load() -> Any | None:  # the extension module
    """The native recorder; None where it is switched off or not to be had (see :func:`why_not`)."""
    return _loaded()[0] if is_wanted() else None


def why_not() -> str | None:
    """Why :func:`load` answers None; None when it does not."""
    if not is_wanted():
        return "it is switched off (HYPER_PARALLEL_NATIVE is 0)"
    return _loaded()[1]


@functools.cache
def _loaded() -> tuple[Any | None, str | None]:
    try:
        module = _import(_built())
    except _CannotBuildError as error:
        _LOG.info("hyper_parallel: the native recorder is missing: %s", error)  # the first step's line says it too
        return None, str(error)
    return module, None


def _import(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None, "a loader was given"
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        why = str(error).split("\n", 1)[0]  # torch appends its stack
        raise _CannotBuildError(
            f"what was built for this torch does not load ({why}); it is in {path.parent}"
        ) from error
    return module


def _built() -> Path:
    """The extension's file, which is built if the cache has none for this torch, Python and source."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise _CannotBuildError("this is a free-threaded Python, for which it was not written")
    folder = _cache_folder() / _key()
    target = folder / f"{_NAME}.so"
    if target.exists():
        return target
    log = folder / "build.log"
    if log.exists():
        raise _CannotBuildError(
            f"its build failed before; what the compiler said is in {log}; delete that to try again"
        )
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise _CannotBuildError("there is no C++ compiler (install g++, or name one with CXX)")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise _CannotBuildError(f"Python's headers are missing ({header}); install python3-dev")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of this user wait for the one that builds
            if not target.exists():
                _compile(compiler, target)
    except OSError as error:
        raise _CannotBuildError(f"the cache folder {folder} cannot be used ({error})") from error
    return target


def _flags() -> tuple[str, ...]:
    named = os.environ.get("HYPER_PARALLEL_NATIVE_BUILD", "")
    if named and named not in _TEST_BUILDS:
        raise _CannotBuildError(
            f"HYPER_PARALLEL_NATIVE_BUILD is {named!r}; it may be {', '.join(_TEST_BUILDS)}, or empty"
        )
    return (*_FLAGS, *_TEST_BUILDS.get(named, ()))


def _cache_folder() -> Path:
    named = os.environ.get("HYPER_PARALLEL_NATIVE_CACHE")
    if named:
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hyper_parallel" / "native"
    except RuntimeError as error:  # this user has no home
        raise _CannotBuildError(f"{error}; name a folder with HYPER_PARALLEL_NATIVE_CACHE") from error


def _key() -> str:
    """Names what an extension depends on: the source, torch, Python, the machine, the flags."""
    parts = [torch.__version__, str(torch.version.cuda), str(torch.version.hip), sys.implementation.cache_tag or ""]
    parts += [platform.machine(), *_flags(), str(torch._C._GLIBCXX_USE_CXX11_ABI)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")]):
        digest.update(source.read_bytes())
    return f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def _compile(compiler: str, target: Path) -> None:
    print(
        f"hyper_parallel: building the native recorder for torch {torch.__version__} (once, about a minute) ...",
        file=sys.stderr,
        flush=True,
    )
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *_flags(), f"-DTORCH_EXTENSION_NAME={_NAME}"]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        command += [
            f"-I{home / 'include'}",
            f"-I{home / 'include/torch/csrc/api/include'}",
            f"-I{sysconfig.get_path('include')}",
        ]
        command += [str(_SOURCES / "extension.cpp"), "-o", str(made)]
        command += [f"-L{home / 'lib'}", *(f"-l{name}" for name in _LIBRARIES), f"-Wl,-rpath,{home / 'lib'}"]
        said = Path(folder) / "build.log"
        try:
            status = _run(command, said)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _CannotBuildError(f"{compiler} did not finish ({error})") from error
        if status != 0:
            os.replace(said, target.parent / said.name)
            raise _CannotBuildError(f"{compiler} failed; what it said is in {target.parent / said.name}")
        os.replace(made, target)
    print("hyper_parallel: the native recorder is built.", file=sys.stderr, flush=True)


def _run(command: list[str], said: Path) -> int:
    """Run a build, and print from time to time that it still runs; its exit status."""
    with open(said, "w") as output, subprocess.Popen(command, stdout=output, stderr=output) as build:
        try:
            for seconds in range(_PROGRESS_S, _BUILD_TIMEOUT_S, _PROGRESS_S):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return build.wait(_PROGRESS_S)
                print(f"hyper_parallel: still building, {seconds} s so far ...", file=sys.stderr, flush=True)
            raise subprocess.TimeoutExpired(command[0], _BUILD_TIMEOUT_S)
        except BaseException:
            build.kill()
            raise
