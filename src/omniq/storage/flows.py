"""The contract for workflows.

A task may wait for other records, and may be below another record. Two kinds of records are no tasks and never run:
an event ends when it is given a value, and a group ends with its last member.

F1. A task is not claimed before its `after` sources have succeeded and its `after_any` sources have ended.
F2. The step that records the last end makes it claimable, even if a process dies. If a source has more than about 300
    waiters, the next turns of any worker release the rest.
F3. Every kind of end releases waiting tasks: success, failure, crash limit, expiry, cancel, discard, transaction, completion.
F4. A task that needs another one that did not succeed never runs: it ends as CANCELLED and names the cause, and so do
    the tasks that need it. Each step is bounded.
F5. Sources that have already ended count at the enqueue. Unknown sources, cycles, ancestors and repeating tasks are
    refused, and nothing is written.
F6. A batch whose tasks wait for one another is stored as a whole or not at all.
F7. A `Suspended` task is PENDING, has no owner, holds no gates and uses no attempt. It is claimable when enough of its
    sources have ended, or at `until`. Sources that ended before count.
F8. A claim that is not current neither suspends nor adds children.
F9. Children that are added again under the same id and nonce are added once.
F10. A group ends once, with its last member; its counts are exact.
F11. Members are added only while the group is live, in the step that updates its size.
F12. An event has the first value that it was given, even if it was given before a task waited for it.
F13. An event ends when it expires, and releases the tasks that wait for it.
F14. A repeated outcome, completion or enqueue changes nothing.
F15. Cancelling a record cancels all records below it, even if the caller dies. No task below begins after it was
    cancelled.
F16. A record below another is never deleted before it, and is deleted after it.
F17. `revive` is one step; of two concurrent retries one succeeds; results of tasks that succeeded are kept.
F18. The unique key of a root is free in the step in which it ends.
F19. An edge of an earlier wait releases nothing.
F20. An enqueue in a caller's transaction locks no row that a worker needs; the next maintenance of any worker stores
    the edges of its waits.
F21. Waiting tasks do not slow down claims.
F22. `sources_of` returns what a task waits for; `get_task` returns how many sources it still needs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from omniq.models import Task, TaskResult, TaskStatus, check_id
from omniq.storage.backend import Record
from omniq.storage.outputs import Outputs
from omniq.storage.row_rules import Row, Workflow
from omniq.tasks.flow_records import EVENT_NONCE, name_of


class Source(msgspec.Struct, frozen=True):
    """A source of a task. `status` is None if its record was deleted."""

    id: str
    status: TaskStatus | None
    any_end: bool


class Flows(Outputs):
    """The verbs of workflows."""

    async def complete(self, event_id: str, value: Any = None) -> bool:
        """Give an event its value; returns False if it has already ended, or does not exist."""
        return bool(await self._complete(event_id, value))

    async def send(self, event: Task, value: Any = None) -> bool:
        """Give an event its value, and add its record if there is none; False if it already has a value.

        An event of a task is below that task, even if it is sent before the task waits for it.
        """
        is_first = await self._complete(event.id, value)
        if is_first is None:
            await self._opened.enqueue(list(self._rows_for((event,), EVENT_NONCE)))
            is_first = await self._complete(event.id, value)
        return bool(is_first)

    async def _complete(self, event_id: str, value: Any) -> bool | None:
        check_id(event_id)
        result = TaskResult(
            task_id=event_id,
            status=TaskStatus.SUCCESS,
            result=value,
            finished_at=self._clock.now(),
        )
        is_first = await self._opened.complete(event_id, self._serializer.encode_result(result))
        if is_first:
            self._local_wakeups.notify_work()
            self._local_wakeups.notify_results((event_id,))
        return is_first

    async def close_group(self, group_id: str) -> bool:
        """Close a group to new members; it ends with its last member. Returns False if it has ended."""
        check_id(group_id)
        return await self._opened.close_group(group_id)

    async def revive(self, root_id: str, ids: Sequence[str]) -> bool:
        """Make ended tasks below a root, and the root, live again; False if one of them is live or was deleted.

        Each task waits for those of its sources that have not succeeded.
        """
        is_revived = await self._opened.revive(root_id, list(ids))
        if is_revived:
            self._local_wakeups.notify_work()
        return is_revived

    async def advance_flows(self) -> bool:
        """Do work that earlier steps have left and that is due; returns whether there was any.

        The maintenance of every worker calls it.
        """
        has_advanced = await self._opened.advance()
        if has_advanced:
            self._local_wakeups.notify_work()
        return has_advanced

    async def missing_of(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that have no record."""
        found = await self._opened.records(ids)
        return [task_id for task_id in ids if task_id not in found]

    async def results_of(self, ids: Sequence[str]) -> dict[str, TaskResult]:
        """Return the final results of the tasks that have ended and still have a record."""
        found = await self._opened.records(ids)
        return {
            task_id: self._result(task_id, record.finished.result)
            for task_id, record in found.items()
            if record.finished is not None
        }

    async def values_of(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return the results of records that have succeeded. The result of a group is the list of its members' results.

        Members whose names begin with `_` are left out.
        """
        found = await self._opened.records(ids)
        values: dict[str, Any] = {}
        for task_id, record in found.items():
            if record.finished is None or record.finished.row.status is not TaskStatus.SUCCESS:
                continue
            workflow = record.finished.row.workflow
            if workflow is not None and workflow.kind == "group":
                values[task_id] = [value async for value in self.member_values(task_id)]
            else:
                values[task_id] = self._result(task_id, record.finished.result).result
        return values

    async def member_values(self, group_id: str) -> AsyncIterator[Any]:
        """The results of the members of a group, in id order, read in pages."""
        async for rows in self._opened.below(group_id):
            for value in await self._member_page(group_id, rows):
                yield value

    async def values_page(self, task_id: str, *, after: str = "") -> tuple[list[Any], str] | None:
        """Return some results of the members of a group, and the id to go on after: '' at the end.

        Of another record, the page has all items of its result. None if it has no record, or has not succeeded.
        """
        if not after:
            record = (await self._opened.records([task_id])).get(task_id)
            if record is None or not _has_succeeded(record):
                return None
            if (record.newest_row.workflow or Workflow()).kind != "group":
                return list((await self.values_of([task_id]))[task_id]), ""
        async for rows in self._opened.below(task_id, after=after):
            return await self._member_page(task_id, rows), rows[-1].id
        return [], ""

    async def _member_page(self, group_id: str, rows: Sequence[Row]) -> list[Any]:
        members = [
            row.id
            for row in rows
            if row.workflow is not None
            and row.workflow.parent == group_id
            and not name_of(row.id).startswith("_")
        ]
        values = await self.values_of(members)
        return [values.get(task_id) for task_id in members]

    async def list_below(self, root_id: str, *, limit: int = 1_000, after: str = "") -> list[Task]:
        """Return the records below another, live and ended, in id order."""
        check_id(root_id)
        found: list[Task] = []
        async for rows in self._opened.below(root_id, after=after):
            found += [self._task(row) for row in rows]
            if len(found) >= limit:
                break
        return found[:limit]

    async def sources_of(self, task_id: str) -> list[Source]:
        """Return the sources that a task still waits for."""
        check_id(task_id)
        record = await self._opened.record(task_id)
        if record is None or not record.is_live:
            return []
        workflow = record.row.workflow or Workflow()
        wanted: tuple[str, ...] = ()
        if workflow.needs > workflow.holds:
            wanted = workflow.on or (*workflow.after, *workflow.after_any)
        if workflow.follows:
            wanted += (workflow.follows,)
        found = await self._opened.records(wanted)
        sources = [
            Source(
                each,
                found[each].newest_row.status if each in found else None,
                each in workflow.on or each in workflow.after_any,
            )
            for each in wanted
        ]
        return [
            source
            for source in sources
            if source.id == workflow.follows or not _is_satisfied(source)
        ]


def _is_satisfied(source: Source) -> bool:
    if source.status is None or not source.status.is_final:
        return source.status is None
    return source.any_end or source.status is TaskStatus.SUCCESS


def _has_succeeded(record: Record) -> bool:
    return record.finished is not None and record.finished.row.status is TaskStatus.SUCCESS
