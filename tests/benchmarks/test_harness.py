"""The harness measures what really happened: real processes, on the store that needs no server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.figures import Bench, Scale
from benchmarks.marks import Marks
from benchmarks.processes import Failed
from benchmarks.stores import a_store


def test_a_mark_tells_how_often_and_when_a_task_started(tmp_path):
    marks, elsewhere = Marks(tmp_path / "marks"), Marks(tmp_path / "marks")
    elsewhere.leave(2)
    elsewhere.leave(0)
    elsewhere.leave(0)

    assert marks.ran(4) == 2
    assert marks.doubled(4) == 1
    assert marks.times(4) == [marks.started_at(2), marks.started_at(0)]


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_drain_of_omniq_runs_every_task_once():
    with a_store("sqlite-os") as store:
        bench = Bench("omniq", Path(sys.executable), store, Scale(tasks=300, seconds=30))
        measured = bench.drain()

        assert measured["ran"] == 300
        assert measured["drain"] > 0


def test_a_task_that_ran_twice_fails_the_run():
    with a_store("sqlite-os") as store:
        store.marks.leave(7)
        store.marks.leave(7)

        with pytest.raises(Failed, match="1 of 10 tasks ran more than once"):
            Bench("omniq", Path(sys.executable), store, Scale(10, 1)).check(10)
