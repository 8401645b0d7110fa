"""Functions that the tests of schedules enqueue."""

from omniq import TaskContext, task
from tests.schedules.worker_process import leave_line
from tests.worker.recorder import RECORDER


@task
def report(region: str = "eu", *, full: bool = False) -> str:
    """Not decorated; has defaults."""
    return f"{region} {full}"


@task
def needs(region: str) -> str:
    """Cannot be called without an argument."""
    return region


@task(queue="reports", priority=3, expires=60, metadata={"team": "blue"})
async def with_options(ctx: TaskContext) -> str:
    """Returns its nominal time."""
    return str(ctx.metadata["scheduled_for"])


@task(cron="0 3 * * *", tz="Europe/Berlin", queue="night")
def nightly() -> None:
    """Declares a schedule."""


@task(interval=60)
async def minutely(ctx: TaskContext) -> None:
    """Declares another."""


@task(interval=60)
def poll(url: str) -> None:
    """Needs an argument, and so declares no schedule."""


def tick() -> None:
    """Notes that it runs."""
    RECORDER.note("tick")


@task
def leave_mark(ctx: TaskContext, folder: str) -> None:
    """Appends a line with its nominal time."""
    leave_line(folder, f"ran {ctx.metadata['scheduled_for']}")
