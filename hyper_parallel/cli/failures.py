"""The errors of the command line, by exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hyper_parallel.errors import HyperParallelError

__all__ = ["CommandError", "UsageError", "did_you_mean"]


class CommandError(HyperParallelError):
    """The command was understood and could not be done: exit code 1."""


class UsageError(HyperParallelError):
    """The command was not understood: exit code 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean demo?``, to be put behind a message; nothing where ``word`` is known or nothing is near it."""
    names = list(known)
    close = [] if word in names else difflib.get_close_matches(word, names, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""
