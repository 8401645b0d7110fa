"""Bulk changes that run in the background of this process, with their progress."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from omniq.clock import Clock
from omniq.errors import InvalidValue
from omniq.operations.bulk_actions import BulkReport

Verb = Literal["retry", "delete", "cancel", "run-now", "retry-dead", "delete-dead"]
VERBS: dict[Verb, tuple[str, str]] = {
    "retry": ("Retry", "retried"),
    "cancel": ("Cancel", "cancelled"),
    "run-now": ("Run now", "made due"),
    "delete": ("Delete", "deleted"),
    "retry-dead": ("Retry", "retried"),
    "delete-dead": ("Delete", "deleted"),
}
"""The actions of jobs: the word for the button, and for the result."""

_MAX_JOBS = 50
_MAX_REASONS = 20

State = Literal["running", "done", "stopped", "failed"]


class Job:
    """A bulk change."""

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
        """The change that it makes to each task."""
        return VERBS[self.verb][1]

    def as_json(self) -> dict[str, Any]:
        """The job for the API."""
        names = ("id", "verb", "subject", "state", "done", "refused", "reasons", "error")
        return {name: getattr(self, name) for name in names}

    def add(self, report: BulkReport) -> None:
        """Add the result of a batch."""
        self.done += report.done
        self.refused += len(report.refused)
        for why in report.refused.values():
            if why in self.reasons or len(self.reasons) < _MAX_REASONS:
                self.reasons[why] = self.reasons.get(why, 0) + 1


class Jobs:
    """The jobs of this process."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def list(self) -> list[Job]:
        """All jobs that are remembered, newest first."""
        return list(reversed(self._jobs.values()))

    def get(self, job_id: str) -> Job | None:
        """One job."""
        return self._jobs.get(job_id)

    def add(self, job: Job) -> None:
        """Remember a job, and forget the oldest ones that have ended."""
        self._jobs[job.id] = job
        ended = [each.id for each in self._jobs.values() if each.state != "running"]
        for job_id in ended[: max(0, len(self._jobs) - _MAX_JOBS)]:
            del self._jobs[job_id]

    def stop(self, job_id: str) -> Job:
        """Stop a job after its current batch."""
        job = self._jobs.get(job_id)
        if job is None:
            raise InvalidValue(f"job {job_id}: this dashboard has no job with this id")
        if job.state == "running":
            job.state = "stopped"
        return job

    async def close(self) -> None:
        """Stop all jobs."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
