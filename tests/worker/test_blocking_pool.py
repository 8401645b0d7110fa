"""The pool for blocking code: its thread and its event loop start and end with it."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from omniq import (
    InvalidValue,
    PoolStopped,
    ShutdownTimeout,
    StorageClosed,
    StorageError,
    TaskQueue,
    TaskStatus,
    WorkerPool,
)
from omniq.testing.faults import FaultyStorage
from tests.timing import at_most
from tests.worker import sample_tasks
from tests.worker.conftest import Store
from tests.worker.recorder import RunRecorder, blocking_until, until


def threads_of_omniq() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("omniq")}


def test_start_returns_once_the_pool_runs_in_its_thread(
    store: Store, recorder: RunRecorder
) -> None:
    before = threads_of_omniq()
    pool = WorkerPool(store.another())
    assert threads_of_omniq() <= before

    pool.start()
    assert pool.running
    assert threads_of_omniq() > before
    pool.submit(sample_tasks.hold, "held")
    blocking_until(lambda: recorder.inside == 1)
    recorder.open_all()
    pool.stop()
    assert not pool.running


def test_stop_ends_the_thread_and_everything_else(store: Store) -> None:
    before = threads_of_omniq()
    with WorkerPool(store.another(), concurrency=2) as pool:
        pool.submit(sample_tasks.add_in_thread, 1)
        blocking_until(lambda: pool.stats().completed_tasks == 1)

    blocking_until(lambda: threads_of_omniq() <= before)
    assert pool.stats().completed_tasks == 1


def test_stop_waits_for_running_tasks(store: Store, recorder: RunRecorder) -> None:
    pool = WorkerPool(store.another())
    pool.start()
    pool.submit(sample_tasks.hold, "held")
    blocking_until(lambda: recorder.inside == 1)
    threading.Timer(0.1, recorder.gate("held").set).start()
    pool.stop()

    assert pool.stats().completed_tasks == 1


def test_an_idle_pool_stops_at_once_however_long_its_poll_interval(store: Store) -> None:
    pool = WorkerPool(store.another(), poll_interval=60)
    pool.start()
    began = time.monotonic()
    pool.stop()

    assert time.monotonic() - began < at_most(0.5)


def test_a_stop_that_times_out_raises_and_ends_the_thread(
    store: Store, recorder: RunRecorder
) -> None:
    before = threads_of_omniq()
    pool = WorkerPool(store.another())
    pool.start()
    pool.submit(sample_tasks.hold, "held")
    blocking_until(lambda: recorder.inside == 1)
    with pytest.raises(ShutdownTimeout):
        pool.stop(timeout=0.05)

    blocking_until(lambda: threads_of_omniq() <= before)


def test_cancel_in_flight_releases_the_tasks(store: Store, recorder: RunRecorder) -> None:
    with TaskQueue(store.another()) as queue:
        pool = WorkerPool(store.another())
        pool.start()
        handle = queue.enqueue(sample_tasks.hold, "held")
        blocking_until(lambda: recorder.inside == 1)
        pool.stop(cancel_in_flight=True)

        assert handle.status() is TaskStatus.PENDING


def test_a_pool_that_was_stopped_may_be_started_again(store: Store) -> None:
    pool = WorkerPool(store.another())
    for runs in (1, 2):
        with pool:
            pool.submit(sample_tasks.add, 1)
            blocking_until(partial(has_completed, pool, runs))

    with pytest.raises(PoolStopped):
        pool.submit(sample_tasks.add, 1)


def has_completed(pool: WorkerPool, count: int) -> bool:
    return pool.stats().completed_tasks == count


def test_two_starts_in_a_row_are_refused(store: Store) -> None:
    with WorkerPool(store.another()) as pool:
        with pytest.raises(InvalidValue, match="already running"):
            pool.start()
        assert pool.running


def test_a_start_that_fails_leaves_no_thread(store: Store) -> None:
    before = threads_of_omniq()
    storage = FaultyStorage(store.another())
    storage.fail("renew")
    pool = WorkerPool(storage)
    with pytest.raises(StorageError, match="on purpose"):
        pool.start()

    assert threads_of_omniq() <= before
    with pool:
        assert pool.running


def test_stopping_before_the_start_and_twice_does_nothing(store: Store) -> None:
    pool = WorkerPool(store.another())
    pool.stop()
    with pool:
        pass
    pool.stop()

    assert not pool.running


def test_submitted_before_the_start_runs_after_it(store: Store, recorder: RunRecorder) -> None:
    pool = WorkerPool(store.another())
    pool.submit(sample_tasks.note, "early")
    pool.run_until_empty()

    assert recorder.names() == ["early"]


def test_two_threads_may_stop_a_pool_at_once(store: Store, recorder: RunRecorder) -> None:
    pool = WorkerPool(store.another())
    pool.start()
    pool.submit(sample_tasks.hold, "held")
    blocking_until(lambda: recorder.inside == 1)
    patient = threading.Thread(target=pool.stop)
    patient.start()
    blocking_until(lambda: not pool.running)
    pool.stop(cancel_in_flight=True)
    patient.join(30)

    assert not patient.is_alive()


def test_a_pool_on_a_queue_shares_its_thread_and_does_not_end_it(store: Store) -> None:
    with TaskQueue(store.another()) as queue:
        before = {thread for thread in threads_of_omniq() if thread.name == "omniq-portal"}
        with queue.worker(concurrency=2):
            assert queue.enqueue(sample_tasks.add, 1, 2).result(30) == 3
            portals = {thread for thread in threads_of_omniq() if thread.name == "omniq-portal"}
            assert portals == before
        handle = queue.enqueue(sample_tasks.add, 3)
        assert handle.status() is TaskStatus.PENDING
        queue.worker().run_until_empty()
        assert handle.result(30) == 3


def test_a_pool_whose_queue_was_closed_raises_the_error_that_ended_it(store: Store) -> None:
    storage = store.another()
    pool = WorkerPool(storage, poll_interval=0.02)
    pool.start()
    pool._portal.run(storage.close())
    with pytest.raises(StorageClosed):
        pool.wait()

    assert not pool.running
    pool.stop()


async def test_a_blocking_pool_works_inside_a_running_event_loop(store: Store) -> None:
    with WorkerPool(store.another()) as pool:
        pool.submit(sample_tasks.add, 1)
        await until(lambda: pool.stats().completed_tasks == 1)
