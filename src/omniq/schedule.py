"""When a repeating task runs next. Pure rules over cron expressions and intervals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from omniq.errors import InvalidTask


def next_cron(cron: str, after: datetime, tz: str | None = None) -> datetime:
    """The first instant after `after` that the expression names, in UTC.

    >>> next_cron("0 12 * * *", datetime(2026, 1, 1, tzinfo=UTC)).isoformat()
    '2026-01-01T12:00:00+00:00'
    """
    try:
        zone = ZoneInfo(tz) if tz else UTC
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidTask(
            f"tz {tz!r}: no such time zone; use a name like 'Europe/Berlin'"
        ) from error
    try:
        return next(CronSim(cron, after.astimezone(zone))).astimezone(UTC)
    except CronSimError as error:
        raise InvalidTask(
            f"cron {cron!r}: {error}; expected five fields like '*/5 * * * *'"
        ) from error
    except StopIteration:
        raise InvalidTask(f"cron {cron!r}: names no date that exists") from None


def next_run(
    *, interval: float | None, cron: str | None, tz: str | None, after: datetime
) -> datetime | None:
    """When a task that finished at `after` runs again; None when it does not repeat.

    >>> next_run(interval=60, cron=None, tz=None, after=datetime(2026, 1, 1, tzinfo=UTC)).minute
    1
    """
    if cron is not None:
        return next_cron(cron, after, tz)
    if interval is not None:
        return after + timedelta(seconds=interval)
    return None
