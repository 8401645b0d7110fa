"""The contract for workflows: what waits for what, and what becomes of it.

A task may wait for other records, and belong to one. Besides tasks there are two kinds of records, which
never run: an event ends when it is given a value, and a group with its last member.

F1. A task is not claimed before its sources have ended as it asks: `after` by success, `after_any` anyhow.
F2. It is claimable with the step that records the last of them, whoever dies; of more than a thousand waiters
    within the next turns.
F3. Every way to end releases: success, failure, crash limit, expiry, cancel, discard, transaction, completion.
F4. A task that needs one that did not succeed never runs: it ends as CANCELLED, naming the cause, and so do
    those that need it; each step is bounded.
F5. Sources that have ended count at the enqueue; unknown ones, circles, ancestors and repeating tasks are
    refused, and nothing is written.
F6. A batch whose tasks wait for one another is stored whole or not at all.
F7. A `Suspended` task is PENDING, uncharged, held by no owner, and has left its gates; it is claimable when
    enough of the others have ended, or at `until`. What ended before counts.
F8. A claim that is not current neither suspends nor adds children.
F9. Children that are added again under the same id and nonce are added once.
F10. A group ends once, with its last member, whichever owner records that; its counts are exact.
F11. Members join only while the group is live, in one step with its size.
F12. An event has the first value that it was given, also if that was before a task waited for it.
F13. Its `expires` ends it, and releases what waits for it.
F14. A repeated outcome, completion or enqueue changes nothing.
F15. Cancelling reaches all below, also when the canceller dies; nothing below begins after its own
    cancellation.
F16. A record below another is never deleted before it, and never left behind.
F17. `revive` is one step; of two concurrent retries one succeeds; what has succeeded stays.
F18. The unique key of a root is free in the step in which it ends.
F19. An edge of an earlier wait releases nothing.
F20. In a caller's transaction nothing is locked that a worker needs; such waits are settled by the next
    maintenance of any worker.
F21. Waiting tasks cost a claim nothing.
F22. `sources_of` names what a task waits for; `get_task` says how much is missing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from omniq.models import Task, TaskResult, TaskStatus, check_id
from omniq.storage.row_rules import Workflow
from omniq.storage.side_data import SideData
from omniq.tasks.flow_records import EVENT_NONCE, name_of


class Source(msgspec.Struct, frozen=True):
    """A record that a task waits for. `status`: None if it has no record any more."""

    id: str
    status: TaskStatus | None
    any_end: bool


class Flows(SideData):
    """The verbs of workflows."""

    async def complete(self, event_id: str, value: Any = None) -> bool:
        """Give an event its value; returns False when it has ended already, or there is none."""
        return bool(await self._complete(event_id, value))

    async def send(self, event: Task, value: Any = None) -> bool:
        """Give an event its value, adding its record if there is none; False when it has its value already.

        The record of an event that is sent before a task waits for it belongs to the task as any other.
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
        """Say that a group gets no more members; it ends with the last one. False when it has ended."""
        check_id(group_id)
        return await self._opened.close_group(group_id)

    async def revive(self, root_id: str, ids: Sequence[str]) -> bool:
        """Put ended tasks below a root back, with the root; False if one of them is live or gone.

        Each waits for those of its sources that have not succeeded.
        """
        is_revived = await self._opened.revive(root_id, list(ids))
        if is_revived:
            self._local_wakeups.notify_work()
        return is_revived

    async def advance_flows(self) -> bool:
        """Do what earlier steps have left to do, and what is due; returns whether there was anything.

        The maintenance of every worker calls it.
        """
        has_advanced = await self._opened.advance()
        if has_advanced:
            self._local_wakeups.notify_work()
        return has_advanced

    async def missing_of(self, ids: Sequence[str]) -> list[str]:
        """Return those of these ids that have no record."""
        found = await self._opened.records(ids)
        return [task_id for task_id in ids if task_id not in found]

    async def results_of(self, ids: Sequence[str]) -> dict[str, TaskResult]:
        """Return the final results of those of these tasks that have ended and have a record."""
        found = await self._opened.records(ids)
        return {
            task_id: self._result(task_id, record.finished.result)
            for task_id, record in found.items()
            if record.finished is not None
        }

    async def values_of(self, ids: Sequence[str]) -> dict[str, Any]:
        """Return the results of records that have succeeded; that of a group is a list of its members'.

        Members whose names begin with `_` are not among them.
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
            members = [
                row.id
                for row in rows
                if row.workflow is not None
                and row.workflow.parent == group_id
                and not name_of(row.id).startswith("_")
            ]
            values = await self.values_of(members)
            for task_id in members:
                yield values.get(task_id)

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
        """Return what a task waits for that has not ended as it asks."""
        check_id(task_id)
        record = await self._opened.record(task_id)
        if record is None or not record.is_live:
            return []
        workflow = record.row.workflow or Workflow()
        if workflow.needs <= workflow.holds:
            return []
        wanted = workflow.on or (*workflow.after, *workflow.after_any)
        found = await self._opened.records(wanted)
        sources = [
            Source(
                each,
                found[each].newest_row.status if each in found else None,
                each in workflow.on or each in workflow.after_any,
            )
            for each in wanted
        ]
        return [source for source in sources if not _is_satisfied(source)]


def _is_satisfied(source: Source) -> bool:
    if source.status is None or not source.status.is_final:
        return source.status is None
    return source.any_end or source.status is TaskStatus.SUCCESS
