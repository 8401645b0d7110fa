"""Cron expressions against a brute-force calendar, and what they do when clocks are changed."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from random import Random
from zoneinfo import ZoneInfo

import pytest

from omniq import task
from omniq.cron import cron_times, describe_cron, next_cron
from omniq.errors import InvalidTask, InvalidValue
from tests.schedules import reference_calendar

PAIRS, DEEP_PAIRS, PAIRS_PER_ZONE = 16, 2_000, 4


def instant(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def compare(zone: str, windows: list[reference_calendar.Window], random: Random) -> tuple[int, int]:
    """Compare one expression in one zone; return the number of times and of calls compared."""
    expression = reference_calendar.random_expression(random)
    times = asked = 0
    for window in windows:
        start, end = window.start * 60, window.end * 60
        expected = reference_calendar.due_in(window, expression)
        found = walk(expression.text, zone, start, end)
        assert found == expected, f"{expression.text!r} in {zone} from {instant(start)}"
        times += len(found)
        # A search from any instant finds the same time as an iteration that passes it.
        for _ in range(3):
            after = random.randrange(start, end)
            if (following := reference_calendar.first_after(expected, after)) is not None:
                found_next = next_cron(expression.text, instant(after), zone)
                assert found_next == instant(following), f"{expression.text!r} {zone} {after}"
                asked += 1
    return times, asked


def walk(cron: str, zone: str, start: int, end: int) -> list[int]:
    """The times in [start, end), in seconds since 1970; none of an expression that is refused."""
    try:
        walked = cron_times(cron, instant(start - 1), zone)
    except InvalidValue:
        return []
    last = instant(end)
    return [int(at.timestamp()) for at in takewhile(lambda at: at < last, walked)]


def compare_all(seed: int, pairs: int) -> tuple[int, int]:
    random = Random(seed)
    times = asked = 0
    for zone in reference_calendar.zones(random, pairs // PAIRS_PER_ZONE):
        windows = reference_calendar.windows_of(zone, random)
        for _ in range(PAIRS_PER_ZONE):
            more_times, more_asked = compare(zone, windows, random)
            times, asked = times + more_times, asked + more_asked
    return times, asked


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.fault("F87")
def test_no_time_is_missed_or_doubled_in_20_years_of_clock_changes() -> None:
    times, asked = compare_all(seed=1, pairs=PAIRS)

    assert times > 4_000
    assert asked > 400


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 6))
def test_no_time_is_missed_or_doubled_for_2000_expressions(seed: int) -> None:
    times, _ = compare_all(seed=seed, pairs=DEEP_PAIRS // 4)

    assert times > 100_000


# What the documentation says, hand-made


def local_times(cron: str, zone: str, day: str, count: int) -> list[str]:
    """Return the first times from the start of that day on, in local time."""
    start = datetime.fromisoformat(day).replace(tzinfo=ZoneInfo(zone))
    found = islice(cron_times(cron, start - timedelta(seconds=1), zone), count)
    return [at.astimezone(ZoneInfo(zone)).isoformat(timespec="minutes")[5:] for at in found]


def test_a_fixed_time_that_the_clock_skips_is_due_at_the_end_of_the_gap() -> None:
    found = local_times("30 2 * * *", "Europe/Berlin", "2026-03-28", 3)

    assert found == ["03-28T02:30+01:00", "03-29T03:00+02:00", "03-30T02:30+02:00"]


def test_several_fixed_times_in_one_gap_are_due_once() -> None:
    found = local_times("0,20,40 2,3 29 3 *", "Europe/Berlin", "2026-03-29", 3)

    assert found == ["03-29T03:00+02:00", "03-29T03:20+02:00", "03-29T03:40+02:00"]


@pytest.mark.parametrize("cron", ["30 2 * * *", "0 30 2 * * *"])
def test_a_fixed_time_that_the_clock_shows_twice_is_due_the_first_time(cron: str) -> None:
    found = local_times(cron, "Europe/Berlin", "2026-10-25", 2)

    assert found == ["10-25T02:30+02:00", "10-26T02:30+01:00"]


def test_a_repeating_expression_continues_through_both_clock_changes() -> None:
    for day in ("2026-03-29", "2026-10-25"):
        start = datetime.fromisoformat(day).replace(tzinfo=UTC)
        found = list(islice(cron_times("*/15 * * * *", start, "Europe/Berlin"), 20))

        assert found == [start + timedelta(minutes=15 * step) for step in range(1, 21)]


def test_midnight_is_due_where_the_clock_has_no_midnight() -> None:
    found = local_times("0 0 * * *", "America/Havana", "2026-03-07", 3)

    assert found == ["03-07T00:00-05:00", "03-08T01:00-04:00", "03-09T00:00-04:00"]


def test_a_day_that_a_zone_skipped_is_due_at_the_end_of_the_gap() -> None:
    found = local_times("0 12 * * *", "Pacific/Apia", "2011-12-29", 3)

    assert found == ["12-29T12:00-10:00", "12-31T00:00+14:00", "12-31T12:00+14:00"]


@pytest.mark.fault("F87")
def test_the_29th_of_february_is_due_in_leap_years_only() -> None:
    found = islice(cron_times("0 0 29 2 *", datetime(2026, 1, 1, tzinfo=UTC)), 20)

    assert [at.year for at in found][:3] == [2028, 2032, 2036]


def test_the_year_2100_is_no_leap_year() -> None:
    assert next_cron("0 0 29 2 *", datetime(2096, 3, 1, tzinfo=UTC)).year == 2104


@pytest.mark.parametrize(
    ("cron", "first"),
    [
        ("0 0 L * *", "2026-01-31T00:00"),
        ("0 0 LW * *", "2026-01-30T00:00"),
        ("0 9 * * MON#1", "2026-01-05T09:00"),
        ("0 9 * * 5L", "2026-01-30T09:00"),
        ("0 0 1 JUL *", "2026-07-01T00:00"),
        ("0 12 * * sat,SUN", "2026-01-03T12:00"),
        ("15 30 4 * * *", "2026-01-01T04:30"),
        ("@monthly", "2026-02-01T00:00"),
    ],
)
def test_the_documented_syntax_is_accepted(cron: str, first: str) -> None:
    found = next_cron(cron, datetime(2026, 1, 1, tzinfo=UTC))

    assert found.isoformat(timespec="minutes") == f"{first}+00:00"


@pytest.mark.parametrize(
    ("cron", "complaint"),
    [
        ("", "0 fields; expected five"),
        ("* * * *", "4 fields; expected five"),
        ("* * * * * * *", "7 fields; expected five"),
        ("61 * * * *", "minute '61'"),
        ("* 24 * * *", "hour '24'"),
        ("* * 0 * *", "day-of-month '0'"),
        ("* * * 13 *", "month '13'"),
        ("* * * * XYZ", "day-of-week 'XYZ'"),
        ("*/0 * * * *", "minute '*/0'"),
        ("5-1 * * * *", "minute '5-1'"),
        ("60 * * * * *", "second '60'"),
        ("0 0 30 2 *", "names no date"),
        ("0 0 31 2,4,6 *", "names no date"),
        ("9" * 600, "at most 512"),
    ],
)
def test_an_invalid_expression_is_refused_with_the_reason(cron: str, complaint: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(complaint)):
        next_cron(cron, datetime(2026, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize("tz", ["Nowhere/Land", "../../etc/passwd", "Europe", "", "CEST+5 "])
def test_an_unknown_zone_is_refused(tz: str) -> None:
    with pytest.raises(InvalidValue, match="no such time zone"):
        next_cron("* * * * *", datetime(2026, 1, 1, tzinfo=UTC), tz)


@pytest.mark.parametrize("year", [1, 9_999])
def test_a_time_near_the_year_9999_is_refused_without_a_search(year: int) -> None:
    with pytest.raises(InvalidValue):
        next_cron("0 0 1 1 *", datetime(year, 12, 31, tzinfo=UTC), "Europe/Berlin")


def test_an_invalid_expression_is_refused_by_the_decorator_and_by_options() -> None:
    with pytest.raises(InvalidTask, match="hour '25'"):
        task(cron="0 25 * * *")
    with pytest.raises(InvalidTask, match="no such time zone"):
        task(cron="0 5 * * *", tz="Mars/Olympus")


def test_an_expression_can_be_described_in_words() -> None:
    assert describe_cron("30 2 * * MON-FRI") == "At 02:30 on Monday through Friday"
    assert describe_cron("@hourly") == "At the start of every hour"
