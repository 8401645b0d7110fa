"""Handles of flows that were started: status, nodes, results, cancel and retry, for async and blocking code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from omniq.concurrency.blocking import BlockingFace, blocking
from omniq.concurrency.portal import Portal
from omniq.errors import InvalidTask, ResultTimeout, TaskCancelled, TaskFailed, TaskNotFound
from omniq.models import Task, TaskResult, TaskStatus
from omniq.tasks.durations import Duration, seconds_of
from omniq.tasks.flow_records import name_of

if TYPE_CHECKING:
    from omniq.storage.base import BaseStorage

R = TypeVar("R")

_PAGE = 1_000


async def flow_value(storage: BaseStorage, flow_id: str) -> Any:
    """The result of the only node of a flow that no other waits for."""
    task = await storage.get_task(flow_id)
    if task is None:
        raise TaskNotFound(flow_id)
    sinks = task.metadata.get("sinks", [])
    if len(sinks) != 1:
        raise InvalidTask(
            f"flow {flow_id} has {len(sinks)} nodes that no other waits for; use results()"
        )
    sink = f"{flow_id}.{sinks[0]}"
    values = await storage.values_of([sink])
    if sink not in values:
        raise TaskNotFound(sink)
    return values[sink]


class AsyncFlowHandle(Generic[R]):
    """A flow that was started. It holds no connection."""

    def __init__(self, storage: BaseStorage, flow_id: str) -> None:
        self._storage = storage
        self.id = flow_id

    async def status(self) -> TaskStatus:
        """Return the flow's status. Raises `TaskNotFound` when the storage has no record of it."""
        return (await self._root()).status

    async def nodes(self) -> list[Task]:
        """Return the records of the flow's nodes, in id order; the members of a map are not among them."""
        return [task async for task in self._records() if _parent(task) == self.id]

    async def wait(self, timeout: Duration | None = None) -> TaskStatus:
        """Wait until the flow has ended, and return its status. Raises `ResultTimeout`."""
        seconds = None if timeout is None else seconds_of("timeout", timeout)
        return (await self._end(seconds)).status

    async def result(self, timeout: Duration | None = None) -> R:
        """Wait for the result of the only node that no other waits for.

        Raises `TaskFailed`, `TaskCancelled`, `ResultTimeout` or `TaskNotFound`, and `InvalidTask` for a flow
        with several such nodes.
        """
        seconds = None if timeout is None else seconds_of("timeout", timeout)
        await self._succeeded(seconds)
        return cast(R, await flow_value(self._storage, self.id))

    async def results(self, timeout: Duration | None = None) -> dict[str, Any]:
        """Wait for the end, and return the results of the nodes that have succeeded, by name."""
        seconds = None if timeout is None else seconds_of("timeout", timeout)
        await self._end(seconds)
        nodes = [task.id for task in await self.nodes() if not name_of(task.id).startswith("_")]
        values = await self._storage.values_of(nodes)
        return {name_of(task_id): values[task_id] for task_id in nodes if task_id in values}

    async def cancel(self) -> bool:
        """Cancel the flow and all of its nodes; False when it has ended."""
        return await self._storage.cancel(self.id)

    async def retry(self, from_: str | None = None) -> bool:
        """Run the nodes again that did not succeed, or a node and all nodes that depend on it.

        Returns False if another caller has retried the flow first. Raises `InvalidTask` for a flow that runs, or that was undone.
        """
        root = await self._root()
        if not root.status.is_final:
            raise InvalidTask(f"flow {self.id} runs: cancel it first, or wait for its end")
        records = [task async for task in self._records()]
        if any(_parent(task) == f"{self.id}._undo" for task in records):
            raise InvalidTask(f"flow {self.id} was undone: start it again instead")
        chosen = _failed(records, self.id) if from_ is None else _behind(records, self.id, from_)
        if not chosen:
            raise InvalidTask(f"flow {self.id} has succeeded: name a node to retry from")
        return await self._storage.revive(self.id, chosen)

    async def _records(self) -> AsyncIterator[Task]:
        after = ""
        while page := await self._storage.list_below(self.id, limit=_PAGE, after=after):
            for task in page:
                yield task
            if len(page) < _PAGE:
                return
            after = page[-1].id

    async def _root(self) -> Task:
        task = await self._storage.get_task(self.id)
        if task is None:
            raise TaskNotFound(self.id)
        return task

    async def _end(self, seconds: float | None) -> TaskResult:
        result = await self._storage.wait_for_result(self.id, seconds)
        if result is None:
            if seconds is not None and await self._storage.get_task(self.id) is not None:
                raise ResultTimeout(self.id, seconds)
            raise TaskNotFound(self.id)
        return result

    async def _succeeded(self, seconds: float | None) -> None:
        result = await self._end(seconds)
        if result.status is TaskStatus.CANCELLED:
            raise TaskCancelled(self.id, result.reason or "")
        if result.status is TaskStatus.FAILED:
            error = result.error
            async for task in self._records():
                if task.status is TaskStatus.FAILED and _kind(task) == "task":
                    found = (await self._storage.results_of([task.id])).get(task.id)
                    error = error if found is None else found.error
                    break
            raise TaskFailed(self.id, error)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AsyncFlowHandle):
            return NotImplemented
        return self.id == other.id and self._storage is other._storage

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"


def _parent(task: Task) -> str | None:
    return None if task.workflow is None else task.workflow.parent


def _kind(task: Task) -> str:
    return "task" if task.workflow is None else task.workflow.kind


def _failed(records: list[Task], root: str) -> list[str]:
    """The tasks that did not succeed, below records that did not succeed."""
    retried = {root}
    for task in records:
        if task.status is not TaskStatus.SUCCESS and _parent(task) in retried:
            retried.add(task.id)
    return [task.id for task in records if task.id in retried and _kind(task) == "task"]


def _behind(records: list[Task], root: str, name: str) -> list[str]:
    """The node with that name, all that wait for it, and all below them."""
    first = f"{root}.{name}"
    if not any(task.id == first for task in records):
        raise InvalidTask(f"flow {root} has no node {name!r}")
    behind = {first}
    is_growing = True
    while is_growing:
        is_growing = False
        for task in records:
            if task.id in behind or task.workflow is None:
                continue
            sources = (*task.workflow.after, *task.workflow.after_any, task.workflow.parent or "")
            if not behind.isdisjoint(sources) or any(
                each.startswith(f"{task.id}.") and _kind(task) == "group" for each in behind
            ):
                behind.add(task.id)
                is_growing = True
    return [task.id for task in records if task.id in behind and _kind(task) == "task"]


class FlowHandle(BlockingFace[AsyncFlowHandle[R]]):
    """A flow that was started. The blocking form of `AsyncFlowHandle`."""

    def __init__(self, portal: Portal, handle: AsyncFlowHandle[R]) -> None:
        super().__init__(portal, handle)
        self.id = handle.id

    status = blocking(AsyncFlowHandle.status)
    nodes = blocking(AsyncFlowHandle.nodes)
    cancel = blocking(AsyncFlowHandle.cancel)
    retry = blocking(AsyncFlowHandle.retry)

    def wait(self, timeout: Duration | None = None) -> TaskStatus:
        """Wait until the flow has ended, and return its status. Raises `ResultTimeout`."""
        return self._run(self._async_face.wait(timeout), seconds_of("timeout", timeout))

    def result(self, timeout: Duration | None = None) -> R:
        """Wait for the result of the only node that no other waits for."""
        return self._run(self._async_face.result(timeout), seconds_of("timeout", timeout))

    def results(self, timeout: Duration | None = None) -> dict[str, Any]:
        """Wait for the end, and return the results of the nodes that have succeeded, by name."""
        return self._run(self._async_face.results(timeout), seconds_of("timeout", timeout))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlowHandle):
            return NotImplemented
        return self._async_face == other._async_face

    def __hash__(self) -> int:
        return hash(self._async_face)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"
