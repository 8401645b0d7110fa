"""When something runs again: cron expressions in time zones, and intervals. Pure rules.

Where a zone's clock changes forward or back, there are two kinds of expressions, as in Debian's cron:

- Repeating: its seconds, minutes or hours begin with a star (`*/5 * * * *`). It follows the local
  clock: it is due whenever that shows a matching time. Nothing is due in a skipped hour, and in a
  repeated hour it is due both times.
- Fixed times (`30 2 * * *`, `0 9-17 * * MON-FRI`) are due once on their day. A skipped time is due
  right after the gap; a repeated time is due the first time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from omniq.errors import InvalidValue

_FIELDS = ("second", "minute", "hour", "day-of-month", "month", "day-of-week")
_SHORT_FOR = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_DAY = 86_400
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_SOME_DAY = datetime(2000, 1, 1)  # noqa: DTZ001 - cronsim reads an expression at a time of no zone
_PROBE = _DAY // 2
"""Seconds between two samples of a zone's offset; no zone has changed twice within them."""

_LOOK_BACK = 2 * _DAY
"""A change of the clock longer ago than this no longer repeats any time."""

_HORIZON_YEARS = 50
"""The rarest date, 29 February on one day of the week, occurs within 40 years."""

_FIRST_YEAR, _LAST_YEAR = 1_900, 9_900


def next_cron(cron: str, after: datetime, tz: str | None = None) -> datetime:
    """The first instant after `after` that the expression names, in UTC.

    Raises `InvalidValue` for an expression or a zone that cannot be read, or names no date.

    >>> next_cron("0 12 * * *", datetime(2026, 1, 1, tzinfo=UTC)).isoformat()
    '2026-01-01T12:00:00+00:00'
    """
    for instant in cron_times(cron, after, tz):
        return instant
    raise InvalidValue(f"cron {cron!r}: names no date that exists")


def cron_times(cron: str, after: datetime, tz: str | None = None) -> Iterator[datetime]:
    """All instants after `after` that the expression names, in UTC, in order.

    Ends where nothing is due within 50 years.

    >>> times = cron_times("30 2 * * *", datetime(2026, 3, 28, tzinfo=UTC), "Europe/Berlin")
    >>> [next(times).isoformat() for _ in range(3)]  # at 2 o'clock on the 29th it is 3
    ['2026-03-28T01:30:00+00:00', '2026-03-29T01:00:00+00:00', '2026-03-30T00:30:00+00:00']
    """
    expression, zone = read_cron(cron), read_zone(tz)
    if not _FIRST_YEAR <= after.year < _LAST_YEAR:
        raise InvalidValue(f"cron {cron!r}: cannot compute times after the year {after.year}")
    begin = (after - _EPOCH) // _SECOND + 1
    return (_EPOCH + timedelta(seconds=at) for at in _instants(expression, zone, begin))


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


def check_cron(
    cron: str,
    tz: str | None = None,
    *,
    after: datetime | None = None,
    error: type[InvalidValue] = InvalidValue,
) -> None:
    """Raise `error` for an expression that cannot be read, or names no date after `after` (1970)."""
    try:
        next_cron(cron, _EPOCH if after is None else after, tz)
    except InvalidValue as invalid:
        raise error(str(invalid)) from invalid


def describe_cron(cron: str) -> str:
    """The expression in words.

    >>> describe_cron("*/5 * * * *")
    'Every fifth minute of every hour'
    """
    return str(CronSim(_SHORT_FOR.get(cron.strip().lower(), cron), _SOME_DAY).explain())


# Parsing


class Cron:
    """A parsed expression: the days, and the times of a day, that it names."""

    def __init__(self, text: str, fields: CronSim) -> None:
        self.text = text
        parts = fields.parts
        self.is_repeating = any(part.startswith("*") for part in parts[:3])
        self._matches_day = fields.match_day
        self._months = fields.months
        self._hours = sorted(fields.hours)
        self._minutes = sorted(fields.minutes)
        self._seconds = sorted(fields.seconds)

    def first(self, low: int, high: int) -> int | None:
        """The first matching time in [low, high), in seconds of a clock without changes."""
        day, time = divmod(low, _DAY)
        while day * _DAY < high:
            today = date.fromordinal(_EPOCH_DAY + day)
            if today.month not in self._months:
                next_month = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
                day, time = next_month.toordinal() - _EPOCH_DAY, 0
                continue
            if self._matches_day(today) and (found := self._first_time(time)) is not None:
                at = day * _DAY + found
                return at if at < high else None
            day, time = day + 1, 0
        return None

    def _first_time(self, low: int) -> int | None:
        """The first matching second of the day at or after `low`."""
        low_hour, rest = divmod(low, 3_600)
        low_minute, low_second = divmod(rest, 60)
        for hour in self._hours[bisect_left(self._hours, low_hour) :]:
            from_minute = low_minute if hour == low_hour else 0
            for minute in self._minutes[bisect_left(self._minutes, from_minute) :]:
                is_first = (hour, minute) == (low_hour, low_minute)
                place = bisect_left(self._seconds, low_second if is_first else 0)
                if place < len(self._seconds):
                    return hour * 3_600 + minute * 60 + self._seconds[place]
        return None


@lru_cache(maxsize=1_024)
def read_cron(cron: str) -> Cron:
    """Parse an expression: five fields, or six with seconds first, or a name such as `@daily`.

    Raises `InvalidValue`, naming the field that is wrong.
    """
    if type(cron) is not str or len(cron) > 512:
        raise InvalidValue("cron: expected text such as '*/5 * * * *', at most 512 characters")
    try:
        return Cron(cron, CronSim(_SHORT_FOR.get(cron.strip().lower(), cron), _SOME_DAY))
    except CronSimError as error:
        raise InvalidValue(f"cron {cron!r}: {_wrong(cron, str(error))}") from error


def _wrong(cron: str, complaint: str) -> str:
    """What is wrong with the expression, naming the part that the user wrote."""
    parts = cron.split()
    name = complaint.removeprefix("Bad ")
    if name not in _FIELDS:
        return (
            f"{len(parts)} fields; expected five (minute hour day month weekday) like "
            "'*/5 * * * *', or six with seconds first"
        )
    part = parts[_FIELDS.index(name) - (len(parts) == 5)]
    if name == "day-of-month" and part.isdigit() and 1 <= int(part) <= 31:
        return "names no date that exists"
    return f"{name} {part!r} cannot be read"


@lru_cache(maxsize=1_024)
def read_zone(tz: str | None) -> tzinfo:
    """The time zone of that name; None is UTC. Raises `InvalidValue` when there is none."""
    if tz is None:
        return UTC
    try:
        return ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError) as error:
        raise InvalidValue(
            f"tz {tz!r}: no such time zone here; use a name like 'Europe/Berlin' "
            "(a system without time zones needs the package 'tzdata')"
        ) from error


# Computing


class _Change(NamedTuple):
    """At `at`, in seconds since 1970, the zone's clock changes to `offset` seconds from UTC."""

    at: int
    offset: int


def _instants(cron: Cron, zone: tzinfo, begin: int) -> Iterator[int]:
    """The instants from `begin` on, in seconds since 1970.

    The spans between two changes of the zone's offset are searched one by one. `shown` is the local
    time up to which the clock has shown every time.
    """
    shown: int | None = None
    for start, end, offset in _pieces(zone, begin - _LOOK_BACK):
        # A repeating expression starts at the time the clock shows now; fixed times start at the
        # first time not shown yet, which includes a gap just skipped and excludes repeated times.
        shown = start + offset if shown is None else shown
        low = start + offset if cron.is_repeating else shown
        if start < begin:
            low = max(low, begin + offset)
        while (local := cron.first(low, end + offset)) is not None:
            at = max(local - offset, start)
            yield at
            low = max(local, at + offset) + 1
        shown = max(shown, end + offset)


def _pieces(zone: tzinfo, begin: int) -> Iterator[tuple[int, int, int]]:
    """From `begin` on: (start, end, offset) of spans in which the zone's clock does not change."""
    first_year = _year_of(begin)
    start, offset = begin, _offset(zone, begin)
    for year in range(first_year, min(first_year + _HORIZON_YEARS, _LAST_YEAR)):
        for change in _changes(zone, year):
            if change.at > start:
                yield start, change.at, offset
                start, offset = change
        end = _start_of(year + 1)
        yield start, end, offset
        start = end


@lru_cache(maxsize=2_048)
def _changes(zone: tzinfo, year: int) -> tuple[_Change, ...]:
    """When the zone's clock changes in that year of UTC."""
    if zone is UTC:
        return ()
    found = []
    begin, end = _start_of(year), _start_of(year + 1)
    # From the last second of the previous year: the change may be at the first of this one.
    for low in range(begin - 1, end - 1, _PROBE):
        high = min(low + _PROBE, end - 1)
        if _offset(zone, low) != _offset(zone, high):
            at = bisect_left(
                range(low, high), True, key=lambda at: _offset(zone, at) != _offset(zone, low)
            )
            found.append(_Change(low + at, _offset(zone, low + at)))
    return tuple(found)


def _offset(zone: tzinfo, at: int) -> int:
    """How many seconds the zone's clock is ahead of UTC at that instant."""
    offset = (_EPOCH + timedelta(seconds=at)).astimezone(zone).utcoffset()
    return 0 if offset is None else offset // _SECOND


def _year_of(at: int) -> int:
    return (_EPOCH + timedelta(seconds=at)).year


def _start_of(year: int) -> int:
    return (datetime(year, 1, 1, tzinfo=UTC) - _EPOCH) // _SECOND


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)
