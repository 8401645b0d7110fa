"""A task's trace continues from the caller that enqueues it to the worker that runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from omniq import (
    AsyncTaskQueue,
    PermanentError,
    Task,
    TaskContext,
    TaskFailed,
    TaskQueue,
    task,
)
from omniq.integrations.otel import Spans, record_exception, trace
from tests.integrations.conftest import Start

EXPORTER = InMemorySpanExporter()
PROVIDER = TracerProvider()
PROVIDER.add_span_processor(SimpleSpanProcessor(EXPORTER))


@pytest.fixture(autouse=True)
def _clear_exporter() -> None:
    EXPORTER.clear()


def spans() -> dict[str, Any]:
    return {span.name: span for span in EXPORTER.get_finished_spans()}


@task
def work() -> None:
    """Runs in a thread and makes a span."""
    with PROVIDER.get_tracer("user").start_as_current_span("inside"):
        pass


@task
async def fail() -> None:
    raise PermanentError("no")


PATH = f"{__name__}."


async def test_the_spans_of_a_task_form_one_trace():
    async with AsyncTaskQueue("memory://") as queue:
        trace(queue, PROVIDER)
        with PROVIDER.get_tracer("user").start_as_current_span("request"):
            handle = await queue.options(queue="mail").enqueue(work)
        pool = queue.worker()
        pool.events.subscribe(Spans(PROVIDER))
        await pool.run_until_empty()

    found = spans()
    names = ("request", f"enqueue {PATH}work", f"wait {PATH}work", f"run {PATH}work", "inside")
    request, enqueued, waited, ran, inside = (found[name] for name in names)
    assert {span.context.trace_id for span in found.values()} == {request.context.trace_id}
    assert enqueued.parent.span_id == request.context.span_id
    assert waited.parent.span_id == ran.parent.span_id == enqueued.context.span_id
    assert inside.parent.span_id == ran.context.span_id
    assert waited.start_time <= waited.end_time <= ran.end_time
    assert ran.attributes["messaging.message.id"] == handle.id
    assert ran.attributes["messaging.destination.name"] == "mail"
    assert ran.attributes["omniq.outcome"] == "succeeded"
    assert ran.kind is otel.SpanKind.CONSUMER


@task
async def enqueue_another(ctx: TaskContext) -> None:
    await ctx.enqueue(work)


@task
def enqueue_another_in_a_thread(ctx: TaskContext) -> None:
    ctx.enqueue(work)


@pytest.mark.parametrize("func", [enqueue_another, enqueue_another_in_a_thread])
async def test_what_a_task_enqueues_is_part_of_its_trace(func):
    async with AsyncTaskQueue("memory://") as queue:
        trace(queue, PROVIDER)
        await queue.enqueue(func)
        pool = queue.worker()
        pool.events.subscribe(Spans(PROVIDER))
        await pool.run_until_empty()

    found = spans()
    parent, enqueued = found[f"run {PATH}{func.__name__}"], found[f"enqueue {PATH}work"]
    assert enqueued.parent.span_id == parent.context.span_id
    assert found[f"run {PATH}work"].parent.span_id == enqueued.context.span_id


async def test_a_failed_run_ends_its_span_with_the_error_type():
    async with AsyncTaskQueue("memory://") as queue:
        handle = await queue.enqueue(fail)
        pool = queue.worker()
        pool.events.subscribe(Spans(PROVIDER))
        await pool.run_until_empty()
        with pytest.raises(TaskFailed):
            await handle.result()

    ran = spans()[f"run {PATH}fail"]
    assert ran.status.status_code is otel.StatusCode.ERROR
    assert ran.status.description == "PermanentError"
    assert ran.parent is None


def test_tasks_of_one_enqueue_many_call_share_its_span():
    with TaskQueue("memory://") as queue:
        trace(queue, PROVIDER)
        with PROVIDER.get_tracer("user").start_as_current_span("request"):
            handles = queue.enqueue_many([(work,), (fail,)])
        stored = [queue.get_task(handle.id) for handle in handles]
        carriers = [task.metadata["otel"] for task in stored if task is not None]

    enqueued, request = spans()["enqueue"], spans()["request"]
    assert enqueued.parent.span_id == request.context.span_id
    assert carriers[0] == carriers[1]
    assert f"{enqueued.context.span_id:016x}" in carriers[0]["traceparent"]


TRACED = """
from omniq import current_task
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
trace.set_tracer_provider(provider)


def work():
    with trace.get_tracer("user").start_as_current_span("inside"):
        pass


def parent():
    current_task().enqueue(work)
"""


@pytest.mark.timeout(120)
def test_a_worker_with_several_processes_traces_its_runs(start: Start, tmp_path: Path) -> None:
    (tmp_path / "traced.py").write_text(TRACED)
    worker = start(str(tmp_path), "-m", "omniq", "worker", "traced", "--otel", "--processes", "2")
    with TaskQueue(f"sqlite:///{tmp_path}/tasks.db") as queue:
        trace(queue, PROVIDER)
        queue.enqueue("traced.parent")

    trace_id = spans()["enqueue traced.parent"].context.trace_id
    for name in ("inside", "run traced.work"):
        worker.wait_for(f'"name": "{name}"')
        worker.wait_for(f'"trace_id": "0x{trace_id:032x}"')


@task
async def fail_with_a_cause() -> None:
    try:
        raise KeyError("cause")
    except KeyError as error:
        raise ValueError("live") from error


@task
def fail_in_a_thread() -> None:
    raise ValueError("live")


@pytest.mark.parametrize("func", [fail_with_a_cause, fail_in_a_thread])
async def test_the_span_of_a_failed_run_has_its_exception(func: Any) -> None:
    async with AsyncTaskQueue("memory://") as queue:
        await queue.options(max_retries=0).enqueue(func)
        pool = queue.worker(middleware=[record_exception])
        pool.events.subscribe(Spans(PROVIDER))
        await pool.run_until_empty()

    (event,) = spans()[f"run {PATH}{func.__name__}"].events
    assert event.name == "exception"
    assert event.attributes["exception.type"] == "ValueError"
    assert event.attributes["exception.message"] == "live"
    assert func.__name__ in event.attributes["exception.stacktrace"]


async def test_tracing_a_queue_does_not_replace_other_wrappers() -> None:
    seen: list[int] = []

    @contextmanager
    def count(tasks: list[Task]) -> Iterator[list[Task]]:
        seen.append(len(tasks))
        yield tasks

    async with AsyncTaskQueue("memory://") as queue:
        queue.wrap_enqueue(count)
        trace(queue, PROVIDER)
        handle = await queue.enqueue(work)
        stored = await queue.get_task(handle.id)

    assert seen == [1]
    assert stored is not None
    assert "traceparent" in stored.metadata["otel"]
    assert f"enqueue {PATH}work" in spans()
