"""The front desk: one file per command. Asks the other rooms, prints what they answer, never shows a traceback for a
mistake that a user made."""

from hyper_parallel.cli.main import main

__all__ = ["main"]
