"""Record and claim: the fast path, one SQL function that does both in one round trip.

The engine has planned what each outcome makes of its task, from the row as it was claimed. The function
`record_and_claim` (`sql/functions/4_record_and_claim.sql`) writes that if the row has not changed, and
claims plain tasks. What it cannot do is left to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from omniq.clock import Clock
from omniq.errors import LeaseLost
from omniq.storage.backend import Changes, FastReply
from omniq.storage.postgres import encoding
from omniq.storage.postgres.connection import ReplyLost
from omniq.storage.postgres.section import Fetch
from omniq.storage.postgres.statements import SchemaNames
from omniq.storage.postgres.vacuum import Vacuum
from omniq.storage.postgres.wakeups import Wakeups
from omniq.storage.row_rules import Row
from omniq.storage.store_clock import given_time, observe
from omniq.storage.types import Claim, Identity

OUTCOMES_NOT_MATCHED = 1
"""Some rows had changed: their outcomes need the rules. Nothing was claimed."""

LEASE_LOST = 2
"""The owner has no lease. Nothing was done."""

CLAIM_NEEDS_RULES = 3
"""All outcomes were recorded. The claim needs the rules; nothing was claimed."""

MORE_DUE = 4
"""All outcomes were recorded. More tasks have become due than one call moves: call again."""

WITNESS_BEHIND = 5
"""All outcomes were recorded. The owner's newest claim has a lower token; nothing was claimed."""

_HEAD = 4
"""The number of columns before those of a row."""


class PostgresFastPath:
    """Records and claims with one call. `prefix` begins the names of its claims."""

    def __init__(
        self,
        fetch: Fetch,
        names: SchemaNames,
        clock: Clock,
        wakeups: Wakeups,
        vacuum: Vacuum,
        identity: Identity,
        *,
        prefix: str,
    ) -> None:
        self._fetch = fetch
        self._sql = names.select("record_and_claim", 8)
        self._clock = clock
        self._wakeups = wakeups
        self._vacuum = vacuum
        self._identity = identity
        self._prefix = prefix
        self._claims = 0

    def now(self) -> int:
        """The store's time in microseconds, as far as it is known here."""
        return self._clock.micros()

    def new_claim_id(self) -> str:
        """A name for one claim: unique for the owner, who may have a second storage object."""
        self._claims += 1
        return f"{self._prefix}{self._claims}"

    async def record_and_claim(
        self, owner: str, changes: Changes, claim: Claim | None
    ) -> FastReply:
        """Write the changes of rows that this owner still holds, then claim."""
        ended = changes.ended
        outcomes: list[Any] = [
            encoding.endings(ended, [owner] * len(ended)),
            [encoding.task(row) for row in changes.updated],
            [change.key for change in changes.documents],
            [(change.before or b"").decode() for change in changes.documents],
        ]
        claim_id = (claim.claim_id if claim is not None else "") or self.new_claim_id()
        if claim is not None:
            self._wakeups.claim_started(claim.queues, claim.runnable)
        while True:
            sent_at = self._clock.boot_micros()
            reply = await self._call(owner, outcomes, claim, claim_id)
            if reply.state != MORE_DUE:
                break
            outcomes = [encoding.endings([], []), [], [], []]
        observe(self._clock, reply.at, sent_at=sent_at)
        if reply.state == LEASE_LOST:
            raise LeaseLost(owner)
        if reply.state == OUTCOMES_NOT_MATCHED:
            return FastReply(reply.missed)
        if claim is None or reply.state in (CLAIM_NEEDS_RULES, WITNESS_BEHIND):
            return FastReply(is_behind=reply.state == WITNESS_BEHIND)
        self.claim_ended(claim, len(reply.rows), reply.next_due)
        return FastReply(rows=reply.rows)

    def claim_ended(self, claim: Claim, count: int, next_due: int | None) -> None:
        """Note that a claim got that many tasks, also one by the rules."""
        self._vacuum.count_claims(count)
        self._wakeups.claim_returned(is_full=count >= claim.limit, next_due=next_due)

    async def _call(
        self, owner: str, outcomes: Sequence[Any], claim: Claim | None, claim_id: str
    ) -> _Reply:
        request, is_repeat = None, False
        if claim is not None:
            request = encoding.claim(claim, name=claim_id, beat=self._identity.holder(owner).beat)
            # A caller that names its claim may be repeating it.
            is_repeat = claim.claim_id != ""
        parameters = (owner, given_time(self._clock), *outcomes, request)
        try:
            lines = await self._fetch(self._sql, *parameters, is_repeat, is_repeatable=False)
        except ReplyLost:
            # The token shows whether an outcome was recorded, the claim's name what was claimed.
            lines = await self._fetch(self._sql, *parameters, True, is_repeatable=False)
        return _reply(lines, owner)


class _Reply(msgspec.Struct, frozen=True):
    state: int
    at: int
    next_due: int | None
    missed: frozenset[str]
    rows: list[Row]


def _reply(lines: Sequence[Sequence[Any]], owner: str) -> _Reply:
    """Decode the returned lines: the first has the state, the others the claimed rows."""
    state, missed, at, next_due, *_ = lines[0]
    rows = [encoding.row_from(line[_HEAD:]) for line in lines[1:]]
    for row in rows:
        row.owner = owner
    rows.sort(key=lambda row: row.order)
    return _Reply(state, at, next_due, frozenset(missed or ()), rows)
