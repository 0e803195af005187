"""The API pages' extension: docstrings say ``:class:`Name``` and ``::``; the site reads Markdown."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?\.?([^`]+)`")
_DRAWING = re.compile(r"^::\n\n((?:(?:    .*)?\n)*(?:    .*)?)", re.MULTILINE)


def as_markdown(text: str) -> str:
    """A docstring's text as Markdown."""
    text = _ROLE.sub(r"`\1`", text)
    return _DRAWING.sub(lambda match: f"```text\n{match.group(1).rstrip()}\n```\n\n", text)


class Roles(Extension):
    """Rewrites every docstring once."""

    def on_object(self, *, obj: Any, **_: Any) -> None:  # griffe.Object
        """An object was found."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
