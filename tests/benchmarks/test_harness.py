"""The harness measures real processes, on a store that needs no server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.figures import Bench, Scale
from benchmarks.processes import Failed
from benchmarks.start_times import StartTimes
from benchmarks.stores import open_store


def test_start_times_count_the_starts_of_a_task_and_record_the_newest(tmp_path):
    start_times, elsewhere = (
        StartTimes(tmp_path / "start_times"),
        StartTimes(tmp_path / "start_times"),
    )
    elsewhere.record(2)
    elsewhere.record(0)
    elsewhere.record(0)

    assert start_times.count_started(4) == 2
    assert start_times.count_repeated(4) == 1
    assert start_times.times(4) == [start_times.started_at(2), start_times.started_at(0)]


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_a_drain_of_omniq_runs_every_task_once():
    with open_store("sqlite-os") as store:
        bench = Bench("omniq", Path(sys.executable), store, Scale(tasks=300, seconds=30))
        measured = bench.drain()

        assert measured["ran"] == 300
        assert measured["drain"] > 0


def test_a_task_that_ran_twice_fails_the_run():
    with open_store("sqlite-os") as store:
        store.start_times.record(7)
        store.start_times.record(7)

        with pytest.raises(Failed, match="1 of 10 tasks ran more than once"):
            Bench("omniq", Path(sys.executable), store, Scale(10, 1)).check(10)


def test_omniq_is_measured_by_the_command_that_users_run_with_its_default_log(monkeypatch):
    from benchmarks.peers import omniq as peer

    commands: list[tuple[object, ...]] = []
    monkeypatch.setattr(peer, "exec_module", lambda *command: commands.append(command))
    peer.work()

    assert commands[0][:2] == ("omniq", "worker")
    assert not [word for word in commands[0] if "log" in str(word)]
    assert "OMNIQ_LOG_LEVEL" not in open_store_environment()


def open_store_environment() -> dict[str, str]:
    with open_store("sqlite-os") as store:
        return store.environment()
