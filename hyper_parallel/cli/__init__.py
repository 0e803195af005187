"""The command line: one file per command. A user's mistake ends in a message and an exit code, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. The commands are imported here, so that Ctrl-C while they are is no traceback."""
    try:
        from hyper_parallel.cli.command_line import main as run

        return run(arguments)
    except KeyboardInterrupt:
        print("hyper-parallel: interrupted", file=sys.stderr)
        return 130
