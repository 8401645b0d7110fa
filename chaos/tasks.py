"""The tasks of a run: each records when it starts, its steps, and how it ends."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import datetime
from typing import Any

import msgspec

from chaos import task_writes
from chaos.history import Journal, current
from omniq import Snooze, TaskContext, batched, task
from omniq.models import PermanentError, TaskStatus

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
"""The tenants, whose tasks have a `fair_key`, and their weights."""

BATCH_SIZE = 4


class PlannedFailure(Exception):
    """The error of a task whose plan says that it fails."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a task does, and how it must end. Times are seconds.

    `eta` is on the history's clock. `group` is a key of which only `width` tasks may run at
    a time; with a `span`, only that many may start within `span` seconds. With `units`, `width` is
    a number of units, of which the task takes so many. With `changes`, an operator changes the width.
    """

    seconds: float = 0.0
    failures: int = 0
    snoozes: int = 0
    steps: int = 0
    fatal: bool = False
    max_retries: int = 5
    eta: float = 0.0
    unique: str = ""
    group: str = ""
    width: int = 0
    span: float = 0.0
    text: str = ""
    after: str = ""
    """The id of a task that must have ended, in whatever way, before this one begins."""
    sequence: str = ""
    """Tasks of one sequence start in the order in which they were enqueued."""
    tenant: str = ""
    """The tenants take turns."""
    strict: str = ""
    """Tasks of one strict sequence run one at a time, in the order in which they were enqueued."""
    replaces: str = ""
    """A unique key, whose waiting holder gets the arguments of this call."""
    batch: bool = False
    units: int = 0
    changes: bool = False
    writes: bool = False
    """Insert a row in the transaction of its success, if the store has transactions."""

    @property
    def is_plain_group(self) -> bool:
        """Whether a fixed number of its group may run at a time."""
        return bool(self.group) and not (self.span or self.units or self.changes)

    @property
    def is_controlled(self) -> bool:
        """Whether it tests flow control; then it waits for nothing else."""
        return bool(self.tenant or self.strict or self.replaces or self.batch or self.units)

    @property
    def expected_status(self) -> TaskStatus:
        """The final status, unless it is cancelled or counts too many crashes."""
        fails = self.fatal or self.failures > self.max_retries
        return TaskStatus.FAILED if fails else TaskStatus.SUCCESS


def expected_value(task_id: str, text: str) -> str:
    """Return the result of a task with that id and argument."""
    return hashlib.sha256(f"{task_id} {text}".encode()).hexdigest()[:32]


@task(timeout=None)
async def work(ctx: TaskContext, plan: dict[str, Any]) -> list[Any]:
    """Follow the plan; return a value that depends on the arguments, and the token."""
    spec = msgspec.convert(plan, Plan)
    journal, how = current.get(), "stopped"
    text = spec.text if spec.replaces else None
    journal.note("start", ctx.task_id, ctx.fencing_token, value=text)
    try:
        await _do(ctx, journal, spec)
        if ctx.fencing_token <= spec.snoozes:
            raise Snooze(0.5)
        if spec.fatal:
            raise PermanentError("the plan says that this task fails for good")
        if ctx.attempt <= spec.failures:
            raise PlannedFailure
        result = [expected_value(ctx.task_id, spec.text), ctx.fencing_token]
        if spec.writes:
            async with ctx.transaction() as connection:
                await task_writes.write(connection, ctx.task_id)
                ctx.result = result
        how = "returned"
        return result
    except Exception:
        # Includes storage errors of a step that could not be stored.
        how = "raised"
        raise
    finally:
        journal.note("end", ctx.task_id, ctx.fencing_token, value=how)


async def _do(ctx: TaskContext, journal: Journal, spec: Plan) -> None:
    pause = spec.seconds / (spec.steps + 1)
    for number in range(spec.steps):
        await asyncio.sleep(pause)
        await ctx.step(f"step {number}", _step, journal, ctx.task_id, ctx.fencing_token, number)
    await asyncio.sleep(pause)


async def _step(journal: Journal, task_id: str, token: int, number: int) -> int:
    journal.note("step", task_id, token, value=number)
    return number


@task(timeout=None)
@batched(size=BATCH_SIZE, wait=0.2)
async def work_together(
    contexts: list[TaskContext], plans: list[dict[str, Any]]
) -> list[list[Any] | BaseException]:
    """Follow the plans of the items of one call, each of which has its own outcome."""
    journal, specs = current.get(), [msgspec.convert(plan, Plan) for plan in plans]
    call = f"{contexts[0].task_id}/{contexts[0].fencing_token}"
    for ctx in contexts:
        journal.note("start", ctx.task_id, ctx.fencing_token, value=call)
    ends = dict.fromkeys([ctx.task_id for ctx in contexts], "stopped")
    outcomes: list[list[Any] | BaseException] = []
    try:
        await asyncio.sleep(max(spec.seconds for spec in specs))
        for ctx, spec in zip(contexts, specs, strict=True):
            ends[ctx.task_id] = "raised"
            if spec.fatal:
                outcomes.append(PermanentError("the plan says that this task fails for good"))
            elif ctx.attempt <= spec.failures:
                outcomes.append(PlannedFailure())
            else:
                ends[ctx.task_id] = "returned"
                outcomes.append([expected_value(ctx.task_id, spec.text), ctx.fencing_token])
        return outcomes
    finally:
        for ctx in contexts:
            journal.note("end", ctx.task_id, ctx.fencing_token, value=ends[ctx.task_id])


@task(timeout=None, max_retries=1000)
async def tick(ctx: TaskContext) -> list[Any]:
    """The task of the schedules."""
    journal = current.get()
    journal.note("start", ctx.task_id, ctx.fencing_token)
    nominal = datetime.fromisoformat(ctx.metadata["scheduled_for"])
    journal.note("end", ctx.task_id, ctx.fencing_token, value="returned")
    return [nominal.timestamp(), ctx.fencing_token]
