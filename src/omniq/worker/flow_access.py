"""The records of a workflow, for the running tasks of a worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeVar

from omniq.errors import StaleClaim
from omniq.models import PermanentError, Task, TaskResult, TaskStatus
from omniq.operations.flow_handle import flow_value
from omniq.storage.base import BaseStorage
from omniq.tasks.flow_records import EVENT_NONCE

_T = TypeVar("_T")


class Retrying(Protocol):
    """Repeats a call while the storage is unreachable."""

    async def __call__(self, activity: str, call: Callable[[], Awaitable[_T]]) -> _T: ...


class StoredFlows:
    """Reads and changes the records of workflows for running tasks, over the worker's storage."""

    def __init__(self, storage: BaseStorage, retrying: Retrying) -> None:
        self._storage = storage
        self._retrying = retrying

    async def add_children(self, task: Task, children: Sequence[Task], nonce: str) -> None:
        storage, claim = self._storage, (task.id, task.token)
        if storage.lease_remaining <= 0:
            raise StaleClaim(*claim)
        await self._retrying(
            "enqueue", lambda: storage.enqueue_many(children, nonce=nonce, under=claim)
        )

    async def add_event(self, event: Task) -> None:
        storage = self._storage
        await self._retrying("enqueue", lambda: storage.enqueue_many([event], nonce=EVENT_NONCE))

    async def missing_of(self, ids: Sequence[str]) -> list[str]:
        return await self._retrying("read", lambda: self._storage.missing_of(ids))

    async def close_group(self, group_id: str) -> None:
        await self._retrying("enqueue", lambda: self._storage.close_group(group_id))

    async def results_of(self, ids: Sequence[str]) -> dict[str, TaskResult]:
        return await self._retrying("read", lambda: self._storage.results_of(ids))

    async def values_of(self, ids: Sequence[str]) -> dict[str, Any]:
        return await self._retrying("read", lambda: self._storage.values_of(ids))

    async def values_page(self, group_id: str, after: str) -> tuple[list[Any], str]:
        storage = self._storage
        page = await self._retrying("read", lambda: storage.values_page(group_id, after=after))
        if page is None:
            raise PermanentError(f"the results of {group_id} are gone: its record was deleted")
        return page

    async def flow_value(self, flow_id: str) -> Any:
        return await self._retrying("read", lambda: flow_value(self._storage, flow_id))

    async def failures_of(self, group_id: str, limit: int) -> list[TaskResult]:
        async def read() -> list[TaskResult]:
            found: list[TaskResult] = []
            after = ""
            while len(found) < limit:
                page = await self._storage.list_below(group_id, after=after)
                ended = [task.id for task in page if task.status is TaskStatus.FAILED]
                results = await self._storage.results_of(ended[: limit - len(found)])
                found += results.values()
                if len(page) < 1_000:
                    break
                after = page[-1].id
            return found

        return await self._retrying("read", read)

    async def event_deadline(self, event_id: str) -> datetime | None:
        task = await self._retrying("read", lambda: self._storage.get_task(event_id))
        return None if task is None else task.expires

    async def expire_event(self, event_id: str) -> None:
        await self._retrying("read", lambda: self._storage.cancel(event_id, "expired"))
