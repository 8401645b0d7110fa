"""The claims of one owner: who has each of them in this process, compared with what the store says.

A claim is in the register from the reply that brought it until the store has recorded its outcome, or has
refused it as stale. Everything that claims through one storage object shares one register: all pools, and
the direct verbs. At each renewal of the lease a pool compares it with the store. Because calls are under
way meanwhile, only what differs in two comparisons in a row is acted on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import msgspec

from omniq.models import Task
from omniq.outcomes import Outcome
from omniq.storage.types import Identity

Hand = Literal["verb", "run", "outcome"]
"""Who has a claim: the caller of a verb, a run, or an outcome that waits to be recorded."""

Claim = tuple[str, int]
"""A task's id and the token of its claim."""


_Difference = tuple[str, Claim]
"""How a claim differs: `unknown` or `lost`."""


class Holder(Protocol):
    """A pool, which knows what it does with the claims that were passed to it."""

    def hands(self) -> Mapping[Claim, Hand]:
        """The claims that it has, and who has each."""
        ...


class Differences(msgspec.Struct, frozen=True):
    """What the register and the store disagree on, for two comparisons in a row.

    `unknown`: the store counts it as this owner's, and nothing here has it. `lost`: it runs here, and the
    store does not count it as this owner's.
    """

    unknown: list[Claim] = []
    lost: list[Claim] = []


class _Reply(msgspec.Struct):
    """What the claims of one reply have in common; `since` is a tick. Without `holder`, a verb has them."""

    since: int
    claim_id: str = ""
    holder: Holder | None = None


class _Entry(msgspec.Struct):
    """One claim. `task` is None if only the store knows what was claimed."""

    token: int
    task: Task | None
    reply: _Reply


class _Sighting(msgspec.Struct, frozen=True):
    """When a difference was seen first, and the calls that were claiming then."""

    tick: int
    claiming: frozenset[int]


class ClaimRegister:
    """The claims that a storage object has made as its current owner.

    Used on the event loop of the storage object. A renewal may be made in another thread, and is compared
    here afterwards.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._owner = ""
        self._started_at = 0
        self._entries: dict[str, _Entry] = {}
        self._claiming: set[int] = set()
        self._in_transaction: set[Claim] = set()
        self._sightings: dict[_Difference, _Sighting] = {}
        self._compared = 0
        self._completed: set[Claim] = set()
        self.repeated: dict[str, int] = {}
        """The tokens of repeating tasks that a verb has finished: their next run may be moved."""

    def clear(self) -> None:
        """Forget all claims: they are no longer this owner's."""
        for forgotten in (self._entries, self._sightings, self._completed, self.repeated):
            forgotten.clear()

    def _current(self) -> dict[str, _Entry]:
        owner = self._identity.owner
        if self._owner != owner:
            # Checked here and not where it happens: a sibling may have received the `LeaseLost`.
            self.clear()
            self._owner = owner
            self._started_at = self._identity.tick()
        return self._entries

    # Claims

    @property
    def claims(self) -> dict[str, int]:
        """All claims: task id to token."""
        return {task_id: entry.token for task_id, entry in self._current().items()}

    def task(self, task_id: str) -> Task | None:
        """The task as it was claimed; None if it is not claimed."""
        entry = self._current().get(task_id)
        return None if entry is None else entry.task

    def tasks(self) -> list[Task]:
        """All tasks as they were claimed. From any thread."""
        entries = list(self._current().values())
        return [entry.task for entry in entries if entry.task is not None]

    def claimed_as(self, claim_id: str) -> list[Task]:
        """The tasks that calls with that id have claimed."""
        return [
            entry.task
            for entry in self._current().values()
            if entry.reply.claim_id == claim_id and entry.task is not None
        ]

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """While a call claims: the store may count tasks as claimed that no reply has brought yet."""
        call = self._identity.tick()
        self._claiming.add(call)
        try:
            yield
        finally:
            self._claiming.discard(call)

    def add(self, tasks: Sequence[Task], claim_id: str) -> None:
        """Note the claims that a reply has brought. The caller of the verb has them."""
        entries, reply = self._current(), _Reply(self._identity.tick(), claim_id)
        entries.update({task.id: _Entry(task.token, task, reply) for task in tasks})

    def pass_to(self, holder: Holder, tasks: Sequence[Task]) -> None:
        """From now on `holder` has these claims, which are all that one reply has brought."""
        for task in tasks[:1]:
            entry = self._current().get(task.id)
            if entry is not None and entry.token == task.token:
                entry.reply.holder = holder

    def adopt(self, holder: Holder, claims: Sequence[Claim]) -> None:
        """Note claims of which only the store knew. `holder` ends them."""
        entries, reply = self._current(), _Reply(self._identity.tick(), holder=holder)
        for task_id, token in claims:
            if task_id not in entries or entries[task_id].token < token:
                entries[task_id] = _Entry(token, None, reply)

    def drop(self, outcomes: Iterable[Outcome]) -> None:
        """Forget the claims of outcomes that the store has recorded, or has refused as stale."""
        entries = self._current()
        for outcome in outcomes:
            entry = entries.get(outcome.task_id)
            if entry is not None and entry.token == outcome.token:
                del entries[outcome.task_id]

    def drop_all_of(self, holder: Holder) -> None:
        """Forget the claims of a pool that has ended: another pool of this owner may release them."""
        entries = self._current()
        for task_id in [id for id, entry in entries.items() if entry.reply.holder is holder]:
            del entries[task_id]

    def has_others(self, holder: Holder) -> bool:
        """Whether there are claims that `holder` does not have."""
        return any(entry.reply.holder is not holder for entry in self._current().values())

    # Transactions of tasks, which record an outcome themselves

    @contextmanager
    def in_transaction(self, task_id: str, token: int) -> Iterator[None]:
        """While a transaction is open whose commit records the outcome of the claim."""
        self._in_transaction.add((task_id, token))
        try:
            yield
            entry = self._current().get(task_id)
            if entry is not None and entry.token == token:
                self._completed.add((task_id, token))
        finally:
            self._in_transaction.discard((task_id, token))

    @property
    def has_completed(self) -> bool:
        """Whether a transaction has recorded an outcome that its run has not reported yet."""
        return bool(self._completed)

    def is_completed(self, task_id: str, token: int) -> bool:
        """Whether a transaction has recorded the outcome of the claim."""
        self._current()
        return (task_id, token) in self._completed

    def drop_completed(self, outcome: Outcome) -> None:
        """Forget a claim whose transaction has recorded its outcome, now that its run has ended."""
        self._completed.discard((outcome.task_id, outcome.token))
        self.drop([outcome])

    # Comparing with the store

    def tick(self) -> int:
        """A number above all before it, from any thread: to say when a renewal was asked for."""
        return self._identity.tick()

    def compare(self, held: Mapping[str, int], asked_at: int) -> Differences:
        """Compare with what the store said at a renewal: task id to token."""
        entries = self._current()
        if asked_at <= max(self._started_at, self._compared):
            # Of the owner before, or overtaken by a later renewal.
            return Differences()
        self._compared = asked_at
        hands = self._hands(entries.values())
        unknown = [
            claim for claim in held.items() if not _is_in_hand(claim, entries.get(claim[0]), hands)
        ]
        lost = [
            (task_id, entry.token)
            for task_id, entry in entries.items()
            # Claimed before the renewal was asked for, so that the store had to know it.
            if entry.reply.since < asked_at
            and held.get(task_id) != entry.token
            and hands.get((task_id, entry.token)) == "run"
            and (task_id, entry.token) not in self._completed
            and (task_id, entry.token) not in self._in_transaction
        ]
        certain = self._seen_before({"unknown": unknown, "lost": lost}, asked_at)
        return Differences(
            [claim for claim in unknown if ("unknown", claim) in certain],
            [claim for claim in lost if ("lost", claim) in certain],
        )

    def _hands(self, entries: Collection[_Entry]) -> dict[Claim, Hand]:
        hands: dict[Claim, Hand] = {}
        for holder in {entry.reply.holder for entry in entries}:
            if holder is not None:
                hands.update(holder.hands())
        return hands

    def _seen_before(self, differing: dict[str, list[Claim]], asked_at: int) -> set[_Difference]:
        """Those that also differed when a renewal before this one was compared.

        A task that the store counts as claimed may be in a reply that is still on its way. So the calls
        that were claiming when the difference was seen first have to be answered.
        """
        before = self._sightings
        now = _Sighting(self._identity.tick(), frozenset(self._claiming))
        self._sightings = {
            (kind, claim): before.get((kind, claim), now)
            for kind, claims in differing.items()
            for claim in claims
        }
        return {
            difference
            for difference, first in self._sightings.items()
            if first.tick < asked_at and not first.claiming & self._claiming
        }


def _is_in_hand(claim: Claim, entry: _Entry | None, hands: Mapping[Claim, Hand]) -> bool:
    if entry is None or entry.token < claim[1]:
        return False
    if entry.token > claim[1]:
        # Claimed again since the store was asked.
        return True
    # What no pool was given, the caller of a verb has.
    return entry.reply.holder is None or claim in hands
