"""Record and claim: the fast path, one SQL function that does both in one round trip.

The engine has planned what each outcome makes of its task, from the row as it was claimed. The function
`record_outcomes_and_claim` (`sql/functions/4_record_and_claim.sql`) writes that if the row has not changed, and
claims plain tasks. What it cannot do is left to the engine.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from omniq.clock import Clock
from omniq.errors import LeaseLost
from omniq.storage.backend import Changes, FastReply
from omniq.storage.postgres import encoding
from omniq.storage.postgres.connection import ReplyLost
from omniq.storage.postgres.statements import Statements
from omniq.storage.postgres.vacuum import Vacuum
from omniq.storage.postgres.wakeups import Wakeups
from omniq.storage.store_clock import given_time, observe
from omniq.storage.types import Claim, Identity


class _State(IntEnum):
    """What became of a call: see the SQL function."""

    DONE = 0
    OUTCOMES_NOT_MATCHED = 1
    LEASE_LOST = 2
    CLAIM_NEEDS_RULES = 3
    MORE_DUE = 4
    WITNESS_BEHIND = 5
    CLAIMED_BEFORE = 6


_NOTHING_ENDED: tuple[Any, ...] = (encoding.endings([], []), [], [], [])
_CLAIMED = (
    f"SELECT {encoding.LIVE_COLUMNS} FROM {{schema}}.live "
    "WHERE place = 4 AND owner = $1 AND claim_id = $2 AND status = 1 ORDER BY rank, turn, seq"
)


class PostgresFastPath:
    """Records and claims with one call. `prefix` begins the names of its claims."""

    def __init__(
        self,
        statements: Statements,
        clock: Clock,
        wakeups: Wakeups,
        vacuum: Vacuum,
        identity: Identity,
        *,
        prefix: str,
    ) -> None:
        self._statements = statements
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
        outcomes: tuple[Any, ...] = (
            encoding.endings(ended, [owner] * len(ended)),
            [encoding.task(row) for row in changes.updated],
            [change.key for change in changes.documents],
            [(change.before or b"").decode() for change in changes.documents],
        )
        request, claim_id = None, ""
        if claim is not None:
            claim_id = claim.claim_id or self.new_claim_id()
            beat = self._identity.holder(owner).beat
            wanted = encoding.wanted_tasks(claim.queues, claim.runnable)
            request = encoding.claim(claim, wanted, name=claim_id, beat=beat)
            self._wakeups.claim_started(wanted)
        # A caller that names its claim may be repeating it.
        is_repeat = claim is not None and claim.claim_id != ""
        state = _State.MORE_DUE
        while state == _State.MORE_DUE:
            sent_at = self._clock.boot_micros()
            report, *lines = await self._call(owner, *outcomes, request, is_repeat=is_repeat)
            state, now, next_due = report["seq"], report["turn"], report["due"]
            outcomes = _NOTHING_ENDED
        observe(self._clock, now, sent_at=sent_at)
        match state:
            case _State.LEASE_LOST:
                raise LeaseLost(owner)
            case _State.OUTCOMES_NOT_MATCHED:
                return FastReply(frozenset(line["id"] for line in lines))
            case _State.WITNESS_BEHIND:
                return FastReply(is_behind=True)
            case _State.CLAIMED_BEFORE:
                lines = await self._statements.fetch(_CLAIMED, owner, claim_id)
                rows = [encoding.row_from(line) for line in lines]
            case _:
                rows = encoding.claimed_rows(lines, owner, now)
        if claim is None or state == _State.CLAIM_NEEDS_RULES:
            return FastReply()
        self.claim_ended(claim, len(rows), next_due)
        return FastReply(rows=rows)

    async def _call(self, owner: str, *parameters: Any, is_repeat: bool) -> list[Any]:
        parameters = (owner, given_time(self._clock), *parameters)
        call = self._statements.call_once
        try:
            return await call("record_outcomes_and_claim", *parameters, is_repeat)
        except ReplyLost:
            # The token shows whether an outcome was recorded, the claim's name what was claimed.
            return await call("record_outcomes_and_claim", *parameters, True)

    def claim_ended(self, claim: Claim, count: int, next_due: int | None) -> None:
        """Note that a claim got that many tasks, also one by the rules."""
        self._vacuum.count_claims(count)
        self._wakeups.claim_returned(is_full=count >= claim.limit, next_due=next_due)
