"""Dead letters: the tasks that failed for good, to look at, to run again, or to forget."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

from omniq.durations import Duration, instant_before
from omniq.errors import DuplicateTask, InvalidValue
from omniq.models import Attempt, DeadLetter, Task
from omniq.storage import BaseStorage
from omniq.to_json import plain

_PAGE = 500

JsonRecord = dict[str, Any]
"""What `json.dumps` can write down."""


class AsyncDeadLetters:
    """The tasks that failed for good.

    `task_type` is a function's path and `reason` why it is dead: `exhausted`, `permanent`,
    `crashed`, `undecodable`, `unknown function`, `unserialisable`. `since` and `until` are about
    the last failure: an instant, or how long ago that was.
    """

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage

    async def list(
        self,
        limit: int = 100,
        *,
        task_type: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        after: str | None = None,
    ) -> list[DeadLetter]:
        """Dead letters in id order, `after` the last id of the page before."""
        first, last = self._instants(since, until)
        return await self._storage.list_dead(
            task_type=task_type, reason=reason, since=first, until=last, limit=limit, after=after
        )

    async def get(self, task_id: str) -> DeadLetter | None:
        """One of them, with its checkpoint."""
        return await self._storage.get_dead(task_id)

    async def get_task(self, task_id: str) -> Task | None:
        """The task as it would be retried, with its arguments; also when its result has gone."""
        return await self._storage.get_dead_task(task_id)

    async def attempts(self, task_id: str) -> Sequence[Attempt]:
        """Every failed run of it with its error and traceback: the first, and the newest ones."""
        return await self._storage.history(task_id)

    async def retry(
        self,
        task_id: str,
        *,
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        from_start: bool = False,
    ) -> bool:
        """Run the task again under its id, with other arguments if given; False if it is not dead.

        One atomic step: of two that retry at once, one gets True. When it cannot be enqueued, that
        is raised and the letter stays. A task that had finished steps resumes after them, unless
        `from_start`.
        """
        task = None
        if args is not None or kwargs is not None:
            task = await self._edited(task_id, args, kwargs)
            if task is None:
                return False
        return await self._storage.retry_dead(task_id, task=task, from_start=from_start)

    async def retry_all(
        self,
        *,
        task_type: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        from_start: bool = False,
    ) -> int:
        """Run all of them again, or those that the filters name; how many.

        One whose unique key another task holds stays dead. A full queue raises `QueueFull`: what
        was retried before that is in the queue, the others stay.
        """
        count = 0
        async for letter in self._each(task_type, reason, since, until):
            try:
                count += await self._storage.retry_dead(letter.task_id, from_start=from_start)
            except DuplicateTask:
                continue
        return count

    async def delete(self, task_id: str) -> bool:
        """Forget one for good; False if there is none."""
        return await self._storage.delete_dead(task_id)

    async def purge(self, older_than: Duration | datetime) -> int:
        """Forget those that failed before that instant, or longer ago than that; how many."""
        now = self._storage.clock.now()
        return await self._storage.purge_dead(instant_before("older_than", older_than, now))

    async def export(
        self,
        *,
        task_type: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
    ) -> AsyncIterator[JsonRecord]:
        """All that is known of each, for JSON lines: the letter, the call, every attempt.

        What JSON has no word for is written as text, bytes and the checkpoint as base64.
        """
        async for letter in self._each(task_type, reason, since, until):
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
        task_type: str | None,
        reason: str | None,
        since: Duration | datetime | None,
        until: Duration | datetime | None,
    ) -> AsyncIterator[DeadLetter]:
        # Worked out once: "an hour ago" must not move from page to page.
        first, last = self._instants(since, until)
        after = ""
        while page := await self._storage.list_dead(
            task_type=task_type, reason=reason, since=first, until=last, limit=_PAGE, after=after
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
        )


def _record(letter: DeadLetter, task: Task, attempts: Sequence[Attempt]) -> JsonRecord:
    record: JsonRecord = plain(letter)
    for name in ("args", "kwargs", "metadata", "max_retries", "created_at"):
        record[name] = plain(getattr(task, name))
    record["attempts"] = plain(attempts)
    return record
