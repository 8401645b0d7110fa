"""The words that a storage and its callers exchange, besides tasks and outcomes."""

from __future__ import annotations

import threading
from typing import Literal

import msgspec

from omniq.models import TaskStatus
from omniq.outcomes import Outcome

Durability = Literal["none", "os", "power"]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between backends, as data.

    `durability`: what an acknowledged write survives: nothing, the death of the process (`os`), or
    a power cut (`power`). `reach`: who can share the storage. `atomic_batches`: whether a batch is
    enqueued all or nothing even across a crash. `exact_bound`: whether `max_pending` holds exactly
    when many processes enqueue at once. `transactions`: whether a caller's own SQL transaction can
    carry an enqueue.
    """

    name: str
    durability: Durability
    reach: Literal["process", "machine", "fleet"]
    atomic_batches: bool = True
    exact_bound: bool = True
    transactions: bool = False


class Entry(msgspec.Struct, frozen=True):
    """An outcome on its way into a backend; `result` is its encoded result if it carries one."""

    outcome: Outcome
    result: bytes | None


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A request for tasks. `now=None` is the storage's own clock."""

    limit: int
    now: int | None
    queues: tuple[str, ...] | None
    claim_id: str


class Renewal(msgspec.Struct, frozen=True):
    """What a worker learns at each renewal: what it holds, and what it should stop.

    `paused`: somebody wants it to claim nothing more for now.
    """

    held: dict[str, int]
    cancelled: frozenset[str]
    paused: bool = False


class GivenBack(msgspec.Struct, frozen=True):
    """A task taken from a dead owner. `status` is what it is now: FAILED after too many crashes."""

    task_id: str
    func_path: str
    owner: str
    status: TaskStatus


class Identity:
    """Who a storage object is to the store. Shared with its twins, so that they act as one owner.

    Twins live in other threads: what they find out is taken in only while it is still true.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.owner = ""
        self.started_at = 0
        self.lease = 0.0
        """Seconds each renewal asks for; 0 before the first one."""
        self.trusted_until = 0
        """Boot-clock microseconds until which the lease is surely ours; 0 before the first one."""

    def renew(self, owner: str, now: int) -> None:
        self.owner, self.started_at, self.trusted_until = owner, now, 0

    def replace(self, fenced: str, owner: str, now: int) -> None:
        """Become `owner`, unless a twin has replaced the fenced one already."""
        with self._lock:
            if self.owner == fenced:
                self.renew(owner, now)

    def trust(self, owner: str, until: int) -> None:
        """The store has given that owner a lease, which may not be this one any more."""
        with self._lock:
            if self.owner == owner:
                self.trusted_until = until
