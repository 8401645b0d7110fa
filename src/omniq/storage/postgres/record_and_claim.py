"""Record and claim: the fast path, one SQL function that does both in one round trip.

The engine has planned what each outcome makes of its task, from the row as it was claimed. The function
`record_outcomes_and_claim` (`sql/functions/4_record_and_claim.sql`) writes that if the row has not changed, and
claims plain tasks. What it cannot do is left to the engine.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from omniq.clock import Clock
from omniq.errors import LeaseLost
from omniq.storage.backend import Changes, FastReply
from omniq.storage.postgres import encoding
from omniq.storage.postgres.connection import ReplyLost
from omniq.storage.postgres.statements import Statements
from omniq.storage.postgres.vacuum import Vacuum
from omniq.storage.postgres.wakeups import Wakeups
from omniq.storage.row_rules import Row
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
    CALL_AGAIN = 7
    REST_NEEDS_RULES = 8


_NOTHING_ENDED: tuple[Any, ...] = (encoding.endings([], []), [], [], [], encoding.NOTHING_LEFT)
_CLAIMED = (
    f"SELECT {encoding.LIVE_COLUMNS} FROM {{schema}}.live "
    "WHERE place = 4 AND owner = $1 AND claim_id = $2 AND status = 1 ORDER BY rank, turn, seq"
)
_GATES = "SELECT gates FROM {schema}.live WHERE id = $1"


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
        ended, updated = changes.ended, changes.updated
        outcomes: tuple[Any, ...] = (
            encoding.endings(ended, [owner] * len(ended)),
            [encoding.task(row) for row in updated],
            [change.key for change in changes.documents],
            [(change.before or b"").decode() for change in changes.documents],
            encoding.leaving([*[each.row for each in ended], *updated]),
        )
        if claim is None:
            _, missed, is_repeated = await self._call(owner, *outcomes, None, is_repeat=False)
            return FastReply(frozenset(line["id"] for line in missed), is_repeated=is_repeated)
        return await self._record_and_claim(owner, outcomes, claim)

    async def _record_and_claim(
        self, owner: str, outcomes: tuple[Any, ...], claim: Claim
    ) -> FastReply:
        # A caller that names its claim may be repeating it.
        is_repeat = claim.claim_id != ""
        beat = self._identity.holder(owner).beat
        wanted = encoding.wanted_tasks(claim.queues, claim.runnable)
        self._wakeups.claim_started(wanted)
        rows: list[Row] = []
        while True:
            claim_id = claim.claim_id or self.new_claim_id()
            rest = msgspec.structs.replace(claim, limit=claim.limit - len(rows))
            request = encoding.claim(rest, wanted, name=claim_id, beat=beat)
            report, lines, is_repeated = await self._call(
                owner, *outcomes, request, is_repeat=is_repeat
            )
            state = report["seq"]
            outcomes = _NOTHING_ENDED
            match state:
                case _State.LEASE_LOST:
                    raise LeaseLost(owner)
                case _State.OUTCOMES_NOT_MATCHED:
                    missed = frozenset(line["id"] for line in lines)
                    return FastReply(missed, is_repeated=is_repeated)
                case _State.CLAIMED_BEFORE:
                    lines = await self._statements.fetch(_CLAIMED, owner, claim_id)
                    rows += [encoding.row_from(line) for line in lines]
                case _:
                    rows += await self._claimed(lines, owner, report["turn"])
            # The rest of a claim that the caller has named would be recognized as a repeat.
            if state != _State.MORE_DUE and (state != _State.CALL_AGAIN or is_repeat):
                break
        if state == _State.WITNESS_BEHIND:
            return FastReply(rows=rows, is_partial=True, is_behind=True)
        if state in (_State.CLAIM_NEEDS_RULES, _State.REST_NEEDS_RULES, _State.CALL_AGAIN):
            self._vacuum.count_claims(len(rows))
            return FastReply(rows=rows, is_partial=True)
        self.claim_ended(claim, len(rows), report["due"])
        return FastReply(rows=rows)

    async def _claimed(self, lines: list[Any], owner: str, now: int) -> list[Row]:
        rows = encoding.claimed_rows(lines, owner, now)
        for row in rows:
            if not row.body:
                # Damaged, perhaps, so that its limits are not known: it must leave those that it has entered.
                for (gates,) in await self._statements.fetch(_GATES, row.id):
                    row.gates = row.gates or encoding.gates_in(gates)
        return rows

    async def _call(
        self, owner: str, *parameters: Any, is_repeat: bool
    ) -> tuple[Any, list[Any], bool]:
        """The first line of the reply, the others, and whether the reply to a first try was lost."""
        parameters = (owner, given_time(self._clock), *parameters)
        call, sent_at = self._statements.call_once, self._clock.boot_micros()
        try:
            report, *lines = await call("record_outcomes_and_claim", *parameters, is_repeat)
            is_repeated = False
        except ReplyLost:
            # The token shows whether an outcome was recorded, the claim's name what was claimed.
            sent_at = self._clock.boot_micros()
            report, *lines = await call("record_outcomes_and_claim", *parameters, True)
            is_repeated = True
        observe(self._clock, report["turn"], sent_at=sent_at)
        return report, lines, is_repeated

    def claim_ended(self, claim: Claim, count: int, next_due: int | None) -> None:
        """Note that a claim got that many tasks, also one by the rules."""
        self._vacuum.count_claims(count)
        self._wakeups.claim_returned(is_full=count >= claim.limit, next_due=next_due)
