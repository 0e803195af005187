"""The command line: one file per command. A user's mistake ends in a message and an exit code, without a traceback."""

from hyper_parallel.cli.main import main

__all__ = ["main"]
