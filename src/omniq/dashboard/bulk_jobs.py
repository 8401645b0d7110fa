"""Changes of everything that a search matches: counted first, then made in the background, with progress and a stop.

A job belongs to the process of the dashboard. What it has done when that process ends stays done; the same
search finds the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec

from omniq.clock import Clock
from omniq.dashboard import queries
from omniq.dashboard.app_state import AppState
from omniq.errors import InvalidValue, OmniqError
from omniq.operations import bulk_actions
from omniq.operations.bulk_actions import BulkReport
from omniq.operations.find_tasks import find_tasks
from omniq.operations.newest import dead_newest_first
from omniq.storage.base import BaseStorage

Verb = Literal["retry", "delete", "cancel", "run-now", "retry-dead", "delete-dead"]
VERBS: dict[Verb, tuple[str, str]] = {
    "retry": ("Retry", "retried"),
    "cancel": ("Cancel", "cancelled"),
    "run-now": ("Run now", "made due"),
    "delete": ("Delete", "deleted"),
    "retry-dead": ("Retry", "retried"),
    "delete-dead": ("Delete", "deleted"),
}
"""What a job may do: the word for a button, and for the result."""

_BATCH = 200
_COUNT_SECONDS = 2.5
_MAX_JOBS = 50
_MAX_REASONS = 20

State = Literal["running", "done", "stopped", "failed"]


class Matches(msgspec.Struct, frozen=True):
    """How many match; `is_complete` is False if counting took too long, so that there are more."""

    count: int
    is_complete: bool


class Job:
    """A change of everything that matched."""

    def __init__(self, job_id: str, verb: Verb, subject: str, clock: Clock) -> None:
        self.id = job_id
        self.verb = verb
        self.subject = subject
        self.started_at = clock.now()
        self.state: State = "running"
        self.done = 0
        self.refused = 0
        self.reasons: dict[str, int] = {}
        self.error = ""
        self.task: asyncio.Task[None] | None = None

    @property
    def word(self) -> str:
        """What it does to each task."""
        return VERBS[self.verb][1]

    def as_json(self) -> dict[str, Any]:
        """The job for the API."""
        names = ("id", "verb", "subject", "state", "done", "refused", "reasons", "error")
        return {name: getattr(self, name) for name in names}

    def add(self, report: BulkReport) -> None:
        """Count what was done."""
        self.done += report.done
        self.refused += len(report.refused)
        for why in report.refused.values():
            if why in self.reasons or len(self.reasons) < _MAX_REASONS:
                self.reasons[why] = self.reasons.get(why, 0) + 1


class BulkJobs:
    """The jobs of this process, newest first."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._jobs: dict[str, Job] = {}

    def list(self) -> list[Job]:
        """All jobs that are remembered."""
        return list(reversed(self._jobs.values()))

    def get(self, job_id: str) -> Job | None:
        """One job."""
        return self._jobs.get(job_id)

    def start(self, verb: Verb, query: Query, subject: str) -> Job:
        """Begin to change everything that matches now."""
        job = Job(self._state.clock.new_id(), verb, subject, self._state.clock)
        self._jobs[job.id] = job
        while len(self._jobs) > _MAX_JOBS:
            oldest = next(iter(self._jobs))
            if self._jobs[oldest].state == "running":
                break
            del self._jobs[oldest]
        job.task = asyncio.get_running_loop().create_task(self._run(job, query))
        return job

    def stop(self, job_id: str) -> Job:
        """Stop a job after the batch that it is at."""
        job = self._jobs.get(job_id)
        if job is None:
            raise InvalidValue(f"job {job_id}: this dashboard has none with this id")
        if job.state == "running":
            job.state = "stopped"
        return job

    async def close(self) -> None:
        """Stop all jobs."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: Job, query: Query) -> None:
        try:
            async with self._state.searches.use() as storage:
                async for ids in _batches(storage, self._state, query):
                    if job.state != "running":
                        return
                    job.add(await _act(self._state.storage, job.verb, ids))
                    self._state.invalidate()
            job.state = "done"
        except OmniqError as error:
            job.state, job.error = "failed", str(error)


Query = queries.TasksQuery | queries.DeadQuery


async def count_matches(state: AppState, query: Query) -> Matches:
    """How many match, as far as that can be counted in a short time."""
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
            if queries.dead_matches(letter, query):
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
