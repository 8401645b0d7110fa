"""The codec that splits rows into columns and a rest."""

from __future__ import annotations

import tracemalloc
from datetime import UTC, datetime
from typing import Any

import pytest

from omniq.models import Attempt, TaskError
from omniq.storage.row_codec import RowCodec
from omniq.storage.row_rules import Row, Workflow

COLUMNS: dict[str, Any] = {
    "id": "t",
    "queue": "q",
    "priority": 0,
    "func_path": "m.f",
    "due": 1,
    "visible": 1,
    "created_at": 1,
}


@pytest.fixture
def codec():
    return RowCodec(list(COLUMNS))


def a_row(**fields):
    return Row(**COLUMNS, **fields)


def read(codec, rest):
    return codec.row(list(COLUMNS.values()), rest)


def a_failed_row(number, size):
    failure = Attempt(
        number=number,
        token=number,
        owner="w",
        started_at=None,
        finished_at=datetime(2026, 1, 1, tzinfo=UTC),
        outcome="failed",
        error=TaskError("failed", error_type="ValueError", traceback=f"{number:{size}}"),
    )
    return a_row(history=(failure,))


def test_rows_with_the_same_rest_share_no_state(codec):
    row = a_row(workflow=Workflow(parent="p", needs=2), releases=3)
    rest = codec.rest(row)

    first, second = (read(codec, rest) for _ in range(2))
    first.releases, first.history, first.workflow = 9, a_failed_row(1, 1).history, None

    assert second == read(codec, rest) == row


def test_long_rests_do_not_stay_in_memory(codec):
    size = 30_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(300):
            row = a_failed_row(number, size)
            assert read(codec, codec.rest(row)) == row
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert after - before < 10 * size
