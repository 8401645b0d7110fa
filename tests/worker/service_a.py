"""The functions of one service; `service_b` has those of another."""

from __future__ import annotations

from omniq import task


@task
async def work(number: int) -> int:
    return number


def helper() -> str:
    """Not a task."""
    return "helped"


def _private() -> str:
    return "private"
