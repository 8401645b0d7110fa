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

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar, cast, get_args

import msgspec

from omniq.errors import InvalidValue, StorageError, StorageRefused
from omniq.models import check_int
from omniq.outcomes import Outcome
from omniq.storage.backend import Backend
from omniq.storage.base import BaseStorage
from omniq.storage.claim import Claimed
from omniq.storage.engine import Engine
from omniq.storage.types import Claim

Verb = Literal[
    "open",
    "close",
    "enqueue",
    "reserve",
    "record",
    "renew",
    "give_back",
    "cancel",
    "change",
    "purge",
    "dead",
    "history",
    "checkpoint",
    "progress",
    "output",
    "schedule",
    "queue",
    "requests",
    "flow",
    "read",
]
"""The calls that can fail, in groups: `dead`, for example, is every call that changes dead letters."""

When = Literal["before", "after"]

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


_METHODS: dict[Verb, tuple[str, ...]] = {
    "enqueue": ("enqueue",),
    "close": ("retire",),
    "renew": ("renew",),
    "give_back": ("give_back", "restored"),
    "cancel": ("cancel",),
    "change": ("change",),
    "purge": ("purge_results", "purge_expired", "purge_checkpoints", "delete_task"),
    "dead": ("retry_dead", "delete_dead", "purge_dead", "take_hook", "end_hook"),
    "checkpoint": ("save_checkpoint",),
    "progress": ("report_progress",),
    "output": ("append_output",),
    "schedule": ("put_schedule", "delete_schedule", "fire_schedule", "seal"),
    "queue": (
        *("pause", "resume", "resume_due", "edit_limits"),
        *("pause_worker", "close_breaker", "ask_worker"),
    ),
    "requests": (
        "take_requests",
        "answer_request",
        "take_answer",
        "withdraw_request",
        "purge_requests",
    ),
    "history": (
        "add_run_counts",
        "merge_run_counts",
        "purge_run_counts",
        "note_version",
        "add_audit_entry",
    ),
    "flow": ("advance", "complete", "close_group", "revive"),
    "read": (
        *("run_counts", "versions", "ended_workers", "audit_log", "pending_requests"),
        *("record", "records", "page", "newest_result", "get_dead", "pending_hook"),
        *("pending_hooks", "get_progress", "progress_of", "load_checkpoint", "get_schedule"),
        "read_output",
        *("list_schedules", "unreadable_schedules", "paused_queues", "pauses"),
        *("older_schedules", "older_checkpoints"),
        *("gates", "stats", "count_waiting", "count_newer", "workers", "held_by", "store_record"),
    ),
}
"""The engine's methods in each group, but for `record_and_claim` and `transaction`."""

_VERBS = {name: verb for verb, names in _METHODS.items() for name in names}


class _FaultyEngine:
    """The engine of the wrapped storage, under the faults of the storage that wraps it."""

    def __init__(self, storage: FaultyStorage, engine: Engine) -> None:
        self._storage = storage
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        verb, method = _VERBS.get(name), getattr(self._engine, name)
        if verb is None:
            return method

        async def call(*args: Any, **options: Any) -> Any:
            return await self._storage._do((verb,), lambda: method(*args, **options))

        return call

    async def record_and_claim(
        self, owner: str, outcomes: Sequence[Outcome], claim: Claim | None
    ) -> tuple[list[bool], Claimed]:
        verbs: list[Verb] = ["record"] if outcomes else []
        if claim is not None:
            verbs.append("reserve")
        return await self._storage._do(
            verbs, lambda: self._engine.record_and_claim(owner, outcomes, claim)
        )

    @asynccontextmanager
    async def transaction(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        due = self._storage._plan.due(("record",))
        async with self._engine.transaction(*args, **options) as connection:
            yield connection
            self._storage._raise_due(due, ("record",), "before")
        self._storage._raise_due(due, ("record",), "after")


class _FaultyBackend:
    """The backend of the wrapped storage, which is opened and closed with it."""

    callers_lock = None
    """Faults wait on an event loop."""

    is_idle = False

    def __init__(self, storage: FaultyStorage, backend: Backend) -> None:
        self._storage = storage
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def open(self) -> None:
        await self._storage._do(("open",), self._storage._inner.open)

    async def close(self) -> None:
        await self._storage._close_inner()


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
        # The same owner, so that the wrapped storage, too, ends the lease when it is closed.
        self._identity = inner._identity
        self._forget_claims()
        self._backend = cast(Backend, _FaultyBackend(self, inner._backend))
        self._engine = cast(Engine, _FaultyEngine(self, inner._engine))
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

    async def _close_inner(self) -> None:
        # The wrapped storage is closed under any fault: a test must leave nothing open.
        try:
            await self._do(("close",), self._inner.close)
        finally:
            await self._inner.close()


def _span(at: int, times: int | None) -> tuple[int, int | None]:
    check_int("at", at, low=1, error=InvalidValue)
    if times is None:
        return at, None
    check_int("times", times, low=1, error=InvalidValue)
    return at, at + times - 1
