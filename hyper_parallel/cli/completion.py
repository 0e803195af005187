"""Print a completion script for your shell.

Example::

  source <(hyper-parallel completion bash)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from hyper_parallel.cli.console import Console

__all__ = ["add_arguments", "run", "script_for"]

_BASH: Final = """_hyper_parallel() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}"
  local words=""
  case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
    *) ;;
  esac
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    return 0
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) [ "$COMP_CWORD" -eq 1 ] && words="{commands}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [ -n "$words" ] && [ "${{current#-}}" = "$current" ] && [ "$COMP_CWORD" -gt 1 ] && COMPREPLY+=($(compgen -f -- "$current"))
  return 0
}}
complete -o filenames -F _hyper_parallel hyper-parallel
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(args: argparse.Namespace, console: Console) -> int:
    """The command."""
    from hyper_parallel.cli.command_line import build_parser

    parser = build_parser()
    console.say(script_for(args.shell, options_of(parser), choices_of(parser)))
    return 0


def options_of(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Every command and its long options, as the parser knows them."""
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                options = [
                    option for one in command._actions if one.help != argparse.SUPPRESS for option in one.option_strings
                ]
                choices = [
                    str(choice) for one in command._actions if not one.option_strings for choice in one.choices or ()
                ]
                found[name] = sorted(option for option in options if option.startswith("--")) + choices
    return found


def choices_of(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """``demo --size`` to the values that it takes, for every option with a fixed set of them."""
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                for one in command._actions:
                    if one.help != argparse.SUPPRESS and one.choices:
                        found.update(
                            {f"{name} {option}": [str(c) for c in one.choices] for option in one.option_strings}
                        )
    return found


def script_for(
    shell: str, options: Mapping[str, Sequence[str]], choices: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> str:
    """The script; zsh reads bash's through its own compatibility layer."""
    values = "\n".join(f'    "{option}") words="{" ".join(words)}" ;;' for option, words in choices.items())
    cases = "\n".join(f'    {name}) words="{" ".join(words)}" ;;' for name, words in options.items())
    script = _BASH.format(cases=cases, values=values, commands=" ".join(options))
    return script if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}"
