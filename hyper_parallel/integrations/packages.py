"""Packages of others, imported when an adapter is used, with an error that says what to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from hyper_parallel.errors import MissingPackageError

__all__ = ["needed"]


def needed(module: str, *, who: str, otherwise: str | None = None) -> ModuleType:
    """The module of that name, or of the name ``otherwise``.

    Raises:
        MissingPackageError: its package is not installed. A package that is there and fails to import raises its own error.
    """
    for name in (module, otherwise):
        if name is None:
            continue
        package = name.partition(".")[0]
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != package:
                raise
    package = module.partition(".")[0]
    raise MissingPackageError(
        f"{who}: cannot work without the package {package!r}, because it is not installed here. Install it: pip install {package}"
    )
