"""Two decorators for contract tests: which members a test covers, and on how many ranks it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])


def covers(*members: str) -> Callable[[Test], Test]:
    """Say which Platform members this test is about; ``test_coverage`` reads it."""

    def mark(test: Test) -> Test:
        test.covered_members = (*getattr(test, "covered_members", ()), *members)  # type: ignore[attr-defined]
        return test

    return mark


def on_ranks(*sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a check in worlds of these sizes, one process per rank; it takes a ``World`` and runs on every rank.

    pytest sees one test per platform and size. All checks of a size share one launch of processes.
    """

    def mark(check: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("ranks", sizes, ids=[f"{size}ranks" for size in sizes])
        def test(ranked_jobs: Any, platform_name: str, ranks: int) -> None:
            ranked_jobs.require(platform_name, ranks, check_id(check))

        test.__name__ = test.__qualname__ = check.__name__
        test.__module__, test.__doc__ = check.__module__, check.__doc__
        test.check = check  # type: ignore[attr-defined]
        test.covered_members = getattr(check, "covered_members", ())  # type: ignore[attr-defined]
        return test

    return mark


def check_id(check: Callable[..., None]) -> str:
    """How a check is named to the processes that run it."""
    return f"{check.__module__}:{check.__name__}"


def source_of(test: Callable[..., Any]) -> str:
    """The text of a test, behind the wrapper that pytest sees."""
    return inspect.getsource(getattr(test, "check", test))
