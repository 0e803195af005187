"""The site's hook for the command line: ``<!-- command: NAME -->`` is replaced by what ``hyper-parallel NAME --help`` says."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Mapping
from typing import Any

from hyper_parallel.cli.command_line import build_parser

_PLACE = re.compile(r"<!-- command: (?P<name>[\w-]+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the places of a page."""
    return _PLACE.sub(lambda place: f"```text\n{help_of(place['name'])}```", markdown)


def help_of(name: str) -> str:
    """The help of one command, as wide as a page."""
    commands = subcommands(build_parser())
    if name not in commands:
        raise ValueError(
            f"docs: cannot show the command {name!r}, because there is none; known are {', '.join(commands)}"
        )
    command = commands[name]
    command.formatter_class = functools.partial(argparse.RawDescriptionHelpFormatter, width=90)
    return command.format_help()


def subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of the commands, by name."""
    found: Mapping[str, argparse.ArgumentParser] = next(
        action.choices
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)  # argparse has no public way
    )
    return found
