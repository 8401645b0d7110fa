"""Children and waits of a task in a child process: what it asks for, and what the worker answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal, assert_never

import msgspec

from omniq.models import Task, TaskResult, TaskStatus
from omniq.serialization import Serializer
from omniq.tasks.context import TaskContext

FlowQuestion = Literal[
    "add",
    "event",
    "missing",
    "close",
    "results",
    "values",
    "page",
    "flow",
    "failures",
    "deadline",
    "expire",
]


class FlowRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A child asks to store tasks below its own, or about records; tasks are encoded by its codec."""

    question: FlowQuestion
    ids: list[str] = []
    tasks: list[bytes] = []
    nonce: str = ""
    limit: int = 0


class FlowAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply to a `FlowRequest`."""

    ids: list[str] = []
    results: list[bytes] = []
    value: bytes = b""
    instant: datetime | None = None


async def answer_flow(context: TaskContext, codec: Serializer, request: FlowRequest) -> FlowAnswer:
    """Return the worker's answer."""
    flows, ids = context._services.flows, request.ids
    tasks = [codec.decode_task(task) for task in request.tasks]
    match request.question:
        case "add":
            await flows.add_children(context._task, tasks, request.nonce)
        case "event":
            await flows.add_event(tasks[0])
        case "missing":
            return FlowAnswer(ids=await flows.missing_of(ids))
        case "close":
            await flows.close_group(ids[0])
        case "results":
            found = await flows.results_of(ids)
            return FlowAnswer(results=[codec.encode_result(each) for each in found.values()])
        case "values":
            return FlowAnswer(value=_encoded(codec, await flows.values_of(ids)))
        case "page":
            page, after = await flows.values_page(ids[0], request.nonce)
            return FlowAnswer(ids=[after], value=_encoded(codec, page))
        case "flow":
            return FlowAnswer(value=_encoded(codec, await flows.flow_value(ids[0])))
        case "failures":
            failures = await flows.failures_of(ids[0], request.limit)
            return FlowAnswer(results=[codec.encode_result(each) for each in failures])
        case "deadline":
            return FlowAnswer(instant=await flows.event_deadline(ids[0]))
        case "expire":
            await flows.expire_event(ids[0])
        case _:
            assert_never(request.question)
    return FlowAnswer()


def _encoded(codec: Serializer, value: Any) -> bytes:
    return codec.encode_result(TaskResult(task_id="flow", status=TaskStatus.SUCCESS, result=value))


class ChildFlows:
    """The records of a workflow, for a task in a child process. It blocks."""

    def __init__(self, ask: Callable[[FlowRequest], FlowAnswer], codec: Serializer) -> None:
        self._ask = ask
        self._codec = codec

    async def add_children(self, task: Task, children: Sequence[Task], nonce: str) -> None:
        tasks = [self._codec.encode_task(each) for each in children]
        self._ask(FlowRequest(question="add", tasks=tasks, nonce=nonce))

    async def add_event(self, event: Task) -> None:
        self._ask(FlowRequest(question="event", tasks=[self._codec.encode_task(event)]))

    async def missing_of(self, ids: Sequence[str]) -> list[str]:
        return self._ask(FlowRequest(question="missing", ids=list(ids))).ids

    async def close_group(self, group_id: str) -> None:
        self._ask(FlowRequest(question="close", ids=[group_id]))

    async def results_of(self, ids: Sequence[str]) -> dict[str, TaskResult]:
        answer = self._ask(FlowRequest(question="results", ids=list(ids)))
        return {result.task_id: result for result in self._results(answer)}

    async def values_of(self, ids: Sequence[str]) -> dict[str, Any]:
        values: dict[str, Any] = self._value(FlowRequest(question="values", ids=list(ids)))
        return values

    async def values_page(self, group_id: str, after: str) -> tuple[list[Any], str]:
        answer = self._ask(FlowRequest(question="page", ids=[group_id], nonce=after))
        return list(self._codec.decode_result(answer.value).result), answer.ids[0]

    async def flow_value(self, flow_id: str) -> Any:
        return self._value(FlowRequest(question="flow", ids=[flow_id]))

    async def failures_of(self, group_id: str, limit: int) -> list[TaskResult]:
        request = FlowRequest(question="failures", ids=[group_id], limit=limit)
        return self._results(self._ask(request))

    async def event_deadline(self, event_id: str) -> datetime | None:
        return self._ask(FlowRequest(question="deadline", ids=[event_id])).instant

    async def expire_event(self, event_id: str) -> None:
        self._ask(FlowRequest(question="expire", ids=[event_id]))

    def _results(self, answer: FlowAnswer) -> list[TaskResult]:
        return [self._codec.decode_result(each) for each in answer.results]

    def _value(self, request: FlowRequest) -> Any:
        return self._codec.decode_result(self._ask(request).value).result
