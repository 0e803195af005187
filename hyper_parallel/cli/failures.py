"""The errors of the command line, by exit code."""

from hyper_parallel.errors import HyperParallelError

__all__ = ["CommandError", "UsageError"]


class CommandError(HyperParallelError):
    """The command was understood and could not be done: exit code 1."""


class UsageError(HyperParallelError):
    """The command was not understood: exit code 2."""
