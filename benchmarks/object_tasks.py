"""The task of `benchmarks.object_storage`."""

from __future__ import annotations

from omniq import task


@task
async def noop(number: int) -> int:
    return number
