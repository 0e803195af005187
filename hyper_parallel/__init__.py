"""Save, recompute or swap every activation of a training step, without changing a gradient.

The public names are those of ``hyper_parallel/public_names.py``, which is imported when the first of them is used. Importing
this package alone imports nothing else, and no public name imports a framework before it is called.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from hyper_parallel._version import __version__ as __version__

if TYPE_CHECKING:  # type checkers and editors read the names; Python finds each of them at its first use
    from hyper_parallel.public_names import *  # noqa: F403
else:

    def _public_names() -> list[str]:
        module = importlib.import_module("hyper_parallel.public_names")
        return sorted(name for name in vars(module) if not name.startswith("_") or name == "__version__")

    def __getattr__(name: str) -> object:
        if name == "__all__":
            return _public_names()
        if not name.startswith("_") and name in _public_names():
            value = globals()[name] = getattr(importlib.import_module("hyper_parallel.public_names"), name)
            return value
        message = f"module 'hyper_parallel' has no attribute {name!r}"
        if not name.startswith("_"):
            near = difflib.get_close_matches(name, _public_names(), n=1)
            message += f"; did you mean {near[0]}? It has " if near else "; it has "
            message += ", ".join(_public_names())
        raise AttributeError(message)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_public_names()})
