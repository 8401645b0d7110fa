"""`make test` runs a part of some suites of the contract; `make deep` runs the rest."""

from __future__ import annotations

import inspect
from functools import cache

import pytest

from tests.conftest import makes_no_deep_tests

PARTIAL_SUITES = {
    "test_postgres_contract",
    "test_redis_contract",
    "test_nats_contract",
    "test_log",
    "test_s3_contract",
    "test_sealed_contract",
}

LONG_TESTS = {
    (
        "test_s3_contract",
        "test_a_task_that_kills_its_workers_becomes_a_dead_letter_and_other_tasks_finish",
    )
}
"""Forty workers read a log of some hundred objects: another test of the same promise is run instead."""


def is_partial(suite: type | None) -> bool:
    """Whether `make test` runs a part only. It has its files in memory, where a sync does nothing."""
    return suite is not None and (
        suite.__module__.rpartition(".")[2] in PARTIAL_SUITES or suite.__name__.endswith("Synced")
    )


@cache
def first_tests(suite: type) -> frozenset[str]:
    """Return the names of the tests that are the first, by name, of a promise of the contract."""
    names: set[str] = set()
    tested: set[str] = set()
    for name, test in inspect.getmembers(suite, inspect.isfunction):
        if (suite.__module__.rpartition(".")[2], name) in LONG_TESTS:
            continue
        promises = set(getattr(test, "promises", ()))
        if not promises <= tested:
            names.add(name)
        tested |= promises
    return frozenset(names)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> list[object] | None:
    suite = collector.obj if isinstance(collector, pytest.Class) else None
    is_deep = is_partial(suite) and name.startswith("test_") and name not in first_tests(suite)
    return [] if is_deep and makes_no_deep_tests(collector.config) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of the partial suites as deep but one of each of the first tests."""
    tested: set[tuple[object, str]] = set()
    for item in sorted(items, key=lambda item: item.nodeid):
        if isinstance(item, pytest.Function) and is_partial(item.cls):
            test = (item.cls, item.originalname)
            if item.originalname not in first_tests(item.cls) or test in tested:
                item.add_marker(pytest.mark.deep)
            tested.add(test)
