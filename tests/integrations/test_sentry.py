"""Sentry receives failed runs, with the real package; its transport keeps the events in a list."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from omniq import AsyncTaskQueue, Snooze, TaskContext, TaskFailed, task
from omniq.integrations.sentry import Sentry
from tests.worker.recorder import until

PATH = f"{__name__}."


class Kept(Transport):
    """Sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            if (event := item.get_event()) is not None:
                self.events.append(dict(event))


@pytest.fixture
def events() -> Iterator[list[dict[str, Any]]]:
    transport = Kept()
    with sentry_sdk.isolation_scope():
        sentry_sdk.init(
            dsn="https://key@localhost/1", transport=transport, default_integrations=False
        )
        yield transport.events
        sentry_sdk.get_client().close()
        sentry_sdk.get_global_scope().set_client(None)


@task
async def fail(secret: str) -> None:
    sentry_sdk.set_tag("step", "one")
    raise ValueError("wrong")


@task
def fail_in_a_thread(secret: str) -> None:
    sentry_sdk.set_tag("step", "two")
    raise KeyError("wrong")


@task(executor="process")
def fail_in_a_process() -> None:
    raise KeyError("wrong")


@task
async def snooze(ctx: TaskContext) -> int:
    if ctx.attempt == 1 and not ctx.metadata.get("slept"):
        raise Snooze(3600)
    return 1


@task
async def sleep() -> None:
    await asyncio.sleep(3600)


async def run(func: Any, *args: Any, **options: Any) -> None:
    async with AsyncTaskQueue("memory:") as queue:
        await queue.options(**{"max_retries": 0, **options}).enqueue(func, *args)
        await queue.worker(middleware=[Sentry()]).run_until_empty()


@pytest.mark.parametrize(("func", "kind"), [(fail, "ValueError"), (fail_in_a_thread, "KeyError")])
async def test_a_failed_run_is_an_event_with_its_exception_and_its_task(events, func, kind):
    await run(func, "sesame")

    (event,) = events
    (raised,) = event["exception"]["values"]
    assert raised["type"] == kind
    assert func.__name__ in [frame["function"] for frame in raised["stacktrace"]["frames"]]
    assert event["transaction"] == PATH + func.__name__
    assert event["contexts"]["omniq"]["attempt"] == 1
    assert event["tags"]["omniq.queue"] == "default"


async def test_each_run_has_a_scope_of_its_own(events):
    await run(fail, "x")
    await run(fail_in_a_thread, "x")

    assert [event["tags"]["step"] for event in events] == ["one", "two"]
    assert not sentry_sdk.get_isolation_scope()._tags


@pytest.mark.timeout(60)
async def test_the_failure_of_a_child_process_has_its_type_and_traceback_as_text(events):
    await run(fail_in_a_process)

    (event,) = events
    assert event["contexts"]["error"]["type"] == "KeyError"
    assert "fail_in_a_process" in event["contexts"]["error"]["traceback"]


async def test_a_snooze_is_no_event_and_a_timeout_is_one(events):
    await run(snooze)
    assert events == []

    await run(sleep, timeout=0.1)
    assert [event["message"] for event in events] == [f"{PATH}sleep timed out"]


async def test_a_task_that_is_cancelled_is_no_event(events):
    async with AsyncTaskQueue("memory:") as queue:
        handle = await queue.enqueue(sleep)
        async with queue.worker(middleware=["omniq.integrations.sentry.Sentry"]) as pool:
            await until(lambda: pool.stats().active_workers)
            await handle.cancel()
            with pytest.raises(Exception, match="cancelled"):
                await handle.result(30)

    assert events == []


async def test_the_worker_goes_on_without_a_client():
    sentry_sdk.get_global_scope().set_client(None)
    async with AsyncTaskQueue("memory:") as queue:
        handle = await queue.options(max_retries=0).enqueue(fail, "x")
        async with queue.worker(middleware=[Sentry()]):
            with pytest.raises(TaskFailed, match="wrong"):
                await handle.result(30)
