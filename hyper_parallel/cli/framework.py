"""Which framework a command runs on: the one that is asked for, else that of the model, else the library's own choice."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
from collections.abc import Iterator
from typing import Any, Final

from hyper_parallel.cli.failures import CommandError
from hyper_parallel.planner.backend import framework_in_use
from hyper_parallel.platform import platform as platforms
from hyper_parallel.platform.platform import (
    HYPER_PARALLEL_PLATFORM,
    HYPER_PARALLEL_PLATFORM_MINDSPORE,
    HYPER_PARALLEL_PLATFORM_TORCH,
    get_mindspore_platform,
    get_torch_platform,
)

__all__ = [
    "FRAMEWORKS",
    "add_platform_argument",
    "asked_framework",
    "asked_platform",
    "not_chosen",
    "require_framework",
    "use_model",
]

FRAMEWORKS: Final = (HYPER_PARALLEL_PLATFORM_TORCH, HYPER_PARALLEL_PLATFORM_MINDSPORE)
_CREATE: Final = {
    HYPER_PARALLEL_PLATFORM_TORCH: get_torch_platform,
    HYPER_PARALLEL_PLATFORM_MINDSPORE: get_mindspore_platform,
}


def add_platform_argument(parser: argparse.ArgumentParser) -> None:
    """``--platform``."""
    parser.add_argument(
        "--platform",
        choices=FRAMEWORKS,
        help=f"the framework; by default what {HYPER_PARALLEL_PLATFORM} names, else the model's, else the one that is installed",
    )


def asked_framework() -> str:
    """What the environment names, in small letters; empty: nothing."""
    return os.environ.get(HYPER_PARALLEL_PLATFORM, "").strip().lower()


@contextlib.contextmanager
def asked_platform(name: str | None) -> Iterator[None]:
    """Inside, ``--platform`` holds for this process and those that it starts; None: nothing was asked for."""
    if name is None:
        yield
        return
    before, cached = os.environ.get(HYPER_PARALLEL_PLATFORM), platforms.platform
    os.environ[HYPER_PARALLEL_PLATFORM], platforms.platform = name, None
    try:
        yield
    finally:
        platforms.platform = cached
        if before is None:
            del os.environ[HYPER_PARALLEL_PLATFORM]
        else:
            os.environ[HYPER_PARALLEL_PLATFORM] = before


def require_framework() -> str:
    """The framework in use; an error with the command that installs one where there is none."""
    try:
        return framework_in_use()
    except ImportError as error:
        raise CommandError(str(error)) from None


def not_chosen() -> str:
    """A sentence for a command without a model, where both frameworks are installed and neither was asked for; else empty."""
    if asked_framework() or not all(map(_is_installed, FRAMEWORKS)):
        return ""
    used = require_framework()
    (other,) = (name for name in FRAMEWORKS if name != used)
    return f"both frameworks are installed, and this ran on {used}; --platform {other} runs it on the other one"


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def use_model(factory: str, model: Any) -> None:
    """Run on the framework that the model belongs to. Another one that was asked for by name is an error."""
    of_model = _framework_of(model)
    asked = asked_framework()
    if of_model is None or not asked:
        if of_model is not None:
            _CREATE[of_model]()
        require_framework()
    elif asked in FRAMEWORKS and asked != of_model:
        raise CommandError(
            f"{factory} makes a model of {of_model}, and --platform or {HYPER_PARALLEL_PLATFORM} says {asked}; leave that out, "
            f"or give --platform {of_model}"
        )
    else:
        require_framework()


def _framework_of(model: Any) -> str | None:
    """By the classes that the model's class is made of; nothing is imported for it."""
    packages = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    return next((name for name in FRAMEWORKS if name in packages), None)
