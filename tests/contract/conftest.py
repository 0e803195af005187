"""Fixtures of the contract suite: ``platform`` and ``adapter``, for every platform named on the command line."""

from __future__ import annotations

import pytest

from hyper_parallel.platform.platform import Platform

from .adapters import ADAPTERS, Adapter, adapter_named
from .ranked_jobs import RankedJobs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--platform",
        action="append",
        choices=sorted(ADAPTERS),
        help="a platform to run the contract suite on; may be given again; default: torch",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "platform_name" in metafunc.fixturenames:
        # Named only where this file is loaded early (pytest tests/contract); otherwise the default holds.
        names = metafunc.config.getoption("platform", default=None) or ["torch"]
        metafunc.parametrize("platform_name", names, scope="session")


@pytest.fixture(scope="session")
def adapter(platform_name: str) -> Adapter:
    """The framework of the platform under test, as far as tests need it beside the Platform."""
    return adapter_named(platform_name)


@pytest.fixture(scope="session")
def platform(adapter: Adapter) -> Platform:
    """The platform under test."""
    return adapter.platform


@pytest.fixture(scope="session")
def ranked_jobs(request: pytest.FixtureRequest) -> RankedJobs:
    """The verdicts of checks that run on several ranks."""
    return RankedJobs(request.session.items)
