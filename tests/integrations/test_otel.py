"""A task's trace continues from the caller that enqueues it to the worker that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from omniq import AsyncTaskQueue, PermanentError, TaskFailed, TaskQueue, task
from omniq.integrations.otel import Spans, trace
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
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
trace.set_tracer_provider(provider)


def work():
    with trace.get_tracer("user").start_as_current_span("inside"):
        pass
"""


@pytest.mark.timeout(120)
def test_a_worker_with_several_processes_traces_its_runs(start: Start, tmp_path: Path) -> None:
    (tmp_path / "traced.py").write_text(TRACED)
    worker = start(str(tmp_path), "-m", "omniq", "worker", "traced", "--otel", "--processes", "2")
    with TaskQueue(f"sqlite:///{tmp_path}/tasks.db") as queue:
        trace(queue, PROVIDER)
        queue.enqueue("traced.work")

    trace_id = spans()["enqueue traced.work"].context.trace_id
    for name in ("wait traced.work", "inside", "run traced.work"):
        worker.wait_for(f'"name": "{name}"')
        worker.wait_for(f'"trace_id": "0x{trace_id:032x}"')
