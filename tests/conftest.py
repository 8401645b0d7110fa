"""Real servers for every test that asks for one."""

from collections.abc import Generator

import pytest
from hypothesis import strategies

from omniq.testing.server_programs import ServerMissing

pytest_plugins = ["omniq.testing.plugin"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    yield from _skipped_without_its_server()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    yield from _skipped_without_its_server()


def _skipped_without_its_server() -> Generator[None]:
    try:
        yield
    except ServerMissing as missing:
        pytest.skip(str(missing))


def pytest_collection_finish() -> None:
    # The first time on a Python, Hypothesis makes tables of all characters: on a busy machine that
    # takes longer than the test may that happens to be the first to want them.
    strategies.text().validate()
