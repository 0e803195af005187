"""``hyper-parallel``: reads the command line, calls one command, turns errors into words and exit codes.

Exit codes: 0 done, 1 could not be done, 2 not understood, 130 interrupted, 143 told to end (SIGTERM). A command that is told
to end ends its child processes and removes its temporary folders first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, Final, NoReturn

from hyper_parallel._version import __version__
from hyper_parallel.cli import bench, completion, demo, doctor, estimate, explain, plan, profile, report, saved
from hyper_parallel.cli.console import Console
from hyper_parallel.cli.failures import UsageError, did_you_mean
from hyper_parallel.cli.framework import asked_platform
from hyper_parallel.errors import HyperParallelError

__all__ = ["COMMANDS", "build_parser", "main"]

COMMANDS: Final[tuple[tuple[str, ModuleType], ...]] = (
    ("demo", demo),
    ("doctor", doctor),
    ("estimate", estimate),
    ("saved", saved),
    ("profile", profile),
    ("plan", plan),
    ("explain", explain),
    ("report", report),
    ("bench", bench),
    ("completion", completion),
)


class _Terminated(BaseException):
    """SIGTERM came."""


@dataclasses.dataclass
class _Heard:
    """Whether Ctrl-C came. Packages that are interrupted while they are imported may raise another error instead."""

    is_interrupted: bool = False


class _Parser(argparse.ArgumentParser):
    """Says what a mistyped command or option may have meant."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; the words are remembered for the message of an error."""
        self._given = tuple(args) if args is not None else tuple(sys.argv[1:])
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message with near misses, and exit."""
        super().error(message + self._near(message))

    def _near(self, message: str) -> str:
        """What the words may have meant that argparse complains of; a required option may be there, mistyped."""
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        chosen = re.search(r"argument ([^:]+): invalid choice: '([^']*)'", message)
        if chosen:
            return did_you_mean(chosen[2], self._choices_of(chosen[1]))
        if "unrecognized arguments: " in message:
            words = message.partition("unrecognized arguments: ")[2].split()
        elif "arguments are required: " in message:
            words = [*self._given]
        else:
            return ""
        for word in (word.partition("=")[0] for word in words if word.startswith("--")):
            near = did_you_mean(word, options)
            if near:
                return near if word in message else f"; there is no option {word}{near}"
        return ""

    def _choices_of(self, label: str) -> list[str]:
        """The values of the argument that argparse calls ``label``: ``--size``, or ``COMMAND``."""
        for action in self._actions:
            if label in ("/".join(action.option_strings), action.metavar, action.dest):
                return [str(choice) for choice in action.choices or ()]
        return []


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
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
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    parsed = _parsed(arguments)
    console = Console(is_json=getattr(parsed, "json", False))
    heard = _Heard()
    try:
        with _ended_by_signal(heard), asked_platform(getattr(parsed, "platform", None)):
            code = int(parsed.run(parsed, console))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _interrupted(parsed.command)
    except _Terminated:
        print(f"hyper-parallel {parsed.command}: told to end", file=sys.stderr)
        return 143
    except Exception as error:
        if heard.is_interrupted:
            return _interrupted(parsed.command)
        if not isinstance(error, HyperParallelError | ValueError | TypeError | OSError):
            raise
        if parsed.traceback:
            traceback.print_exc()
        print(f"hyper-parallel {parsed.command}: {_message_of(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _interrupted(command: str) -> int:
    print(f"hyper-parallel {command}: interrupted", file=sys.stderr)
    return 130


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, read. An option that the chosen command does not know is checked by that command's own parser."""
    parser = build_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        command: argparse.ArgumentParser = parsed.parser
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed


@contextlib.contextmanager
def _ended_by_signal(heard: _Heard) -> Iterator[None]:
    """SIGTERM raises inside, so that every ``with`` and ``finally`` of the command runs. Only the main thread may ask for it.

    Ctrl-C raises as always, and is written down in ``heard``. Where it is ignored, as in a shell's background job, it stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise _Terminated

    def interrupt(number: int, frame: FrameType | None) -> None:
        heard.is_interrupted = True
        signal.default_int_handler(number, frame)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, end)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _message_of(error: BaseException) -> str:
    """The message of an error; an error of the system gets the name of the file."""
    if isinstance(error, OSError) and not isinstance(error, HyperParallelError) and error.filename is not None:
        return f"cannot open {error.filename}: {error.strerror}"
    return str(error)
