"""`make test` runs a part of the contract on PostgreSQL, Redis, NATS and the log; `make deep` the rest."""

from __future__ import annotations

import pytest

PARTIAL_SUITES = {"test_postgres_contract", "test_redis_contract", "test_nats_contract", "test_log"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In each class of these suites, mark all tests as deep but the first of each promise."""
    tested: set[tuple[object, str]] = set()
    for item in sorted(items, key=lambda item: item.nodeid):
        if not isinstance(item, pytest.Function) or item.path.stem not in PARTIAL_SUITES:
            continue
        promises = {(item.cls, number) for number in getattr(item.function, "promises", ())}
        if promises <= tested:
            item.add_marker(pytest.mark.deep)
        tested |= promises
