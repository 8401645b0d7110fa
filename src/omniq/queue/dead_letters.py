"""Dead letters: read, retry, delete and export the tasks that failed for good."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

from omniq import log
from omniq.errors import DuplicateTask, InvalidValue
from omniq.events import DeadLetterRetried
from omniq.models import Attempt, DeadLetter, Task
from omniq.storage import BaseStorage
from omniq.tasks.durations import Duration, instant_before
from omniq.text.to_json import plain

_PAGE = 500

JsonRecord = dict[str, Any]
"""Values that `json.dumps` can encode."""


class AsyncDeadLetters:
    """The tasks that failed for good.

    `func_path` is a function's path, `task_type` the type that the task was given, or the function's path
    of one that was given none, and `reason` why the task is dead: `exhausted`, `permanent`,
    `unclassified`, `crashed`, `signature`, `undecodable`, `unknown function`, `unserialisable`. `since` and `until`
    bound the time of the last failure: an instant, or how long ago.
    """

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage

    async def list(
        self,
        limit: int = 100,
        *,
        func_path: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        after: str | None = None,
        task_type: str | None = None,
    ) -> list[DeadLetter]:
        """Return dead letters in id order; `after` is the last id of the previous page."""
        first, last = self._instants(since, until)
        return await self._storage.list_dead(
            func_path=func_path,
            reason=reason,
            since=first,
            until=last,
            limit=limit,
            after=after,
            task_type=task_type,
        )

    async def get(self, task_id: str) -> DeadLetter | None:
        """Return one dead letter with its checkpoint; None if there is none."""
        return await self._storage.get_dead(task_id)

    async def get_task(self, task_id: str) -> Task | None:
        """Return the task that a retry would run, also after its result has been deleted."""
        return await self._storage.get_dead_task(task_id)

    async def attempts(self, task_id: str) -> Sequence[Attempt]:
        """Return the failed runs with error and traceback: the first one and the newest ones."""
        return await self._storage.history(task_id)

    async def retry(
        self,
        task_id: str,
        *,
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        from_start: bool = False,
    ) -> bool:
        """Enqueue the task again under its id, with new arguments if given; False if it is not dead.

        This is one atomic step: of two callers that retry at the same time, one gets True. If the task
        cannot be enqueued, the error is raised and the dead letter stays. A task with finished
        steps resumes after them, unless `from_start`.
        """
        task = None
        if args is not None or kwargs is not None:
            task = await self._edited(task_id, args, kwargs)
            if task is None:
                return False
        return await self._retry(task_id, task, from_start=from_start)

    async def _retry(self, task_id: str, task: Task | None, *, from_start: bool) -> bool:
        is_retried = await self._storage.retry_dead(task_id, task=task, from_start=from_start)
        if is_retried and log.is_enabled():
            log.write(DeadLetterRetried(id=task_id))
        return is_retried

    async def retry_all(
        self,
        *,
        func_path: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        from_start: bool = False,
        task_type: str | None = None,
    ) -> int:
        """Retry all dead letters, or those that match the filters; return how many.

        A dead letter whose unique key another task holds stays. A full queue raises `QueueFull`:
        the tasks that were retried before that are in the queue, the others stay dead.
        """
        count = 0
        async for letter in self._each(func_path, reason, since, until, task_type):
            try:
                count += await self._retry(letter.task_id, None, from_start=from_start)
            except DuplicateTask:
                continue
        return count

    async def delete(self, task_id: str) -> bool:
        """Delete one dead letter; False if there is none."""
        return await self._storage.delete_dead(task_id)

    async def purge(self, older_than: Duration | datetime) -> int:
        """Delete those that failed before an instant, or longer ago than that; return how many."""
        now = self._storage.clock.now()
        return await self._storage.purge_dead(instant_before("older_than", older_than, now))

    async def export(
        self,
        *,
        func_path: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        task_type: str | None = None,
    ) -> AsyncIterator[JsonRecord]:
        """Yield one JSON record for each dead letter: the letter, the call and every attempt.

        Values that JSON has no type for become text; bytes and the checkpoint become base64.
        """
        async for letter in self._each(func_path, reason, since, until, task_type):
            found = await self.get(letter.task_id)
            task = await self.get_task(letter.task_id)
            if found is not None and task is not None:
                yield _record(found, task, await self.attempts(letter.task_id))

    def _instants(
        self, since: Duration | datetime | None, until: Duration | datetime | None
    ) -> tuple[datetime | None, datetime | None]:
        now = self._storage.clock.now()
        return (
            None if since is None else instant_before("since", since, now, error=InvalidValue),
            None if until is None else instant_before("until", until, now, error=InvalidValue),
        )

    async def _each(
        self,
        func_path: str | None,
        reason: str | None,
        since: Duration | datetime | None,
        until: Duration | datetime | None,
        task_type: str | None,
    ) -> AsyncIterator[DeadLetter]:
        # Computed once: "an hour ago" must not move from page to page.
        first, last = self._instants(since, until)
        after = ""
        while page := await self._storage.list_dead(
            func_path=func_path,
            reason=reason,
            since=first,
            until=last,
            limit=_PAGE,
            after=after,
            task_type=task_type,
        ):
            for letter in page:
                yield letter
            after = page[-1].task_id

    async def _edited(
        self, task_id: str, args: Sequence[Any] | None, kwargs: dict[str, Any] | None
    ) -> Task | None:
        task = await self.get_task(task_id)
        if task is None:
            return None
        return msgspec.structs.replace(
            task,
            args=task.args if args is None else tuple(args),
            kwargs=task.kwargs if kwargs is None else kwargs,
            # The storage looks at what is stored: see `BaseStorage.retry_dead`.
            is_verified=True,
        )


def _record(letter: DeadLetter, task: Task, attempts: Sequence[Attempt]) -> JsonRecord:
    record: JsonRecord = plain(letter)
    for name in ("args", "kwargs", "metadata", "max_retries", "created_at"):
        record[name] = plain(getattr(task, name))
    record["attempts"] = plain(attempts)
    return record
