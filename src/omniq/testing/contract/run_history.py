"""The history of runs: counts of minutes and hours, versions, and workers that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from omniq.clock import to_micros
from omniq.errors import InvalidValue
from omniq.models import AuditEntry, Version
from omniq.storage.base import BaseStorage
from omniq.storage.run_counts import FunctionCounts, PeriodCounts, RunCounts
from omniq.testing.builders import some_tasks
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import LEASE, ContractPart, OpenAnother, promise

Steps = Callable[[BaseStorage], Awaitable[int]]


class RunHistoryContract(ContractPart):
    """Y1 to Y7."""

    @promise("Y1", "Y4")
    async def test_the_counts_of_a_minute_are_read_as_they_were_stored_last(
        self, storage: BaseStorage, clock: ManualClock, open_another: OpenAnother
    ) -> None:
        reader = await open_another()
        first, second = _minute(clock, 5, a=1), _minute(clock, 4, a=2, b=3)
        await storage.add_run_counts([first])
        await storage.add_run_counts([_minute(clock, 5, a=4), second])

        assert _seen(await _read(reader, clock)) == [
            (first.start, 4, {"a": 4}, {storage.owner: 4}),
            (second.start, 5, {"a": 2, "b": 3}, {storage.owner: 5}),
        ]

    @promise("Y1")
    async def test_a_start_that_is_no_minute_is_refused(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        with pytest.raises(InvalidValue, match="first second of a minute"):
            await storage.add_run_counts([PeriodCounts(61, RunCounts())])
        assert await _read(storage, clock) == []

    @promise("Y2", "Y4")
    async def test_a_merge_changes_nothing_that_is_read(
        self, storage: BaseStorage, clock: ManualClock, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        for each, number in ((storage, 1), (other, 10)):
            minutes = [_minute(clock, ago, a=number, b=1) for ago in (90, 8, 7, 2)]
            await each.add_run_counts(minutes)
        before = [await _read(storage, clock, **kind) for kind in _KINDS]

        assert await storage.merge_run_counts() == 6
        assert await storage.merge_run_counts() == 0
        assert [await _read(other, clock, **kind) for kind in _KINDS] == before
        clock.advance(600)
        assert await other.merge_run_counts() == 2
        after = [await _read(storage, clock, **kind) for kind in _KINDS]
        assert [_seen(periods) for periods in after] == [_seen(periods) for periods in before]

    @promise("Y1", "Y2")
    async def test_counts_that_are_stored_again_after_a_merge_are_counted_once(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        minute = _minute(clock, 9, a=2)
        await storage.add_run_counts([minute])
        await storage.merge_run_counts()
        await storage.add_run_counts([minute])

        for kind in _KINDS:
            assert [each.total.runs for each in await _read(storage, clock, **kind)] == [2]
        await storage.merge_run_counts()
        for kind in _KINDS:
            assert [each.total.runs for each in await _read(storage, clock, **kind)] == [2]

    @promise("Y2")
    async def test_concurrent_merges_add_each_minute_once(
        self, storage: BaseStorage, clock: ManualClock, open_another: OpenAnother
    ) -> None:
        others = [await open_another() for _ in range(3)]
        for each in (storage, *others):
            await each.add_run_counts([_minute(clock, ago, a=1) for ago in range(10, 20)])
        merged = await asyncio.gather(*(each.merge_run_counts() for each in (storage, *others)))

        assert sum(merged) == 40
        assert sum(each.total.runs for each in await _read(storage, clock)) == 40
        assert sum(each.total.runs for each in await _read(storage, clock, hours=True)) == 40

    @promise("Y3")
    async def test_minutes_are_kept_for_three_days_and_hours_for_ninety(
        self, storage: BaseStorage, clock: ManualClock
    ) -> None:
        await storage.add_run_counts([_minute(clock, 9, a=2)])
        await storage.merge_run_counts()
        await storage.note_version(_version(clock, "1"))
        clock.advance(timedelta(days=2, hours=23).total_seconds())
        assert await storage.purge_run_counts() == 0

        clock.advance(7_200)
        assert await storage.purge_run_counts() == 1
        assert await _read(storage, clock, days=4) == []
        assert [each.total.runs for each in await _read(storage, clock, days=4, hours=True)] == [2]
        clock.advance(timedelta(days=88).total_seconds())
        purged = await storage.purge_run_counts() + await storage.purge_run_counts()
        assert purged == 2
        assert await _read(storage, clock, days=99, hours=True) == []
        assert await storage.versions() == []

    @promise("Y5")
    async def test_the_first_start_of_a_version_stays(
        self, storage: BaseStorage, clock: ManualClock, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        first = _version(clock, "1")
        assert await storage.note_version(first)
        clock.advance(60)
        second = _version(clock, "2")

        assert await other.note_version(second)
        assert not await other.note_version(_version(clock, "1"))
        assert await storage.versions() == [first, second]

    @promise("Y6")
    async def test_a_worker_that_was_stopped_or_lost_is_known_for_a_day(
        self, storage: BaseStorage, clock: ManualClock, open_another: OpenAnother
    ) -> None:
        stopped, lost = await open_another(), await open_another()
        await storage.enqueue_many(some_tasks("abc"))
        await stopped.renew(lease=LEASE, concurrency=4, runs=(7, 1, 2))
        await lost.renew(lease=LEASE, concurrency=2)
        await lost.reserve(2)
        ids = [stopped.owner, lost.owner]
        await stopped.retire()
        clock.advance(LEASE + 1)
        await storage.give_back_abandoned()

        ended = {each.worker.id: each for each in await storage.ended_workers()}
        assert set(ended) == set(ids)
        assert (ended[ids[0]].why, ended[ids[0]].tasks) == ("", 0)
        assert ended[ids[0]].worker.succeeded == 7
        assert ended[ids[1]].why
        assert ended[ids[1]].tasks == 2
        clock.advance(86_400)
        await storage.purge_run_counts()
        assert await storage.ended_workers() == []

    @promise("Y7")
    async def test_what_operators_did_is_returned_newest_first_in_pages(
        self, storage: BaseStorage, clock: ManualClock, open_another: OpenAnother
    ) -> None:
        other = await open_another()
        for number in range(5):
            await (storage, other)[number % 2].add_audit_entry(_entry(clock, str(number)))
            clock.advance(1)
        first, after = await storage.audit_log(limit=3)
        second, end = await other.audit_log(after, 3)

        assert [entry.subject for entry in first + second] == ["4", "3", "2", "1", "0"]
        assert after
        assert end == ""
        clock.advance(timedelta(days=91).total_seconds())
        assert await storage.purge_run_counts() == 5
        assert await storage.audit_log() == ([], "")


def _entry(clock: ManualClock, subject: str) -> AuditEntry:
    return AuditEntry(
        at=clock.now(), action="queues/pause", subject=subject, outcome="1 done", by="operator"
    )


_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"hours": True},
    {"only_totals": True},
    {"hours": True, "only_totals": True},
    {"function": "a"},
    {"hours": True, "queue": "default"},
)


def _minute(clock: ManualClock, ago: int, **runs: int) -> PeriodCounts:
    """The counts of one minute: for each function, that many runs succeeded."""
    seconds = to_micros(clock.now()) // 1_000_000 - ago * 60
    period = PeriodCounts(seconds - seconds % 60, RunCounts())
    for name, count in runs.items():
        counts = RunCounts(succeeded=count, seconds=count * 0.25, wait=[0, count], run=[count])
        period.functions.append(FunctionCounts(name, "default", counts))
        period.total.add(counts)
    return period


def _version(clock: ManualClock, code: str) -> Version:
    return Version(code=code, omniq="1.0", started_at=clock.now())


async def _read(
    storage: BaseStorage, clock: ManualClock, days: int = 1, **kind: Any
) -> list[PeriodCounts]:
    now: datetime = clock.now()
    return await storage.run_counts(now - timedelta(days=days), now + timedelta(minutes=1), **kind)


def _seen(periods: list[PeriodCounts]) -> list[tuple[int, int, dict[str, int], dict[str, int]]]:
    return [
        (
            period.start,
            period.total.runs,
            {line.func_path: line.counts.runs for line in period.functions},
            {worker: counts.runs for worker, counts in period.workers.items()},
        )
        for period in periods
    ]
