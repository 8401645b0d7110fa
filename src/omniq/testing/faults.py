"""A storage whose calls fail or take longer when a test says so.

    faulty = FaultyStorage(MemoryStorage(clock=clock))
    faulty.fail("record", when="after")       # the outcomes are stored, and the reply is lost
    faulty.fail("enqueue", at=3, times=2)     # the third call from now and the one after it
    faulty.delay("reserve", seconds=5.0)      # the next claim takes five seconds on the clock
    faulty.kill()                             # no later call reaches the store: a dead worker
    faulty.heal()                             # removes all faults; a killed storage stays dead

A call that fails *before* has changed nothing. A call that fails *after* has done everything, and
only its caller does not know: the case that idempotence is for. The heartbeat calls `renew`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

import msgspec

from omniq.errors import InvalidValue, StorageError, StorageRefused
from omniq.models import check_int
from omniq.storage.base import BaseStorage
from omniq.storage.row_rules import Row
from omniq.storage.types import Capabilities, Claim, Entry

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
"""The calls that can fail, in groups: `dead`, for example, is every call that changes dead letters."""

When = Literal["before", "after"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Fault(msgspec.Struct):
    """Triggers on the calls `first` to `last` of its verbs, counted from when it was planned."""

    verbs: tuple[Verb, ...]
    first: int
    last: int | None
    when: When = "before"
    error: Exception | None = None
    seconds: float = 0.0
    act: Callable[[FaultyStorage], Awaitable[object]] | None = None
    calls: int = 0

    def is_due(self, verbs: Sequence[Verb]) -> bool:
        """Count the call, and return whether the fault triggers on it."""
        if not set(self.verbs) & set(verbs):
            return False
        self.calls += 1
        return self.first <= self.calls and (self.last is None or self.calls <= self.last)


class _FaultPlan:
    """The planned faults, and the number of calls of each verb. Siblings share it."""

    def __init__(self) -> None:
        self.faults: list[_Fault] = []
        self.calls: dict[Verb, int] = dict.fromkeys(get_args(Verb), 0)
        self.triggered = 0

    def due(self, verbs: Sequence[Verb]) -> list[_Fault]:
        for verb in verbs:
            self.calls[verb] += 1
        due = [fault for fault in self.faults if fault.is_due(verbs)]
        self.triggered += len(due)
        return due


def _forward(
    verb: Verb, method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]
) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]:
    """Return the method that calls the wrapped storage's `method` under the faults of `verb`."""
    name = method.__name__
    # For its other underscored methods, BaseStorage has checked it before.
    checks_open = verb == "read" or not name.startswith("_")

    # Without `__dict__`, which would mark the new method as abstract too.
    @functools.wraps(method, updated=())
    async def forwarded(self: FaultyStorage, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if checks_open:
            self._check_open()
        inner = getattr(self._inner, name)
        return await self._do((verb,), lambda: inner(*args, **kwargs))

    return forwarded


class FaultyStorage(BaseStorage):
    """Any storage, with faults that a test plans. Without faults it behaves as the wrapped one.

    It is the owner and keeps its own list of claims, so a claim whose reply was lost is held in the
    store and unknown here. Open this object instead of the wrapped one, which it opens and closes.
    """

    def __init__(self, inner: BaseStorage) -> None:
        super().__init__(
            serializer=inner._serializer,
            clock=inner._clock,
            settings=inner._settings,
            max_pending=inner._max_pending,
        )
        self._inner = inner
        self._local_wakeups = inner._local_wakeups
        # The same owner: a backend may compare its own identity to recognise a first renewal.
        self._identity = inner._identity
        self._plan = _FaultPlan()
        # Shared by siblings, like the plan: the owner ids at the calls of `kill`.
        self._killed_owners: list[str] = []

    def fail(
        self,
        *verbs: Verb,
        when: When = "before",
        at: int = 1,
        times: int | None = 1,
        error: Exception | None = None,
    ) -> None:
        """Let the `at`-th call from now fail, and the calls after it, `times` in all (None: all)."""
        fault = _Fault(verbs, *_span(at, times), when=when, error=error)
        self._plan.faults.append(fault)

    def delay(self, *verbs: Verb, seconds: float, at: int = 1, times: int | None = 1) -> None:
        """Let the `at`-th call from now wait `seconds` on the storage's clock before it begins."""
        self._plan.faults.append(_Fault(verbs, *_span(at, times), seconds=seconds))

    def before(
        self, *verbs: Verb, act: Callable[[FaultyStorage], Awaitable[object]], at: int = 1
    ) -> None:
        """Await `act` before the `at`-th call from now; its argument is the storage that is called."""
        self._plan.faults.append(_Fault(verbs, *_span(at, 1), act=act))

    def kill(self) -> None:
        """Refuse every later call, as if this worker's process had died."""
        self._killed_owners.append(self.owner)

    @property
    def killed_owner(self) -> str | None:
        """The owner id that this storage had when it was killed; None while it is alive."""
        return self._killed_owners[0] if self._killed_owners else None

    def heal(self) -> None:
        """Remove all planned faults. A killed storage stays dead."""
        self._plan.faults.clear()

    def share_faults(self, inner: BaseStorage) -> FaultyStorage:
        """Wrap another storage under the same planned faults: calls of either one count."""
        other = FaultyStorage(inner)
        other._plan = self._plan
        return other

    @property
    def calls(self) -> dict[Verb, int]:
        """The number of calls of each verb, failed ones included."""
        return dict(self._plan.calls)

    @property
    def triggered(self) -> int:
        """The number of faults that have triggered."""
        return self._plan.triggered

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def sibling(self) -> FaultyStorage:
        sibling = FaultyStorage(self._inner.sibling())
        sibling._identity = self._identity
        sibling._is_sibling = True
        sibling._plan = self._plan
        sibling._killed_owners = self._killed_owners
        return sibling

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
        if self._killed_owners:
            raise StorageRefused("this worker was killed by its test")
        for fault in due:
            if fault.when == when and not fault.seconds and fault.act is None:
                message = f"{'/'.join(verbs)}: failed on purpose, {when} it was done"
                raise fault.error or StorageError(message)

    # Calls that are not simply forwarded

    async def _open(self) -> None:
        await self._do(("open",), self._inner.open)

    async def _close(self) -> None:
        # The wrapped storage is closed under any fault: a test must leave nothing open.
        try:
            await self._do(("close",), self._inner.close)
        finally:
            await self._inner.close()

    async def _record_and_claim(
        self, owner: str, entries: list[Entry], claim: Claim | None
    ) -> tuple[list[bool], list[Row]]:
        verbs: list[Verb] = ["record"] if entries else []
        if claim is not None:
            verbs.append("reserve")
        return await self._do(verbs, lambda: self._inner._record_and_claim(owner, entries, claim))

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

    async def _wait_for_work(self, timeout: float) -> None:
        await self._inner._wait_for_work(timeout)

    # Calls that change the store

    _enqueue = _forward("enqueue", BaseStorage._enqueue)
    _enqueue_within = _forward("enqueue", BaseStorage._enqueue_within)
    _retire = _forward("close", BaseStorage._retire)
    _renew = _forward("renew", BaseStorage._renew)
    _give_back = _forward("give_back", BaseStorage._give_back)
    _cancel = _forward("cancel", BaseStorage._cancel)
    _purge_results = _forward("purge", BaseStorage._purge_results)
    _purge_expired = _forward("purge", BaseStorage._purge_expired)
    _purge_checkpoints = _forward("purge", BaseStorage._purge_checkpoints)
    _delete_task = _forward("purge", BaseStorage._delete_task)
    _retry_dead = _forward("dead", BaseStorage._retry_dead)
    delete_dead = _forward("dead", BaseStorage.delete_dead)
    _purge_dead = _forward("dead", BaseStorage._purge_dead)
    _save_checkpoint = _forward("checkpoint", BaseStorage._save_checkpoint)
    _report_progress = _forward("progress", BaseStorage._report_progress)
    _put_schedule = _forward("schedule", BaseStorage._put_schedule)
    delete_schedule = _forward("schedule", BaseStorage.delete_schedule)
    _fire_schedule = _forward("schedule", BaseStorage._fire_schedule)
    _set_paused = _forward("queue", BaseStorage._set_paused)
    _set_worker_paused = _forward("queue", BaseStorage._set_worker_paused)

    # Calls that read

    _find = _forward("read", BaseStorage._find)
    _find_dead_row = _forward("read", BaseStorage._find_dead_row)
    _find_newest_result = _forward("read", BaseStorage._find_newest_result)
    _list = _forward("read", BaseStorage._list)
    _scan = _forward("read", BaseStorage._scan)
    _list_dead = _forward("read", BaseStorage._list_dead)
    stats = _forward("read", BaseStorage.stats)
    count_waiting = _forward("read", BaseStorage.count_waiting)
    workers = _forward("read", BaseStorage.workers)
    held_by = _forward("read", BaseStorage.held_by)
    get_dead = _forward("read", BaseStorage.get_dead)
    get_progress = _forward("read", BaseStorage.get_progress)
    load_checkpoint = _forward("read", BaseStorage.load_checkpoint)
    get_schedule = _forward("read", BaseStorage.get_schedule)
    list_schedules = _forward("read", BaseStorage.list_schedules)
    paused_queues = _forward("read", BaseStorage.paused_queues)
    gates = _forward("read", BaseStorage.gates)


def _span(at: int, times: int | None) -> tuple[int, int | None]:
    check_int("at", at, low=1, error=InvalidValue)
    if times is None:
        return at, None
    check_int("times", times, low=1, error=InvalidValue)
    return at, at + times - 1
