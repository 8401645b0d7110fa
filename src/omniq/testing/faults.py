"""A storage that fails when a test says so: before the write, after it, or by being slow.

    faulty = FaultyStorage(MemoryStorage(clock=clock))
    faulty.fail("record", when="after")       # the next outcomes are kept, and the reply is lost
    faulty.fail("enqueue", at=3, times=2)     # the third call from now and the one after it
    faulty.delay("reserve", 5.0)              # the next claim takes five seconds on the clock
    faulty.kill()                             # from now on nothing reaches the store: a dead worker
    faulty.heal()                             # all is well again, but the dead stay dead

A call that fails *before* has changed nothing. One that fails *after* has done everything, and
only its caller does not know: the case that idempotence is for. `renew` is the heartbeat's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar, get_args

import msgspec

from omniq.errors import StorageError, StorageRefused
from omniq.gate_rules import GateState
from omniq.models import (
    DeadLetter,
    Progress,
    QueueStats,
    Schedule,
    WorkerInfo,
    check_int,
)
from omniq.storage.base import BaseStorage
from omniq.storage.inspection import DeadQuery, Scan, ScanQuery, TaskQuery
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.types import Capabilities, Claim, Entry, GivenBack, Renewal

Verb = Literal[
    "open",
    "close",
    "enqueue",
    "reserve",
    "record",
    "renew",
    "give_back",
    "cancel",
    "purge",
    "dead",
    "checkpoint",
    "progress",
    "schedule",
    "queue",
    "read",
]
"""What can fail, in groups: `dead`, for one, is every verb that changes dead letters."""

When = Literal["before", "after"]

_T = TypeVar("_T")


class _Fault(msgspec.Struct):
    """Acts on the calls `first` to `last` of a verb, counted from when it was planned."""

    verbs: tuple[Verb, ...]
    first: int
    last: int | None
    when: When = "before"
    error: Exception | None = None
    seconds: float = 0.0
    act: Callable[[FaultyStorage], Awaitable[object]] | None = None
    seen: int = 0

    def is_due(self, verbs: Sequence[Verb]) -> bool:
        """Count the call; whether the fault acts on it."""
        if not set(self.verbs) & set(verbs):
            return False
        self.seen += 1
        return self.first <= self.seen and (self.last is None or self.seen <= self.last)


class _Plan:
    """The faults to come, and how often each verb was called. Twins share it."""

    def __init__(self) -> None:
        self.faults: list[_Fault] = []
        self.calls: dict[Verb, int] = dict.fromkeys(get_args(Verb), 0)
        self.acted = 0

    def due(self, verbs: Sequence[Verb]) -> list[_Fault]:
        for verb in verbs:
            self.calls[verb] += 1
        due = [fault for fault in self.faults if fault.is_due(verbs)]
        self.acted += len(due)
        return due


class FaultyStorage(BaseStorage):
    """Any storage, with faults to order. Without any it is the storage it wraps.

    It is the owner: what it was told is what it knows, so a claim whose reply was lost is held by
    the store and unknown here. Open it instead of the wrapped one, which it opens and closes.
    """

    def __init__(self, inner: BaseStorage) -> None:
        super().__init__(
            serializer=inner._serializer,
            clock=inner._clock,
            settings=inner._settings,
            max_pending=inner._max_pending,
        )
        self._inner = inner
        self._hints = inner._hints
        # The same owner: a backend may look at its own identity to know a first renewal.
        self._identity = inner._identity
        self._plan = _Plan()
        self._killed_as: list[str] = []

    def fail(
        self,
        *verbs: Verb,
        when: When = "before",
        at: int = 1,
        times: int | None = 1,
        error: Exception | None = None,
    ) -> None:
        """Let the `at`-th call from now fail, and those after it up to `times` (None: all)."""
        fault = _Fault(verbs, *_span(at, times), when=when, error=error)
        self._plan.faults.append(fault)

    def delay(self, *verbs: Verb, seconds: float, at: int = 1, times: int | None = 1) -> None:
        """Let the `at`-th call from now take that long on the storage's clock before it begins."""
        self._plan.faults.append(_Fault(verbs, *_span(at, times), seconds=seconds))

    def before(
        self, *verbs: Verb, act: Callable[[FaultyStorage], Awaitable[object]], at: int = 1
    ) -> None:
        """Have `act` happen before the `at`-th call from now, given the storage that is called."""
        self._plan.faults.append(_Fault(verbs, *_span(at, 1), act=act))

    def kill(self) -> None:
        """Let nothing reach the store from here any more, as if this worker's process had died."""
        self._killed_as.append(self.owner)

    @property
    def killed_as(self) -> str | None:
        """The owner that it was when it was killed."""
        return self._killed_as[0] if self._killed_as else None

    def heal(self) -> None:
        """Forget all faults that were planned. The dead stay dead."""
        self._plan.faults.clear()

    def beside(self, inner: BaseStorage) -> FaultyStorage:
        """Another storage under the same plan of faults: its calls count as well."""
        other = FaultyStorage(inner)
        other._plan = self._plan
        return other

    @property
    def calls(self) -> dict[Verb, int]:
        """How often each verb reached the storage, failures included."""
        return dict(self._plan.calls)

    @property
    def acted(self) -> int:
        """How many faults have happened so far."""
        return self._plan.acted

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def twin(self) -> FaultyStorage:
        twin = FaultyStorage(self._inner.twin())
        twin._identity = self._identity
        twin._is_twin = True
        twin._plan = self._plan
        twin._killed_as = self._killed_as
        return twin

    async def _do(self, verbs: Sequence[Verb], step: Callable[[], Awaitable[_T]]) -> _T:
        due = self._plan.due(verbs)
        for fault in due:
            if fault.seconds:
                await self._clock.sleep(fault.seconds)
            if fault.act is not None:
                await fault.act(self)
        self._raise_due(due, verbs, "before")
        done = await step()
        self._raise_due(due, verbs, "after")
        return done

    def _raise_due(self, due: list[_Fault], verbs: Sequence[Verb], when: When) -> None:
        if self._killed_as:
            raise StorageRefused("this worker was killed by its test")
        for fault in due:
            if fault.when == when and not fault.seconds and fault.act is None:
                told = f"{'/'.join(verbs)}: failed on purpose, {when} it was done"
                raise fault.error or StorageError(told)

    # Changing

    async def _open(self) -> None:
        await self._do(("open",), self._inner.open)

    async def _close(self) -> None:
        # The wrapped one is closed whatever is planned: nothing may be left open by a test.
        try:
            await self._do(("close",), self._inner.close)
        finally:
            await self._inner.close()

    async def _enqueue(self, rows: list[Row]) -> list[str]:
        return await self._do(("enqueue",), lambda: self._inner._enqueue(rows))

    async def _enqueue_within(self, connection: object, rows: list[Row]) -> list[str]:
        return await self._do(("enqueue",), lambda: self._inner._enqueue_within(connection, rows))

    @asynccontextmanager
    async def _transaction(
        self, owner: str, task_id: str, success: Callable[[], Entry], *, blocking: bool
    ) -> AsyncIterator[Any]:
        due = self._plan.due(("record",))
        inner = self._inner._transaction(owner, task_id, success, blocking=blocking)
        async with inner as connection:
            yield connection
            self._raise_due(due, ("record",), "before")
        self._raise_due(due, ("record",), "after")

    async def _turn(
        self, owner: str, entries: list[Entry], claim: Claim | None
    ) -> tuple[list[bool], list[Row]]:
        verbs: list[Verb] = ["record"] if entries else []
        if claim is not None:
            verbs.append("reserve")
        return await self._do(verbs, lambda: self._inner._turn(owner, entries, claim))

    async def _retire(self, owner: str) -> None:
        await self._do(("close",), lambda: self._inner._retire(owner))

    async def _renew(self, info: WorkerInfo, lease: int) -> Renewal:
        return await self._do(("renew",), lambda: self._inner._renew(info, lease))

    async def _give_back(self, max_crashes: int) -> list[GivenBack]:
        return await self._do(("give_back",), lambda: self._inner._give_back(max_crashes))

    async def _cancel(self, task_id: str, reason: str) -> bool:
        return await self._do(("cancel",), lambda: self._inner._cancel(task_id, reason))

    async def _wait_for_work(self, timeout: float) -> None:
        await self._inner._wait_for_work(timeout)

    async def _purge_results(self, before: int) -> int:
        return await self._do(("purge",), lambda: self._inner._purge_results(before))

    async def _purge_expired(self) -> int:
        return await self._do(("purge",), self._inner._purge_expired)

    async def _delete_task(self, task_id: str) -> bool:
        return await self._do(("purge",), lambda: self._inner._delete_task(task_id))

    async def _retry_dead(self, task_id: str, body: bytes | None, from_start: bool) -> bool:
        return await self._do(("dead",), lambda: self._inner._retry_dead(task_id, body, from_start))

    async def delete_dead(self, task_id: str) -> bool:
        self._check_open()
        return await self._do(("dead",), lambda: self._inner.delete_dead(task_id))

    async def _purge_dead(self, before: int) -> int:
        return await self._do(("dead",), lambda: self._inner._purge_dead(before))

    async def _save_checkpoint(
        self, owner: str, task_id: str, token: int, checkpoint: bytes
    ) -> bool:
        return await self._do(
            ("checkpoint",),
            lambda: self._inner._save_checkpoint(owner, task_id, token, checkpoint),
        )

    async def _purge_checkpoints(self, before: int) -> int:
        return await self._do(("purge",), lambda: self._inner._purge_checkpoints(before))

    async def _report_progress(self, owner: str, reports: Sequence[Progress]) -> None:
        await self._do(("progress",), lambda: self._inner._report_progress(owner, reports))

    async def _put_schedule(self, schedule: Schedule) -> None:
        await self._do(("schedule",), lambda: self._inner._put_schedule(schedule))

    async def delete_schedule(self, schedule_id: str) -> bool:
        self._check_open()
        return await self._do(("schedule",), lambda: self._inner.delete_schedule(schedule_id))

    async def _fire_schedule(self, schedule: Schedule, advanced: Schedule, row: Row | None) -> bool:
        return await self._do(
            ("schedule",), lambda: self._inner._fire_schedule(schedule, advanced, row)
        )

    async def _set_paused(self, queue: str, paused: bool) -> None:
        await self._do(("queue",), lambda: self._inner._set_paused(queue, paused))

    async def _set_worker_paused(self, owner: str, paused: bool) -> bool:
        return await self._do(("queue",), lambda: self._inner._set_worker_paused(owner, paused))

    # Reading

    async def _read(self, step: Callable[[], Awaitable[_T]]) -> _T:
        self._check_open()
        return await self._do(("read",), step)

    async def _find(self, task_id: str) -> Row | FinishedRow | None:
        return await self._read(lambda: self._inner._find(task_id))

    async def _find_dead_row(self, task_id: str) -> Row | None:
        return await self._read(lambda: self._inner._find_dead_row(task_id))

    async def _find_newest_result(self, task_id: str) -> bytes | None:
        return await self._read(lambda: self._inner._find_newest_result(task_id))

    async def _list(self, query: TaskQuery) -> list[Row]:
        return await self._read(lambda: self._inner._list(query))

    async def _scan(self, query: ScanQuery) -> Scan:
        return await self._read(lambda: self._inner._scan(query))

    async def _list_dead(self, query: DeadQuery) -> list[DeadLetter]:
        return await self._read(lambda: self._inner._list_dead(query))

    async def stats(self) -> QueueStats:
        return await self._read(self._inner.stats)

    async def count_waiting(self) -> int:
        return await self._read(self._inner.count_waiting)

    async def workers(self) -> list[WorkerInfo]:
        return await self._read(self._inner.workers)

    async def held_by(self, owner: str) -> dict[str, int]:
        return await self._read(lambda: self._inner.held_by(owner))

    async def get_dead(self, task_id: str) -> DeadLetter | None:
        return await self._read(lambda: self._inner.get_dead(task_id))

    async def get_progress(self, task_id: str) -> Progress | None:
        return await self._read(lambda: self._inner.get_progress(task_id))

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        return await self._read(lambda: self._inner.load_checkpoint(task_id))

    async def get_schedule(self, schedule_id: str) -> Schedule | None:
        return await self._read(lambda: self._inner.get_schedule(schedule_id))

    async def list_schedules(self) -> list[Schedule]:
        return await self._read(self._inner.list_schedules)

    async def paused_queues(self) -> frozenset[str]:
        return await self._read(self._inner.paused_queues)

    async def gates(self) -> dict[str, GateState]:
        return await self._read(self._inner.gates)


def _span(at: int, times: int | None) -> tuple[int, int | None]:
    check_int("at", at, low=1)
    if times is None:
        return at, None
    check_int("times", times, low=1)
    return at, at + times - 1
