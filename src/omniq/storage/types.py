"""The values that a storage exchanges with its callers and its backend, besides tasks and outcomes."""

from __future__ import annotations

import threading
from typing import Literal

import msgspec

from omniq.models import Runnable, TaskStatus
from omniq.outcomes import Outcome

Durability = Literal["none", "os", "power"]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between backends, as data.

    `durability`: what an acknowledged write survives: nothing (`none`), the death of the process
    (`os`), or a power cut (`power`). `reach`: which processes can share the storage.
    `atomic_batches`: whether a batch is enqueued completely or not at all, even across a crash.
    `exact_bound`: whether `max_pending` holds exactly when several processes enqueue concurrently.
    `transactions`: whether an enqueue can be part of a caller's own SQL transaction.
    """

    name: str
    durability: Durability
    reach: Literal["process", "machine", "fleet"]
    atomic_batches: bool = True
    exact_bound: bool = True
    transactions: bool = False


class Entry(msgspec.Struct, frozen=True):
    """An outcome to be recorded; `result` is its encoded result if it has one."""

    outcome: Outcome
    result: bytes | None


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A request for up to `limit` tasks. `now=None` means the storage's own clock.

    `runnable`: the functions that the owner can run; None for all.
    """

    limit: int
    now: int | None
    queues: tuple[str, ...] | None
    claim_id: str
    runnable: Runnable | None = None


class Renewal(msgspec.Struct, frozen=True):
    """The reply to a lease renewal: the claims that the worker holds, and the tasks it should stop.

    `paused`: an operator has paused the worker, so it should claim nothing for now.
    """

    held: dict[str, int]
    cancelled: frozenset[str]
    paused: bool = False


class GivenBack(msgspec.Struct, frozen=True):
    """A task that was taken from a dead owner. `status` is its new one: FAILED after too many crashes."""

    task_id: str
    func_path: str
    owner: str
    status: TaskStatus


class Identity:
    """The owner that a storage object acts as. Its siblings share it, so that they act as one owner.

    Siblings run in other threads, so `replace` and `trust` have no effect when the owner that they
    refer to has been replaced meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.owner = ""
        self.started_at = 0
        self.lease = 0.0
        """Length of the lease that each renewal requests, in seconds; 0 before the first renewal."""
        self.lease_until = 0
        """Boot-clock microseconds until which the lease certainly lasts; 0 before the first renewal."""

    def start(self, owner: str, now: int) -> None:
        """Become `owner`, without a lease."""
        self.owner, self.started_at, self.lease_until = owner, now, 0

    def replace(self, fenced: str, owner: str, now: int) -> None:
        """Become `owner`, unless a sibling has already replaced the `fenced` owner."""
        with self._lock:
            if self.owner == fenced:
                self.start(owner, now)

    def trust(self, owner: str, until: int) -> None:
        """Note the lease that the store granted to `owner`, if that is still the current owner."""
        with self._lock:
            if self.owner == owner:
                self.lease_until = until
