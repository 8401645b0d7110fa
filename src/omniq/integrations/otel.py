"""OpenTelemetry: a task's trace continues in the worker that runs it.

    trace(queue)                      # spans for enqueueing; their context is stored with the task
    pool.events.subscribe(Spans())    # spans for waiting and running; or `omniq worker --otel`
    queue.worker(middleware=[record_exception])    # exceptions of runs, on their spans; `--otel` too

The span of a run is current while its function runs, also in threads, so that spans of other
instrumentation are its children. The application's tracer provider exports the spans.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from functools import partial
from typing import Any

import msgspec
from opentelemetry import context as contexts
from opentelemetry import propagate
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    TracerProvider,
    get_current_span,
    get_tracer,
    set_span_in_context,
)

from omniq import events
from omniq.clock import to_micros
from omniq.events import Event
from omniq.models import Task
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.queue.blocking_queue import TaskQueue
from omniq.tasks.context import TaskContext, current_task
from omniq.tasks.control import Signal
from omniq.worker.middleware import TIMED_OUT, CallNext

_METADATA = "otel"
_MAX_OPEN = 100_000


def trace(queue: AsyncTaskQueue | TaskQueue, provider: TracerProvider | None = None) -> None:
    """Make a span for each enqueue on this queue, and store its context with the tasks."""
    queue.wrap_enqueue(partial(_enqueue_span, get_tracer("omniq", tracer_provider=provider)))


@contextmanager
def _enqueue_span(tracer: Tracer, tasks: list[Task]) -> Iterator[list[Task]]:
    names = {task.func_path for task in tasks}
    name = f"enqueue {names.pop()}" if len(names) == 1 else "enqueue"
    with tracer.start_as_current_span(name, kind=SpanKind.PRODUCER) as span:
        if len(tasks) == 1:
            span.set_attributes(_attributes(tasks[0].id, tasks[0].func_path, tasks[0].queue))
        else:
            span.set_attribute("messaging.batch.message_count", len(tasks))
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        yield [_with(task, carrier) for task in tasks]


_Claim = tuple[str, int | None]
"""The id of a task, and the token of one of its claims."""


class Spans:
    """A listener for a pool's events: a span for the wait of each run, and one for the run."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer: Tracer = get_tracer("omniq", tracer_provider=provider)
        # A run whose lease is lost may end without an event: the oldest spans are dropped.
        self._open: OrderedDict[_Claim, Span] = OrderedDict()

    def wrap_enqueue(self, tasks: list[Task]) -> AbstractContextManager[list[Task]]:
        """A span for what a task enqueues. `omniq worker --otel` enters it; in programs, `trace` does."""
        return _enqueue_span(self._tracer, tasks)

    def __call__(self, event: Event) -> None:
        """Start or end the span of the event. Called by the pool."""
        match event:
            case events.TaskStarted():
                self._begin(event, current_task())
            case events.TaskSucceeded():
                self._end((event.id, event.token), "succeeded")
            case events.TaskRetried(error=error) | events.TaskFailure(error=error):
                self._end((event.id, event.token), event.name.removeprefix("task."), error)
            case (
                events.TaskCancellation()
                | events.TaskSnoozed()
                | events.TaskSuspended()
                | events.TaskReleased()
            ):
                self._end((event.id, event.token), event.name.removeprefix("task."))
            case events.StaleRefused():
                self._end((event.id, event.token), "stale", "another worker owns the task now")
            case _:
                pass

    def _begin(self, event: events.TaskStarted, task: TaskContext) -> None:
        parent = propagate.extract(_carrier(task.metadata))
        attributes = _attributes(event.id, event.func_path, event.queue) | {
            "omniq.attempt": event.attempt
        }
        if event.task_type:
            attributes["omniq.task_type"] = event.task_type
        waiting = self._tracer.start_span(
            f"wait {event.func_path}", parent, start_time=_nanos(task.due_at), attributes=attributes
        )
        waiting.end()
        span = self._tracer.start_span(
            f"run {event.func_path}", parent, kind=SpanKind.CONSUMER, attributes=attributes
        )
        # Never detached: the context belongs to this run alone and ends with it.
        contexts.attach(set_span_in_context(span))
        self._open[event.id, event.token] = span
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)[1].end()

    def _end(self, claim: _Claim, outcome: str, error: str = "") -> None:
        span = self._open.pop(claim, None)
        if span is not None:
            span.set_attribute("omniq.outcome", outcome)
            if error:
                span.set_status(Status(StatusCode.ERROR, error))
            span.end()


async def record_exception(ctx: TaskContext, call_next: CallNext) -> None:
    """A middleware that records the exception of a run on its span, with its traceback.

    `omniq worker --otel` uses it. In other programs it needs `Spans` as well, whose spans it uses.
    """
    try:
        await call_next()
    except asyncio.CancelledError as error:
        # A task that was cancelled, or whose worker stops, has not failed.
        if error.args == TIMED_OUT:
            get_current_span().record_exception(error)
        raise
    except Exception as error:
        # `Retry`, `Snooze` and `Discard` are how a task ends its run, and no errors.
        if not isinstance(error, Signal):
            get_current_span().record_exception(error)
        raise


def _attributes(task_id: str, func_path: str, queue: str) -> dict[str, str | int]:
    return {
        "messaging.system": "omniq",
        "messaging.destination.name": queue,
        "messaging.message.id": task_id,
        "code.function.name": func_path,
    }


def _with(task: Task, carrier: dict[str, str]) -> Task:
    return msgspec.structs.replace(task, metadata={**task.metadata, _METADATA: carrier})


def _carrier(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The stored trace context. A writer of the storage chose it: only text is accepted."""
    stored = metadata.get(_METADATA)
    if not isinstance(stored, dict):
        return {}
    return {k: v for k, v in stored.items() if isinstance(k, str) and isinstance(v, str)}


def _nanos(instant: datetime) -> int:
    return to_micros(instant) * 1000
