"""`make test` runs a part of the contract on PostgreSQL and Redis; `make deep` runs the rest."""

from __future__ import annotations

import pytest

SERVER_SUITES = {"test_postgres_contract", "test_redis_contract"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In each class of a server suite, mark all tests as deep but the first of each promise."""
    tested: set[tuple[object, str]] = set()
    for item in sorted(items, key=lambda item: item.nodeid):
        if not isinstance(item, pytest.Function) or item.path.stem not in SERVER_SUITES:
            continue
        promises = {(item.cls, number) for number in getattr(item.function, "promises", ())}
        if promises <= tested:
            item.add_marker(pytest.mark.deep)
        tested |= promises
