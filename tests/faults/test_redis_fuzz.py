"""A hostile Redis server: typed errors, no hang, no leak. `python -m tests.faults.redis_fuzz` plays more streams."""

from __future__ import annotations

import tracemalloc

import pytest

pytest.importorskip("hiredis")

from tests.faults import redis_fuzz


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


def check(report: redis_fuzz.Report) -> None:
    """All kinds of ends occurred, and nothing is left of the streams."""
    assert {"answered", "ConnectionLost", "StorageError"} <= report.seen.keys()
    assert report.files_after <= report.files_before
    assert report.tasks_after == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F37")
def test_a_hostile_redis_server_gets_typed_errors():
    check(redis_fuzz.fuzz(0, 200))


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.fault("F37")
@pytest.mark.usefixtures("traced")
def test_many_hostile_streams_leave_nothing_behind():
    report = redis_fuzz.fuzz(1_000, 2_000)
    check(report)

    # A future or a buffer that each stream leaves would be far more.
    assert report.kibibytes < 1_000
