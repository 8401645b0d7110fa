"""A stored value that is too large is asked for its size, and never read.

One such value is one dead letter, or one refusal; the tasks beside it run.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

import pytest

from omniq.errors import OmniqError
from omniq.models import Progress, Schedule, TaskStatus
from omniq.outcomes import Failed, Retried, Succeeded
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_result, a_task, an_error, an_output
from tests.security.conftest import raw_store_of
from tests.security.raw_stores import RawStore

HUGE = 12 << 20
MARK = b"the value that grows: "
SMALL = Settings(max_payload=64 * 1024)


async def _fill(storage: BaseStorage) -> None:
    """One value of each kind with the mark in it, each in a place that no other shares."""
    mark = MARK.decode()
    await storage.enqueue_many([a_task(name, priority=9) for name in ("done", "dead", "again")])
    held = {task.id: task for task in await storage.reserve(3)}
    done, dead, again = (held[name] for name in ("done", "dead", "again"))
    await storage.save_checkpoint(again.id, again.token, MARK + b"checkpoint")
    await storage.record(
        [
            Succeeded(done.id, done.token, a_result(done, mark + "result")),
            Failed(dead.id, dead.token, an_error(mark + "letter"), "for good"),
            Retried(again.id, again.token, an_error(), datetime(2300, 1, 1, tzinfo=UTC)),
        ]
    )
    await storage.enqueue(a_task("running", priority=9))
    (running,) = await storage.reserve(1)
    await storage.report_progress(
        [Progress(task_id="running", token=running.token, fraction=0.5, message=mark)]
    )
    await storage.append_output([an_output("running", running.token, mark)])
    template = a_task("template", args=(mark,))
    await storage.put_schedule(Schedule(id="daily", task=template, interval=60.0))
    await storage.enqueue(a_task("huge", args=(mark,)))
    await storage.enqueue(a_task("small"))


def _grow(raw: RawStore) -> int:
    """Make every value with the mark huge; returns how many there were."""
    grown = 0
    for address in raw.addresses():
        data = raw.read(address)
        if MARK in data:
            with suppress(OSError):
                raw.write(address, data.replace(MARK, MARK + b"x" * HUGE))
                grown += 1
    return grown


@pytest.fixture
def traced() -> Iterator[None]:
    """Trace what Python allocates: the memory of the process also has what earlier tests left."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.security("S63")
@pytest.mark.timeout(120)
async def test_no_value_is_read_that_is_larger_than_any_that_omniq_stores(store_url, traced):
    async with open_storage(store_url, settings=SMALL) as storage:
        await _fill(storage)
    raw = raw_store_of(store_url)
    grown = _grow(raw)
    raw.close()
    async with open_storage(store_url, settings=SMALL) as storage:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        calls: list[Callable[[], Awaitable[object]]] = [
            *(
                storage.list_tasks,
                storage.list_schedules,
                storage.list_dead,
                storage.older_documents,
            ),
            *(partial(storage.get_task, name) for name in ("huge", "done", "dead", "again")),
            *(partial(storage.get_result, name) for name in ("done", "dead", "again")),
            *(partial(storage.history, name) for name in ("dead", "again")),
            partial(storage.load_checkpoint, "again"),
            partial(storage.get_progress, "running"),
            partial(storage.read_output, "running"),
            partial(storage.get_schedule, "daily"),
            partial(storage.get_dead, "dead"),
            storage.give_back_abandoned,
        ]
        for call in calls:
            with suppress(OmniqError):
                await call()
        claimed = await storage.reserve(5)
        await storage.put_schedule(Schedule(id="daily", task=a_task("template"), interval=9.0))
        replaced = await storage.get_schedule("daily")
        used = tracemalloc.get_traced_memory()[1] - before
        huge = await storage.get_task("huge")

    assert grown >= 5
    assert used < HUGE
    assert "small" in [task.id for task in claimed]
    assert "huge" not in [task.id for task in claimed]
    # On files, what is no record is moved to `corrupt`.
    assert huge is None or huge.status is TaskStatus.FAILED
    assert replaced is not None
    assert replaced.interval == 9.0
