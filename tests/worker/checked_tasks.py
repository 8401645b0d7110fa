"""The code of a new release, for checks of what an earlier one has stored."""

from __future__ import annotations

from enum import Enum

from omniq import Args, Cron, TaskContext, task


class Region(Enum):
    EU = "eu"
    US = "us"


@task
def add(a: int, b: int = 0) -> int:
    return a + b


@task
async def report(ctx: TaskContext, region: Region) -> None:
    """Its argument is made of stored text."""


@task(version=3, upcasters={2: lambda a: Args(a, b=0)})
def newer(a: int, *, b: int) -> None:
    """Version 1 is no longer known."""


def explode(a: int) -> Args:
    raise ValueError(f"cannot change {a}")


@task(version=2, upcasters={1: explode})
def broken(a: int) -> None:
    """Its upcaster raises, with another text for each task."""


@task(schedules=[Cron("0 3 * * *", args=["eu"])])
def nightly(region: str) -> None:
    """Declares a schedule that fits."""


@task(name="checked.send", aliases=["checked.old_send"])
def send(to: str) -> None:
    """Has a name, and the path that it had before."""


def unmarked() -> None:
    """Runs only if its module is named."""


def _private() -> None:
    """Never runs."""
