"""List what autograd saves in one step of your own model: bytes by module and line of source code, largest first.

The step runs once; the model is as it was afterwards. Storages are counted once, weights apart.

Example::

  hyper-parallel saved train:make_model --rows 10
"""

from __future__ import annotations

import argparse
import dataclasses

from hyper_parallel.cli.console import Console
from hyper_parallel.cli.factory import add_factory_argument, built_model, positive
from hyper_parallel.planner.backend import planner_backend

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    add_factory_argument(parser)
    parser.add_argument("--rows", type=positive, default=20, metavar="N", help="how many are shown (default 20)")


def run(args: argparse.Namespace, console: Console) -> int:
    """The command."""
    model, step = built_model(args.factory)
    table = planner_backend().list_saved(model, step)
    console.data({**dataclasses.asdict(table), "total_bytes": table.total_bytes, "total_count": table.total_count})
    heads, *rows = table.cells(args.rows)
    console.table(f"Saved by {args.factory}", heads, rows, words=(2, 3, 4))
    for line in table.closing_lines(args.rows):
        console.say(line)
    return 0
