"""A brute-force calendar: which minutes a cron expression names, found by checking every minute.

It shares no code with omniq and reads no expression: each random field is made together with the
set of values that it names. Of a time zone it knows only what its clock shows at a given instant.
"""

from __future__ import annotations

import calendar
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import compress, groupby
from random import Random
from zoneinfo import ZoneInfo, available_timezones

FIRST_YEAR, YEARS = 2011, 20
AROUND = 2
"""Days checked before and after each change of a zone's clock."""

# fmt: off
ODD_ZONES = [
    "Africa/Cairo", "Africa/Casablanca", "Africa/El_Aaiun", "America/Asuncion", "America/Caracas",
    "America/Godthab", "America/Havana", "America/New_York", "America/Santiago",
    "America/Sao_Paulo", "America/Scoresbysund", "America/St_Johns", "Antarctica/Casey",
    "Antarctica/Troll", "Asia/Amman", "Asia/Beirut", "Asia/Gaza", "Asia/Jerusalem",
    "Asia/Kathmandu", "Asia/Pyongyang", "Asia/Tehran", "Atlantic/Azores", "Australia/Adelaide",
    "Australia/Lord_Howe", "Europe/Berlin", "Europe/Dublin", "Europe/Istanbul", "Europe/London",
    "Europe/Volgograd", "Pacific/Apia", "Pacific/Chatham", "Pacific/Easter", "Pacific/Fiji",
    "Pacific/Norfolk", "UTC",
]
DAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]
MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
# fmt: on
DayRule = Callable[[date], bool]
_EPOCH_DAY = date(1970, 1, 1).toordinal()


@dataclass(frozen=True)
class Expression:
    """A cron expression, and what it means."""

    text: str
    seconds: list[int]
    times: bytes
    """One byte for each minute of a day: whether it is named."""

    months: set[int]
    is_day: DayRule
    is_rhythm: bool

    def names(self, day: date) -> bool:
        return day.month in self.months and self.is_day(day)


@dataclass(frozen=True)
class Window:
    """Some days of a zone, minute by minute."""

    start: int
    """In minutes since 1970; so are all instants here."""

    days: list[tuple[date, int, list[int], list[bool]]]
    """For each day in a row: its first minute, and what the clock shows then, and whether again."""

    gaps: list[tuple[int, list[tuple[date, int]]]]
    """When a gap ends, and the days and minutes that the clock has left out."""

    end: int


def due_in(window: Window, expression: Expression) -> list[int]:
    """The seconds since 1970 at which the expression is due in the window."""
    found: set[int] = set()
    for day, start, shown, again in window.days:
        if expression.names(day):
            wanted = map(expression.times.__getitem__, shown)
            for minute in compress(range(start, start + len(shown)), wanted):
                if expression.is_rhythm or not again[minute - start]:
                    found.update(minute * 60 + second for second in expression.seconds)
    if not expression.is_rhythm:
        for end, left_out in window.gaps:
            if any(expression.names(day) and expression.times[at] for day, at in left_out):
                found.add(end * 60)
    return sorted(found)


def first_after(due: list[int], instant: int) -> int | None:
    place = bisect_right(due, instant)
    return due[place] if place < len(due) else None


# Zones


def windows_of(zone: str, random: Random) -> list[Window]:
    """Every change of the zone's clock in 20 years with the days around it, and 50 other days."""
    clock = ZoneInfo(zone)
    first = datetime(FIRST_YEAR, 1, 1, tzinfo=UTC)
    days = [first + timedelta(days=day) for day in range(YEARS * 365)]
    offsets = [day.astimezone(clock).utcoffset() for day in days]
    changes = [at for at in range(1, len(days)) if offsets[at] != offsets[at - 1]]
    spans = [(days[at] - timedelta(days=1 + AROUND), 2 * AROUND + 1) for at in changes]
    spans += [(random.choice(days), 1) for _ in range(50)]
    return [_look(clock, start, length) for start, length in spans]


def zones(random: Random, count: int) -> list[str]:
    """Return that many zones: the unusual ones first, then any."""
    others = sorted(name for name in available_timezones() if "/" in name and "Etc" not in name)
    return (ODD_ZONES + random.sample(others, len(others)))[:count]


def _look(clock: ZoneInfo, start: datetime, days: int) -> Window:
    first = int(start.timestamp()) // 60
    shown = _clock_face(clock, first, days * 1440)
    again: list[bool] = []
    gaps: list[tuple[int, list[tuple[date, int]]]] = []
    newest = shown[0] - 1
    for minute, local in enumerate(shown, start=first):
        if local > newest + 1:
            left_out = [(_day(at), at % 1440) for at in range(newest + 1, local)]
            gaps.append((minute, left_out))
        again.append(local <= newest)
        newest = max(newest, local)
    rows: list[tuple[date, int, list[int], list[bool]]] = []
    at = 0
    for day, group in groupby(shown, key=lambda local: local // 1440):
        times = [local % 1440 for local in group]
        rows.append((_day(day * 1440), first + at, times, again[at : at + len(times)]))
        at += len(times)
    return Window(first, rows, gaps, first + len(shown))


def _clock_face(clock: ZoneInfo, first: int, count: int) -> list[int]:
    """Return the local time of each minute; computed for each one only near a clock change."""
    shown: list[int] = []
    for hour in range(first, first + count, 60):
        start, end = _shows(clock, hour), _shows(clock, hour + 60)
        if end - start == 60:
            shown.extend(range(start, end))
        else:
            shown.extend(_shows(clock, minute) for minute in range(hour, hour + 60))
    return shown


def _shows(clock: ZoneInfo, minute: int) -> int:
    """The date and time on the clock, as minutes since the beginning of 1970 by that clock."""
    local = datetime.fromtimestamp(minute * 60, clock)
    return (local.date().toordinal() - _EPOCH_DAY) * 1440 + local.hour * 60 + local.minute


def _day(local: int) -> date:
    return date.fromordinal(_EPOCH_DAY + local // 1440)


# Expressions


def random_expression(random: Random) -> Expression:
    """Any expression, from every minute to once in some years."""
    minute, minutes = _field(random, 0, 59, star=0.02)
    hour, hours = _field(random, 0, 23, star=0.3)
    month, months = _field(random, 1, 12, star=0.7, names=MONTHS)
    day, is_day = _days(random)
    weekday, is_weekday = _weekdays(random)
    fields, seconds = [minute, hour, day, month, weekday], [0]
    if random.random() < 0.3:
        second, named = _field(random, 0, 59, star=0.0, step=0.0)
        seconds = sorted(named)[:2]
        second = ",".join(map(str, seconds)) if len(seconds) < len(named) else second
        fields.insert(0, second)
    is_both = day.startswith("*") or weekday.startswith("*")
    times = bytes(at // 60 in hours and at % 60 in minutes for at in range(1440))
    return Expression(
        text=" ".join(fields),
        seconds=seconds,
        times=times,
        months=months,
        is_day=(
            (lambda at: is_day(at) and is_weekday(at))
            if is_both
            else (lambda at: is_day(at) or is_weekday(at))
        ),
        is_rhythm=any(field.startswith("*") for field in fields[: len(fields) - 3]),
    )


def _field(
    random: Random,
    low: int,
    high: int,
    *,
    star: float,
    step: float = 0.2,
    names: list[str] | None = None,
) -> tuple[str, set[int]]:
    everything = range(low, high + 1)
    draw = random.random()
    if draw < star:
        return "*", set(everything)
    if draw < star + step:
        size = random.randint(2, high - low)
        return f"*/{size}", set(everything[::size])
    terms = [_term(random, low, high, names) for _ in range(random.choice([1, 1, 1, 2, 3]))]
    return ",".join(text for text, _ in terms), set().union(*(values for _, values in terms))


def _term(random: Random, low: int, high: int, names: list[str] | None) -> tuple[str, set[int]]:
    def name(value: int) -> str:
        if names is None or value - low >= len(names) or random.random() < 0.5:
            return str(value)
        return random.choice([names[value - low], names[value - low].lower()])

    first, last = sorted((random.randint(low, high), random.randint(low, high)))
    match random.randrange(6):
        case 0:
            return f"{name(first)}-{name(last)}", set(range(first, last + 1))
        case 1 if last > first:
            size = random.randint(1, 7)
            return f"{name(first)}-{name(last)}/{size}", set(range(first, last + 1, size))
        case 2:
            size = random.randint(2, max(3, (high - low) // 2))
            return f"{name(first)}/{size}", set(range(first, high + 1, size))
        case _:
            return name(first), {first}


def _days(random: Random) -> tuple[str, DayRule]:
    draw = random.random()
    if draw < 0.05:
        return "L", lambda day: day.day == calendar.monthrange(day.year, day.month)[1]
    if draw < 0.1:
        return "LW", _is_last_working_day
    text, days = _field(random, 1, 31, star=0.55)
    return text, lambda day: day.day in days


def _weekdays(random: Random) -> tuple[str, DayRule]:
    draw = random.random()
    number = random.randrange(8)
    if draw < 0.05:
        return (
            f"{number}L",
            lambda day: (
                day.isoweekday() % 7 == number % 7 and (day + timedelta(days=7)).month != day.month
            ),
        )
    if draw < 0.1:
        turn = random.randint(1, 5)
        name = random.choice([str(number), DAYS[number % 7]])
        return (
            f"{name}#{turn}",
            lambda day: day.isoweekday() % 7 == number % 7 and (day.day - 1) // 7 + 1 == turn,
        )
    # Both 0 and 7 are Sunday.
    text, named = _field(random, 0, 7, star=0.6, names=DAYS)
    days = {value % 7 for value in named}
    return text, lambda day: day.isoweekday() % 7 in days


def _is_last_working_day(day: date) -> bool:
    last = calendar.monthrange(day.year, day.month)[1]
    working = [at for at in range(1, last + 1) if date(day.year, day.month, at).weekday() < 5]
    return day.day == working[-1]
