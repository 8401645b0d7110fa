"""`queue.bulk`: change all tasks that match a filter, in steps of a thousand, for async and for blocking code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypedDict, Unpack

import msgspec

from omniq.concurrency.blocking import BlockingFace, blocking
from omniq.errors import InvalidTask
from omniq.models import Task, TaskStatus
from omniq.operations import bulk_actions
from omniq.operations.bulk_actions import BulkReport, OnStep, change_in_steps
from omniq.operations.bulk_selection import (
    Steps,
    can_be_cancelled,
    can_be_deleted,
    can_be_made_due,
    lacks,
    new_values,
    select_dead,
    select_tasks,
)
from omniq.operations.search_query import TaskSearch, check_searchable, parse_search
from omniq.storage import BaseStorage
from omniq.tasks.durations import Duration, instant_before, seconds_of


class BulkFilter(TypedDict, total=False):
    """Which tasks a bulk change is for; all conditions must hold.

    `search` is a search as the dashboard has it, such as `fn:charge arg.order:17`. The others say one thing each:
    `args` and `metadata` map names to values, which are compared as text; `error` is a part of the text of an
    error; `since` and `until` bound the time of the enqueue, as an instant or as an age.
    """

    search: str
    func_path: str | None
    queue: str | None
    status: TaskStatus | str | None
    task_type: str | None
    args: Mapping[str, Any]
    metadata: Mapping[str, Any]
    error: str
    since: Duration | datetime | None
    until: Duration | datetime | None


class AsyncBulk:
    """Changes of all tasks that match: `await queue.bulk.cancel(func_path="app.send")`.

    Without a filter, `all=True` is needed. Each task is changed in one atomic step, and a thousand are read at a
    time. `on_step` is called after each thousand with what is done, and returns False to stop. What was done
    before an interruption stays done; the same call then does the others, and changes nothing twice.
    """

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage

    async def cancel(
        self,
        *,
        all: bool = False,
        reason: str = "by request",
        on_step: OnStep | None = None,
        **wanted: Unpack[BulkFilter],
    ) -> BulkReport:
        """Cancel the tasks that match: a waiting one never runs, a running one is asked to stop."""
        steps = self._tasks("cancel", all, wanted, can_be_cancelled)
        return await self._run(bulk_actions.cancel_tasks, steps, on_step, reason=reason)

    async def delete(
        self, *, all: bool = False, on_step: OnStep | None = None, **wanted: Unpack[BulkFilter]
    ) -> BulkReport:
        """Delete the tasks that match and have ended, with their results and dead letters."""
        search = self._search("delete", all, wanted)
        steps = select_tasks(self._storage, search, can_be_deleted, and_dead=True)
        return await self._run(bulk_actions.delete_tasks, steps, on_step)

    async def run_now(
        self, *, all: bool = False, on_step: OnStep | None = None, **wanted: Unpack[BulkFilter]
    ) -> BulkReport:
        """Make the waiting tasks that match due now. Pauses and limits still hold them."""
        fits = can_be_made_due(self._storage.clock.now())
        steps = self._tasks("run_now", all, wanted, fits)
        return await self._run(bulk_actions.run_now, steps, on_step)

    async def change(
        self,
        *,
        priority: int | None = None,
        to_queue: str | None = None,
        eta: datetime | None = None,
        delay: Duration | None = None,
        all: bool = False,
        on_step: OnStep | None = None,
        **wanted: Unpack[BulkFilter],
    ) -> BulkReport:
        """Give the waiting tasks that match another priority, queue or eta; one that has it is left alone."""
        if delay is not None:
            if eta is not None:
                raise InvalidTask("give either eta or delay, not both")
            eta = self._storage.clock.now() + timedelta(seconds=seconds_of("delay", delay))
        new = new_values(priority=priority, queue=to_queue, eta=eta)
        if not new:
            raise InvalidTask("change: give priority, to_queue, eta or delay")
        steps = self._tasks("change", all, wanted, lacks(new))
        return await self._run(bulk_actions.change_tasks, steps, on_step, **new)

    async def retry(
        self,
        *,
        reason: str | None = None,
        from_start: bool = False,
        all: bool = False,
        on_step: OnStep | None = None,
        **wanted: Unpack[BulkFilter],
    ) -> BulkReport:
        """Retry the dead letters whose task matches, with this reason. One that is refused stays dead."""
        search = self._search("retry", all or reason is not None, wanted)
        steps = select_dead(self._storage, search, reason=reason)
        return await self._run(bulk_actions.retry_dead, steps, on_step, from_start=from_start)

    def _tasks(
        self, verb: str, every: bool, wanted: BulkFilter, fits: Callable[[Task], bool]
    ) -> Steps:
        return select_tasks(self._storage, self._search(verb, every, wanted), fits)

    def _search(self, verb: str, every: bool, wanted: BulkFilter) -> TaskSearch:
        search = search_of(wanted, self._storage.clock.now())
        if not every and search.selects_all:
            raise InvalidTask(
                f"bulk.{verb}: give a filter, such as func_path=…, or all=True for every task"
            )
        return search

    async def _run(
        self,
        change: Callable[..., Awaitable[BulkReport]],
        steps: Steps,
        on_step: OnStep | None,
        **options: Any,
    ) -> BulkReport:
        return await change_in_steps(steps, partial(change, self._storage, **options), on_step)


def search_of(wanted: BulkFilter, now: datetime) -> TaskSearch:
    """The search that the filter describes. Raises `InvalidValue`."""
    unknown = wanted.keys() - BulkFilter.__annotations__.keys()
    if unknown:
        known = ", ".join(sorted(BulkFilter.__annotations__))
        raise InvalidTask(f"{min(unknown)}: there is no such filter; there are {known}")
    search = parse_search(wanted.get("search", ""), now)
    status = wanted.get("status")
    named = {
        "args": search.args | _texts("args", wanted.get("args", {})),
        "metadata": search.metadata | _texts("metadata", wanted.get("metadata", {})),
    }
    exact = {name: wanted.get(name) for name in ("func_path", "queue", "task_type", "error")}
    instants = {
        name: instant_before(name, value, now)
        for name, value in (("since", wanted.get("since")), ("until", wanted.get("until")))
        if value is not None
    }
    return msgspec.structs.replace(
        search,
        **named,
        **{name: value for name, value in exact.items() if value is not None},
        **instants,
        **({} if status is None else {"status": _status(status)}),
    )


def _texts(name: str, values: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(values, Mapping):
        raise InvalidTask(f"{name}={values!r}: expected a dictionary of names and values")
    for key in values:
        check_searchable(f"{name}: {key}", str(key))
    return {str(key): str(value) for key, value in values.items()}


def _status(status: TaskStatus | str) -> TaskStatus:
    try:
        return TaskStatus(status)
    except ValueError:
        raise InvalidTask(f"status={status!r}: expected one of {', '.join(TaskStatus)}") from None


class Bulk(BlockingFace[AsyncBulk]):
    """Changes of all tasks that match. The blocking form of `AsyncBulk`."""

    cancel = blocking(AsyncBulk.cancel)
    delete = blocking(AsyncBulk.delete)
    run_now = blocking(AsyncBulk.run_now)
    change = blocking(AsyncBulk.change)
    retry = blocking(AsyncBulk.retry)
