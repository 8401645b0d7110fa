"""Bulk changes of all tasks that a search matches: counted first, then made in the background.

A job runs in the process of the dashboard, shows its progress and can be stopped. Changes that were made before the
process ends are not undone; the same search finds the remaining tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec

from omniq.dashboard import queries, searches
from omniq.dashboard.app_state import AppState
from omniq.dashboard.jobs import Job, Verb
from omniq.errors import OmniqError
from omniq.operations import bulk_actions
from omniq.operations.bulk_actions import BulkReport, change_in_steps
from omniq.operations.bulk_selection import Steps, select_dead, select_tasks
from omniq.operations.find_tasks import find_tasks
from omniq.operations.newest import dead_newest_first
from omniq.operations.search_query import TaskSearch
from omniq.storage.base import BaseStorage

_BATCH = 200
_COUNT_SECONDS = 2.5


class Matches(msgspec.Struct, frozen=True):
    """The number of matches; `is_complete` is False if counting took too long and there may be more."""

    count: int
    is_complete: bool


Query = queries.TasksQuery | queries.DeadQuery


def start(state: AppState, verb: Verb, query: Query, subject: str) -> Job:
    """Start to change everything that matches."""
    job = Job(state.clock.new_id(), verb, subject, state.clock)
    state.jobs.add(job)
    job.task = asyncio.get_running_loop().create_task(_run(state, job, query))
    return job


async def _run(state: AppState, job: Job, query: Query) -> None:
    async def change(ids: Sequence[str]) -> BulkReport:
        report = await _act(state.storage, job.verb, ids)
        job.add(report)
        state.invalidate()
        return report

    try:
        async with state.searches.use() as storage:
            steps = _steps(storage, state, query)
            await change_in_steps(steps, change, lambda _: job.state == "running")
        if job.state == "running":
            job.state = "done"
    except OmniqError as error:
        job.state, job.error = "failed", str(error)


def _steps(storage: BaseStorage, state: AppState, query: Query) -> Steps:
    """The ids of everything that matches, also of tasks whose ids say nothing about their age."""
    if isinstance(query, queries.DeadQuery):
        wanted = TaskSearch(func_path=query.function, task_type=query.type)
        return select_dead(
            storage,
            wanted,
            reason=query.reason,
            fits=lambda letter: searches.dead_matches(letter, query),
        )
    wanted = queries.search_of(state, query)
    return select_tasks(storage, wanted, lambda task: True, and_dead=True)


async def count_matches(state: AppState, query: Query) -> Matches:
    """The number of matches, as far as they can be counted in a short time."""
    deadline, count = state.clock.monotonic() + _COUNT_SECONDS, 0
    async with state.searches.use() as storage:
        async for ids in _batches(storage, state, query):
            count += len(ids)
            if state.clock.monotonic() >= deadline:
                return Matches(count, False)
    return Matches(count, True)


async def _batches(
    storage: BaseStorage, state: AppState, query: Query
) -> AsyncIterator[Sequence[str]]:
    """The ids of everything that matches, newest first, in batches."""
    if isinstance(query, queries.DeadQuery):
        batch: list[str] = []
        letters = dead_newest_first(
            storage, func_path=query.function, task_type=query.type, reason=query.reason
        )
        async for letter in letters:
            if searches.dead_matches(letter, query):
                batch.append(letter.task_id)
            if len(batch) == _BATCH:
                yield batch
                batch = []
        if batch:
            yield batch
        return
    wanted, cursor = queries.search_of(state, query), None
    while True:
        page = await find_tasks(storage, wanted, limit=_BATCH, cursor=cursor)
        if page.tasks:
            yield [task.id for task in page.tasks]
        cursor = page.cursor
        if cursor is None:
            return


async def _act(storage: BaseStorage, verb: Verb, ids: Sequence[str]) -> BulkReport:
    acts: dict[Verb, Callable[[BaseStorage, Sequence[str]], Awaitable[BulkReport]]] = {
        "retry": bulk_actions.retry_dead,
        "retry-dead": bulk_actions.retry_dead,
        "delete": bulk_actions.delete_tasks,
        "delete-dead": bulk_actions.delete_dead,
        "run-now": bulk_actions.run_now,
        "cancel": _cancel,
    }
    return await acts[verb](storage, ids)


async def _cancel(storage: BaseStorage, ids: Sequence[str]) -> BulkReport:
    return await bulk_actions.cancel_tasks(storage, ids, reason="by an operator")
