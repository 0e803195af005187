"""A user's model, named on the command line as ``MODULE:FACTORY``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hyper_parallel.cli.failures import CommandError, UsageError, did_you_mean
from hyper_parallel.cli.framework import add_platform_argument, use_model
from hyper_parallel.config import current_config
from hyper_parallel.errors import HyperParallelError

__all__ = [
    "add_factory_argument",
    "add_model_arguments",
    "built_model",
    "positive",
    "require_writable",
    "simulated_where_asked",
]

_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")  # measuring knows what to do with these


def add_factory_argument(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """``MODULE:FACTORY``, and which framework it is of."""
    parser.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        nargs="?" if is_optional else None,
        help="a function without arguments that returns (model, step); step() runs one forward and backward",
    )
    add_platform_argument(parser)


def add_model_arguments(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """``MODULE:FACTORY`` and what goes with it."""
    add_factory_argument(parser, is_optional=is_optional)
    parser.add_argument(
        "--blocks", action="append", metavar="PATTERN", help="modules to treat as blocks: 'model.layers.*'"
    )
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="how many steps are timed (default 3)")
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="count bytes on the simulated accelerator, for models on the CPU; times are then the host's",
    )


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def require_writable(*paths: str | None) -> None:
    """Files that could not be written are named before anything is measured, not after."""
    for path in paths:
        if path is None:
            continue
        folder = os.path.dirname(path) or "."
        if os.path.isdir(path):
            raise CommandError(f"cannot write {path}: it is a folder; name a file in it")
        if not os.path.isdir(folder):
            raise CommandError(f"cannot write {path}: there is no folder {folder}; make it first")
        if not os.access(folder, os.W_OK):
            raise CommandError(f"cannot write {path}: writing into {folder} is not permitted")


def built_model(name: str) -> tuple[Any, Callable[[], Any]]:
    """The model and the step that ``MODULE:FACTORY`` names; from here on its framework is the one in use."""
    path, _, attribute = name.partition(":")
    if not path or not attribute:
        raise UsageError(
            f"cannot read {name!r}; write MODULE:FACTORY, such as train:make_model for make_model() in train.py"
        )
    if path.endswith(".py") or os.sep in path:
        raise UsageError(
            f"{path!r} is a file; name the module instead, from the folder that holds it: "
            f"{os.path.basename(path).removesuffix('.py')}:{attribute}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(f"{error.name}.")):
            raise CommandError(
                f"there is no module {path!r} here or on the path; run this where {path} can be imported"
            ) from None
        raise CommandError(f"{path} cannot be imported, because it needs {error.name!r}: {error}") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything, and a script without a guard exits
        raise CommandError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        known = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        near = did_you_mean(attribute, known)
        raise CommandError(
            f"{path} has no function {attribute!r}{near or ';'} it has {', '.join(known[:12]) or 'none'}"
        )
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise CommandError(f"{name}() raised {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[1]):
        raise CommandError(
            f"{name}() must return (model, step), where step() runs one forward and backward; got {type(made).__name__}"
        )
    model, step = made
    use_model(name, model)
    return model, _named_step(name, step)


def _named_step(name: str, step: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        try:
            return step()
        except HyperParallelError:
            raise
        except Exception as error:
            if type(error).__name__ in _OUT_OF_MEMORY:
                raise
            raise CommandError(f"the step of {name} raised {type(error).__name__}: {error}") from error

    return run


@contextlib.contextmanager
def simulated_where_asked(is_asked: bool) -> Iterator[None]:
    """The simulated accelerator, under the settings that hold."""
    if not is_asked:
        yield
        return
    from hyper_parallel.simulation.accelerator import simulated_accelerator

    config = current_config()
    settings: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("min_bytes", "tail_bytes", "window_bytes", "prefetch_bytes", "host_limit")
    }
    with simulated_accelerator(timing="eager", **settings):
        yield
