"""The values that a storage exchanges with its callers and its backend, besides tasks and outcomes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Literal, Protocol

import msgspec

from omniq.models import Runnable, TaskError, TaskStatus, WorkerInfo

Durability = Literal["none", "os", "power"]
Action = Literal["stop", "restart", "ping", "slots"]
"""What a worker can be asked to do."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between backends, as data.

    `durability`: what an acknowledged write survives: nothing (`none`), the death of the process
    (`os`), or a power cut (`power`). `reach`: which processes can share the storage.
    `atomic_batches`: whether a batch is enqueued completely or not at all, even across a crash.
    `exact_bound`: whether `max_pending` holds exactly when several processes enqueue concurrently.
    `transactions`: whether an enqueue can be part of a caller's own SQL transaction.
    `slow_writes`: whether a write takes long and costs money, and a process has one under way at a time: a
    worker then claims for all slots with one call, and renews its lease three times in a lease, not more.
    """

    name: str
    durability: Durability
    reach: Literal["process", "machine", "fleet"]
    atomic_batches: bool = True
    exact_bound: bool = True
    transactions: bool = False
    slow_writes: bool = False


class Witness(msgspec.Struct, frozen=True):
    """The newest claim of an owner. If its row has a lower token, the store may have forgotten it."""

    id: str
    seq: int
    nonce: str
    token: int


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A request for up to `limit` tasks. `now=None` means the storage's own clock.

    `runnable`: the functions that the owner can run; None for all. `witness`: what the owner has claimed last.
    """

    limit: int
    now: int | None
    queues: tuple[str, ...] | None
    claim_id: str
    runnable: Runnable | None = None
    witness: Witness | None = None


class Holder(msgspec.Struct, frozen=True):
    """An owner, and what it knows of its lease: the store's epoch, and the beat of its last renewal.

    An owner without a lease has the beat 0; its epoch is the highest that it has met. `claims`: how many of its
    calls have claimed, in a store that counts them.
    """

    owner: str
    epoch: int = 0
    beat: int = 0
    claims: int = 0


class Renewal(msgspec.Struct, frozen=True):
    """The reply to a lease renewal: the claims that the worker holds, and the tasks it should stop.

    `paused`: an operator has paused the worker, so it should claim nothing for now.
    """

    held: dict[str, int]
    cancelled: frozenset[str]
    paused: bool = False


class LeaseReply(msgspec.Struct, frozen=True):
    """What a store answers to a renewal. `renewal`: None when it is refused.

    `epoch`: the store's. `beat`: that of the owner's lease, also of a lease that was ended within the last
    day; 0 if the store knows of none. `store`: the store's record, see `incarnation`.
    """

    epoch: int
    beat: int
    store: bytes | None = None
    renewal: Renewal | None = None


class Lease(msgspec.Struct, frozen=True):
    """An owner's lease. `info` is None for an owner that holds tasks and has no lease.

    Of a store whose clock may be set, also the end of the lease and its length when it was renewed last,
    and the store's time when it was read, in microseconds.
    """

    owner: str
    info: WorkerInfo | None
    is_live: bool
    until: int = 0
    length: int = 0
    store_now: int = 0


class GivenBack(msgspec.Struct, frozen=True):
    """A task that was taken from a dead owner. `status` is its new one: FAILED after too many crashes."""

    task_id: str
    func_path: str
    owner: str
    status: TaskStatus


class PendingHook(msgspec.Struct, frozen=True, kw_only=True):
    """A call of `on_dead` that is recorded with a dead letter, and not made yet as far as the store knows.

    `owner` is the worker that makes it; empty until one that has the function has taken it. `token` is that
    of the claim that the task died with. `lost` counts the workers before this one that had it and were lost.
    """

    task_id: str
    func_path: str
    queue: str
    owner: str
    token: int
    died_at: datetime
    reason: str
    error: TaskError
    lost: int = 0


class WorkerRequest(msgspec.Struct, frozen=True):
    """What a worker is asked to do. `key` has its id and that of the request; `slots` is for that action."""

    key: str
    action: Action
    slots: int = 0
    asked_at: int = 0

    @property
    def owner(self) -> str:
        """The id of the worker."""
        return self.key.rpartition("/")[0]


class WorkerAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What a worker answers: the modules and functions that it may run, or the first of them."""

    modules: tuple[str, ...] | None = None
    functions: tuple[str, ...] = ()
    more: int = 0


class Identity:
    """The owner that a storage object acts as. Its siblings share it, so that they act as one owner.

    Siblings run in other threads, so `replace` and `trust` have no effect when the owner that they
    refer to has been replaced meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Called in several threads; a call is one step of the interpreter.
        self.tick = itertools.count(1).__next__
        """A number above all numbers that it has returned: what came first has the smaller one."""
        self.owner = ""
        self.started_at = 0
        self.lease = 0.0
        """Length of the lease that each renewal requests, in seconds; 0 before the first renewal."""
        self.lease_until = 0
        """Boot-clock microseconds until which the lease certainly lasts; 0 before the first renewal."""
        self.epoch = 0
        """The highest epoch of the store that this object has met."""
        self.lease_epoch = 0
        """The epoch of the lease."""
        self.beat = 0
        """The beat of the last renewal; 0 before the first one."""
        self.claims = 0
        """How many calls of this owner have claimed, in a store that counts them."""
        self.claims_from = 0
        """Boot-clock microseconds before which this object claims nothing."""
        self.may_have_hook: Callable[[str], bool] = _may_have_hook
        """Whether a function may have an `on_dead` hook. A pool knows, of the functions that it has."""

    def start(self, owner: str, now: int) -> None:
        """Become `owner`, without a lease."""
        self.owner, self.started_at, self.lease_until = owner, now, 0
        self.beat = self.claims = 0

    def replace(self, fenced: str, owner: str, now: int) -> None:
        """Become `owner`, unless a sibling has already replaced the `fenced` owner."""
        with self._lock:
            if self.owner == fenced:
                self.start(owner, now)

    def holder(self, owner: str) -> Holder:
        """What `owner` knows of its lease. One that was replaced knows an epoch that no store has."""
        with self._lock:
            if self.owner not in ("", owner):
                return Holder(owner, -1)
            epoch = self.lease_epoch if self.beat else self.epoch
            return Holder(owner, epoch, self.beat, self.claims)

    def meet(self, epoch: int) -> None:
        """Note the store's epoch."""
        with self._lock:
            self.epoch = max(self.epoch, epoch)

    def count_beat(self, owner: str, epoch: int, beat: int) -> None:
        """Note the epoch and the beat of a lease, if that is still the current owner."""
        self.meet(epoch)
        with self._lock:
            if self.owner == owner:
                self.lease_epoch, self.beat = epoch, max(self.beat, beat)

    def count_claims(self, owner: str, claims: int) -> None:
        """Note how many calls of the owner have claimed, if that is still the current owner."""
        with self._lock:
            if self.owner == owner:
                self.claims = max(self.claims, claims)

    def trust(self, owner: str, until: int) -> None:
        """Note the lease that the store granted to `owner`, if that is still the current owner."""
        with self._lock:
            if self.owner == owner:
                self.lease_until = until


def _may_have_hook(func_path: str) -> bool:
    return True


class EnqueuedRow(Protocol):
    """What a listener gets of a row that an enqueue has added. `visible` is 0 without an eta."""

    @property
    def id(self) -> str: ...

    @property
    def func_path(self) -> str: ...

    @property
    def queue(self) -> str: ...

    @property
    def visible(self) -> int: ...

    @property
    def task_type(self) -> str | None: ...


class EnqueueListener(Protocol):
    """Wants to know what an enqueue has added."""

    def enqueued(self, rows: Sequence[EnqueuedRow]) -> None: ...
