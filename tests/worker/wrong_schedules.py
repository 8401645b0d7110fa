"""A module whose worker would not start: a schedule does not fit its function."""

from __future__ import annotations

from omniq import Cron, task


@task(schedules=[Cron("0 3 * * *", args=["eu"])])
def without_arguments() -> None:
    """Takes no region."""
