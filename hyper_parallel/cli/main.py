"""``hyper-parallel``: reads the command line, calls one command, turns errors into words and exit codes.

Exit codes: 0 done, 1 could not be done, 2 not understood, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Final

from hyper_parallel._version import __version__
from hyper_parallel.cli import bench, completion, demo, doctor, explain, plan, profile, report
from hyper_parallel.cli.console import Console
from hyper_parallel.cli.failures import UsageError
from hyper_parallel.errors import HyperParallelError

__all__ = ["COMMANDS", "build_parser", "main"]

COMMANDS: Final[tuple[tuple[str, ModuleType], ...]] = (
    ("demo", demo),
    ("doctor", doctor),
    ("profile", profile),
    ("plan", plan),
    ("explain", explain),
    ("report", report),
    ("bench", bench),
    ("completion", completion),
)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="hyper-parallel",
        description="Save, recompute or swap every activation of a training step, without changing a gradient.",
        epilog="example: hyper-parallel demo",
    )
    parser.add_argument("--version", action="version", version=f"hyper-parallel {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS:
        words, _, example = (module.__doc__ or "").partition("\n\nExample::\n\n")
        command = commands.add_parser(
            name,
            help=words.split("\n", 1)[0],
            description=words,
            epilog=f"example:\n{example.rstrip()}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        if name != "completion":
            command.add_argument("--json", action="store_true", help="print one JSON value and nothing else")
        command.add_argument("--traceback", action="store_true", help="show where an error came from")
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    parsed = build_parser().parse_args(arguments)
    console = Console(is_json=getattr(parsed, "json", False))
    try:
        code = int(parsed.run(parsed, console))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"hyper-parallel {parsed.command}: interrupted", file=sys.stderr)
        return 130
    except (HyperParallelError, ValueError, TypeError, OSError) as error:
        if parsed.traceback:
            traceback.print_exc()
        print(f"hyper-parallel {parsed.command}: {_message_of(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _message_of(error: BaseException) -> str:
    """The message of an error; an error of the system gets the name of the file."""
    if isinstance(error, OSError) and not isinstance(error, HyperParallelError) and error.filename is not None:
        return f"cannot open {error.filename}: {error.strerror}"
    return str(error)
