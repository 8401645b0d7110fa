"""The tasks of a run: each writes down when it starts, what it does, and how it ends."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import datetime
from typing import Any

import msgspec

from chaos import ledger
from chaos.history import Journal, current
from omniq import Snooze, TaskContext, task
from omniq.models import PermanentError, TaskStatus


class Trouble(Exception):
    """What a task raises that was told to fail."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a task is to do, and what must become of it. Times are seconds.

    `eta` is on the history's clock. `group` is a key of which only `width` may run at a time; with
    a `span`, of which no more may be begun within so many seconds.
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
    sequence: str = ""
    """Tasks of one sequence are begun in the order in which they were enqueued."""
    writes: bool = False
    """A row in the transaction in which it succeeds; where the store has such."""

    @property
    def fate(self) -> TaskStatus:
        """How it ends if nobody cancels it and no worker dies of it too often."""
        fails = self.fatal or self.failures > self.max_retries
        return TaskStatus.FAILED if fails else TaskStatus.SUCCESS


def answer(task_id: str, text: str) -> str:
    """What a task of that id and argument returns."""
    return hashlib.sha256(f"{task_id} {text}".encode()).hexdigest()[:32]


@task(timeout=None)
async def work(ctx: TaskContext, plan: dict[str, Any]) -> list[Any]:
    """Does what the plan says; returns what follows from its arguments, and its token."""
    orders = msgspec.convert(plan, Plan)
    journal, how = current.get(), "stopped"
    journal.note("start", ctx.task_id, ctx.fencing_token)
    try:
        await _do(ctx, journal, orders)
        if ctx.fencing_token <= orders.snoozes:
            raise Snooze(0.5)
        if orders.fatal:
            raise PermanentError("was told to fail for good")
        if ctx.attempt <= orders.failures:
            raise Trouble
        result = [answer(ctx.task_id, orders.text), ctx.fencing_token]
        if orders.writes:
            async with ctx.transaction() as connection:
                await ledger.write(connection, ctx.task_id)
                ctx.result = result
        how = "returned"
        return result
    except Exception:
        # Also the storage's, of a step that could not be kept.
        how = "raised"
        raise
    finally:
        journal.note("end", ctx.task_id, ctx.fencing_token, value=how)


async def _do(ctx: TaskContext, journal: Journal, orders: Plan) -> None:
    pause = orders.seconds / (orders.steps + 1)
    for number in range(orders.steps):
        await asyncio.sleep(pause)
        await ctx.step(f"step {number}", _step, journal, ctx.task_id, ctx.fencing_token, number)
    await asyncio.sleep(pause)


async def _step(journal: Journal, task_id: str, token: int, number: int) -> int:
    journal.note("step", task_id, token, value=number)
    return number


@task(timeout=None, max_retries=1000)
async def tick(ctx: TaskContext) -> list[Any]:
    """What a schedule runs."""
    journal = current.get()
    journal.note("start", ctx.task_id, ctx.fencing_token)
    nominal = datetime.fromisoformat(ctx.metadata["scheduled_for"])
    journal.note("end", ctx.task_id, ctx.fencing_token, value="returned")
    return [nominal.timestamp(), ctx.fencing_token]
