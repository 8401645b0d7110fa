"""The tasks of the stores in `data/older_signed.json`, which an older omniq has written with a key.

`transfer` had finished its step `reserve` and the first row of its cursor when it was retried.
"""

from __future__ import annotations

import os

from omniq import Retry, TaskContext, task

STOPS = "OMNIQ_TEST_STOPS"
"""Set while the stores were written: the task stops in the middle."""

CALLS: list[str] = []


@task(max_retries=9)
async def transfer(ctx: TaskContext, amount: int) -> list[str]:
    receipt = await ctx.step("reserve", _called, f"reserve {amount}")
    async for row in ctx.cursor("rows", _rows_after, every=1):
        if row == "row 2" and os.environ.get(STOPS):
            raise Retry("not yet", delay=2)
        CALLS.append(row)
    return [receipt, await ctx.step("pay", _called, f"pay {amount}")]


@task(executor="process", max_retries=9)
def transfer_in_a_process(ctx: TaskContext, amount: int) -> str:
    receipt = ctx.step("reserve", _call, f"reserve {amount}")
    if os.environ.get(STOPS):
        raise Retry("not yet", delay=2)
    return receipt


@task
def report(day: str = "today") -> str:
    return day


def _call(what: str) -> str:
    CALLS.append(what)
    return what if os.environ.get(STOPS) else f"{what} again"


async def _called(what: str) -> str:
    return _call(what)


def _rows_after(last: str | None) -> list[str]:
    rows = ["row 1", "row 2", "row 3"]
    return rows if last is None else rows[rows.index(last) + 1 :]
