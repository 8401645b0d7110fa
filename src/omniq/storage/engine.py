"""The engine: every rule about tasks, applied once, over any backend.

Each verb is one atomic step: it reads rows and documents in a section of the backend, applies the rules
of `row_rules` and `gate_rules`, and writes the changes. When the backend says that what was read has
changed meanwhile (`Moved`), the step begins again. This module has the steps of
tasks that wait and run; `lease_engine`, `recovery_engine`, `dead_letter_engine` and the others have the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from omniq.clock import Clock
from omniq.errors import StaleClaim, TaskNotFound, TaskNotWaiting
from omniq.failpoints import hit
from omniq.gate_rules import Special
from omniq.models import Runnable, TaskStatus
from omniq.outcomes import Outcome, Released
from omniq.serialization import Serializer
from omniq.storage import row_rules
from omniq.storage.backend import (
    Backend,
    Changes,
    CommitUnknown,
    DocumentChange,
    FastPath,
    Moved,
    PerhapsWritten,
    Section,
)
from omniq.storage.checkpoint_engine import CheckpointEngine
from omniq.storage.claim import Claimed, Claimer, wanted_by
from omniq.storage.conflicts import read_conflicts
from omniq.storage.dead_letter_engine import DeadLetterEngine
from omniq.storage.engine_base import NOWHERE, atomic
from omniq.storage.fairness import Places
from omniq.storage.flow_insertion import FlowInsertion, Under, check_batch, ids_to_read
from omniq.storage.incarnation import GivenTokens
from omniq.storage.insertion import insertion, read_unique_keys
from omniq.storage.inspection import TaskQuery
from omniq.storage.known_rows import KnownRows
from omniq.storage.lease_engine import LeaseEngine
from omniq.storage.operator_engine import OperatorEngine
from omniq.storage.pending_hooks import pending_hook
from omniq.storage.row_rules import FORMAT, Finish, Row
from omniq.storage.schedule_engine import ScheduleEngine
from omniq.storage.step import EncodeFinish, Step
from omniq.storage.types import Claim, Identity


class Engine(LeaseEngine, CheckpointEngine, DeadLetterEngine, OperatorEngine, ScheduleEngine):
    """The verbs of the storage contract over one backend."""

    def __init__(
        self,
        backend: Backend,
        serializer: Serializer,
        encode_finish: EncodeFinish,
        max_pending: int | None,
        identity: Identity,
        clock: Clock,
    ) -> None:
        super().__init__(backend, serializer, max_pending, identity, clock)
        self._given = GivenTokens()
        self._newer_functions: set[str] = set()
        self._encode_finish = encode_finish
        self._known = KnownRows()

    # Enqueue

    async def enqueue(
        self, rows: Sequence[Row], *, within: object = NOWHERE, under: Under | None = None
    ) -> list[str]:
        """Insert the rows, or raise `DuplicateTask` or `QueueFull`; returns an id for each row.

        The first try reads nothing: most ids and unique keys are free. With `within`, they are inserted in
        the transaction that the caller has open on that connection; with `under`, only while that claim is
        current.
        """
        if under is not None or [row for row in rows if row.workflow is not None]:
            return await self._enqueue_flow(rows, within, under)
        with suppress(Moved):
            changes, ids = self.free_insertion(rows)
            if within is NOWHERE:
                await self.backend.write(changes)
            else:
                await self.backend.transact_within(within, lambda section: section.write(changes))
            return ids
        return await self._transact(
            lambda section: self._insert(section, rows, within=within), within=within
        )

    def free_insertion(self, rows: Sequence[Row]) -> tuple[Changes, list[str]]:
        """What to insert if no id and no unique key is taken, and the id that each enqueue returns.

        `Moved` if a row is left out for its unique key: its id may be taken, which has to be read.
        """
        if not [row for row in rows if row.unique or row.fair]:
            return Changes(inserted=rows, bound=self._max_pending), [row.id for row in rows]
        if self._seals is not None and self._seals.hides_unique_keys:
            # A task that an older omniq has enqueued may hold a key under another name, which has to be read.
            raise Moved
        if [row for row in rows if row.fair]:
            # Its place in line depends on the others.
            raise Moved
        changes, ids = insertion(rows, self._max_pending)
        if len(changes.inserted) < len(rows):
            raise Moved
        return changes, ids

    async def _insert(
        self,
        section: Section,
        rows: Sequence[Row],
        under: Under | None = None,
        within: object = NOWHERE,
    ) -> list[str]:
        # When the step is begun again, the rows are as they were.
        given = [row_rules.copy_of(row) for row in rows]
        known = await section.load(ids_to_read(given, under))
        keys = await read_unique_keys(section, given, self._seals)
        conflicts = await read_conflicts(
            section, given, keys.holders, self._serializer, self._seals
        )
        changes, ids = insertion(given, self._max_pending, known, keys, conflicts)
        if given[0].workflow is not None and ids[0] != given[0].id:
            # Another flow holds the unique key of the first row, which all others belong to.
            return ids
        edited = conflicts.edited if conflicts is not None else {}
        if not changes.inserted and not edited:
            return ids
        if under is not None or [row for row in changes.inserted if row.workflow is not None]:
            is_within = within is not NOWHERE
            if conflicts is not None:
                known = {**known, **conflicts.held}
            flow = FlowInsertion(changes, known, section.now)
            flow.plan(under, in_transaction=is_within)
            await flow.join_sequences(section, in_transaction=is_within)
            hit("flow_insertion.before")
            await self._give_places(section, changes, within)
            await self._write_insertion(section, changes, edited)
            self.has_work = self.has_work or (flow.has_work and not is_within)
        else:
            await self._give_places(section, changes, within)
            await self._write_insertion(section, changes, edited)
        return ids

    async def _give_places(self, section: Section, changes: Changes, within: object) -> None:
        """Give places in line to the new rows that are due, unless a caller's transaction would lock others out."""
        rows = [row for row in changes.inserted if row.fair is not None]
        ready = [
            row for row in rows if row.visible <= section.now and not row_rules.is_waiting(row)
        ]
        if ready and within is NOWHERE:
            places = Places(section)
            await places.give(ready)
            changes.documents = [*changes.documents, *await places.changes()]

    async def _write_insertion(
        self, section: Section, changes: Changes, edited: Mapping[str, Row]
    ) -> None:
        """Write what an enqueue inserts, and the tasks that it has replaced or extended."""
        if not edited:
            await section.write(changes)
            return
        step = self._step(section)
        step.changes = changes
        if not changes.inserted:
            changes.bound = None
        for row in changes.updated:
            step.update(row)
        await step.gates.load(edited.values())
        for row in edited.values():
            step.restart(row)
        await step.commit()

    async def _enqueue_flow(
        self, rows: Sequence[Row], within: object, under: Under | None
    ) -> list[str]:
        """Insert rows that wait for others, or belong to them."""
        check_batch(rows)
        ids = await self._transact(
            lambda section: self._insert(section, rows, under, within), within=within
        )
        if within is NOWHERE:
            await self._finish_work()
        return ids

    # Record and claim

    async def record_and_claim(
        self, owner: str, outcomes: Sequence[Outcome], claim: Claim | None
    ) -> tuple[list[bool], Claimed]:
        """Record the outcomes, then claim; for each outcome whether it is recorded, and the rows."""
        if self.has_work:
            # One piece in each turn, so that the claimed tasks do not wait for all of them.
            await self.advance(in_turn=True)
        fast_path, met = self.backend.fast_path, self._identity.epoch
        if claim is not None:
            witness, runnable = self._given.witness(met), self._runnable(claim.runnable)
            claim = msgspec.structs.replace(claim, witness=witness, runnable=runnable)
        self._known.send(outcomes)
        try:
            if fast_path is None:
                recorded, claimed = await self._by_rules(owner, outcomes, claim)
            else:
                recorded, claimed = await self._by_fast_path(fast_path, owner, outcomes, claim)
        except BaseException:
            self._known.doubt(outcomes)
            raise
        # A late reply to an owner that was fenced meanwhile says nothing: its tasks may run again here.
        is_current = owner == self._identity.owner
        if claimed.went_back or (is_current and self._given.add(claimed.rows)):
            await self._begin_epoch(owner, met)
        if [row for row in claimed.rows if row.format > FORMAT]:
            await self._leave_newer(owner, claimed)
        self._known.update(owner, outcomes, claimed.rows)
        return recorded, claimed

    def _runnable(self, given: Runnable | None) -> Runnable | None:
        """Those of the given functions that have no records of a newer format."""
        if not self._newer_functions:
            return given
        given = given or Runnable(modules=None)
        excluded = given.excluded.union(self._newer_functions)
        return msgspec.structs.replace(given, excluded=excluded)

    async def _leave_newer(self, owner: str, claimed: Claimed) -> None:
        """Release rows of a newer format, and claim no more tasks of their functions.

        A newer omniq has written them, and its workers run them. A row above the store's own format is
        damaged: it loses its body, so that it becomes a dead letter.
        """
        newest = (await self.store_record()).format
        left = [row for row in claimed.rows if FORMAT < row.format <= newest]
        # A copy, because a store in memory has this very row.
        claimed.rows = [
            msgspec.structs.replace(row, body=b"") if row.format > newest else row
            for row in claimed.rows
            if not FORMAT < row.format <= newest
        ]
        if left:
            self._newer_functions.update(row.func_path for row in left)
            released = [Released(row.id, row.token) for row in left]
            await self._by_rules(owner, released, None)

    async def count_newer(self, limit: int) -> int:
        """The number of waiting tasks of a newer format, among the first `limit`."""
        query = TaskQuery(status=TaskStatus.PENDING, limit=limit)
        return sum(row.format > FORMAT for row in await self.page(query))

    async def _by_fast_path(
        self, fast_path: FastPath, owner: str, outcomes: Sequence[Outcome], claim: Claim | None
    ) -> tuple[list[bool], Claimed]:
        changes = self._known.plan(
            owner, outcomes, fast_path.now(), self._encode_finish, self.backend.gate_kinds
        )
        if changes is None:
            # All of them by the rules: a second transaction would cost more than it saves.
            return await self._by_rules(owner, outcomes, claim)
        recorded, claimed = [True] * len(outcomes), Claimed()
        if claim is None and changes.is_empty:
            return recorded, claimed
        reply = await fast_path.record_and_claim(owner, changes, claim)
        if reply.is_behind and claim is not None and claim.witness is not None:
            record = await self.record(claim.witness.id)
            if record is not None and self._is_behind(record.row):
                return recorded, Claimed(went_back=True)
            # It was enqueued again: it would send every claim this way.
            self._given.forget_newest()
        claimed.rows, rest = reply.rows or [], None
        if claim is not None and (reply.rows is None or reply.is_partial):
            rest = msgspec.structs.replace(claim, limit=claim.limit - len(claimed.rows))
        if reply.is_repeated:
            self._known.doubt(outcomes)
        if reply.missed or rest is not None:
            missed = [
                number for number, outcome in enumerate(outcomes) if outcome.task_id in reply.missed
            ]
            answers, by_rules = await self._by_rules(
                owner, [outcomes[number] for number in missed], rest, within=outcomes
            )
            for number, answer in zip(missed, answers, strict=True):
                recorded[number] = answer
            # A caller that repeats a call gets the rows that it claimed already.
            by_rules.rows = claimed.rows + by_rules.rows
            claimed = by_rules
        return recorded, claimed

    async def _by_rules(
        self,
        owner: str,
        outcomes: Sequence[Outcome],
        claim: Claim | None,
        within: Sequence[Outcome] | None = None,
    ) -> tuple[list[bool], Claimed]:
        """Record and claim in a section. The outcomes are `within` those of the call."""
        known = self._known.claimed(owner, outcomes)
        within = outcomes if within is None else within

        async def record_and_claim(section: Section) -> tuple[list[bool], Claimed]:
            nonlocal known
            # When the step is begun again, the rows may have changed.
            rows, known = known, []
            try:
                return await self._record_and_claim(section, owner, outcomes, claim, rows, within)
            except PerhapsWritten:
                self._known.doubt(within)
                raise

        claims_as = None if claim is None else owner
        recorded, claimed = await self._transact(record_and_claim, claims_as=claims_as)
        if claimed.is_missing:
            # While its lease is valid, nothing is taken from an owner.
            lease = await self._lease_of(owner)
            if lease is not None and lease.is_live:
                claimed.went_back = True
                return recorded, claimed
            self._known.doubt(within)
            recorded, claimed = await self._transact(record_and_claim, claims_as=claims_as)
        while claim is not None and claimed.is_partial and len(claimed.rows) < claim.limit:
            rest = msgspec.structs.replace(claim, limit=claim.limit - len(claimed.rows))
            _, more = await self._transact(
                lambda section, rest=rest: self._record_and_claim(section, owner, (), rest, (), ()),  # type: ignore[misc]
                claims_as=owner,
            )
            claimed = Claimed(
                rows=claimed.rows + more.rows,
                expired=claimed.expired + more.expired,
                is_partial=more.is_partial,
                has_released=claimed.has_released or more.has_released,
                went_back=more.went_back,
            )
        return recorded, claimed

    async def _record_and_claim(
        self,
        section: Section,
        owner: str,
        outcomes: Sequence[Outcome],
        claim: Claim | None,
        known: Sequence[Row],
        within: Sequence[Outcome],
    ) -> tuple[list[bool], Claimed]:
        unchanged = await section.begin(owner, known, claim)
        step = self._step(section)
        if len(unchanged) == len(known):
            await step.add(list(map(row_rules.copy_of, known)))
        elif unchanged:
            await step.add([row_rules.copy_of(row) for row in known if row.id in unchanged])
        recorded = await step.record(owner, outcomes) if outcomes else []
        # Before the claim, which may take what these outcomes release.
        await step.apply_ends()
        claimed = Claimed()
        witness = None if claim is None or self.backend.fast_path is not None else claim.witness
        if witness is not None:
            token = await section.live_token(witness.id)
            if token is None:
                claimed.is_missing = self._known.is_certain(owner, witness.id, witness.token)
            elif token < witness.token:
                step.behind += [each.row for each in (await section.load([witness.id])).values()]
        claimed.went_back = any(map(self._is_behind, step.behind))
        claimed.is_missing = claimed.is_missing or any(
            self._known.is_certain(owner, each.task_id, each.token, within) for each in step.missing
        )
        if claimed.went_back or claimed.is_missing:
            return recorded, claimed
        if claim is not None:
            section.claim_id = claim.claim_id
            wanted = await wanted_by(step, owner, claim)
            claimed = await Claimer(step, owner, claim, wanted).claim()
        taken = await step.commit()
        claimed.has_released = step.has_released
        if step.has_ended:
            claimed.expired = step.ended_ids
        if taken:
            claimed.rows = [row for row in claimed.rows if row.id not in taken]
            # Another step claims the rows behind those that others took first.
            claimed.is_partial = True
        return recorded, claimed

    def _is_behind(self, row: Row) -> bool:
        """Whether this owner was given a higher token for the row: the store went back."""
        return self._given.is_above(row, self._identity.epoch)

    def _step(self, section: Section) -> Step:
        return Step(section, self._encode_finish, self._seals, self._pend_hook, self._note_work)

    def _note_work(self) -> None:
        self.has_work = True

    def _pend_hook(self, row: Row, finish: Finish, now: int) -> DocumentChange | None:
        if finish.hook is None:
            return None
        # An owner that calls it has it. Where none was named, no worker with the function decided this.
        if not finish.hook and not self._identity.may_have_hook(row.func_path):
            return None
        return pending_hook(self._serializer, row, finish, now)

    # Transactions of tasks

    @asynccontextmanager
    async def transaction(
        self, owner: str, success: Callable[[], Outcome], *, seconds: float, blocking: bool
    ) -> AsyncIterator[Any]:
        """A transaction that ends by recording the outcome of `success()`, or raises `StaleClaim`."""
        outcomes: list[Outcome] = []

        async def record(section: Section) -> None:
            step = self._step(section)
            outcome = outcomes[0]
            await step.load([outcome.task_id])
            row = step.live(outcome.task_id)
            # A repeated outcome must not end a transaction.
            if row is None or not row_rules.is_current(row, outcome, owner):
                raise StaleClaim(outcome.task_id, outcome.token)
            await step.record(owner, outcomes)
            await step.commit()

        def finish() -> Callable[[Section], Awaitable[None]]:
            outcomes.append(success())
            self._known.doubt(outcomes)
            return record

        try:
            async with self.backend.transaction(
                finish, seconds=seconds, blocking=blocking
            ) as connection:
                yield connection
        except CommitUnknown:
            record_now = await self.record(outcomes[0].task_id)
            if record_now is None or not row_rules.was_recorded(record_now.row, outcomes[0]):
                raise
        self._known.update(owner, outcomes, ())

    # Breakers

    @atomic
    async def close_breaker(self, section: Section, name: str) -> bool:
        """Close a breaker, whatever its state; False if there is none with that name."""
        step = self._step(section)
        is_known = await step.gates.close_breaker(f"breaker:{name}")
        await step.commit()
        return is_known

    # Limits

    @atomic
    async def edit_limits(
        self, section: Section, edits: Mapping[str, Callable[[Special], None]]
    ) -> None:
        """Change what operators say of limits, by the keys of their gates."""
        step = self._step(section)
        for key, change in edits.items():
            await step.gates.edit(key, change)
        await step.commit()

    # Changes of a waiting task

    @atomic
    async def change(self, section: Section, task_id: str, edit: Callable[[Row, int], None]) -> Row:
        """Have `edit` change a waiting row, given the store's time, and store it; returns the row."""
        step = self._step(section)
        record = (await step.load([task_id], bodies=True)).get(task_id)
        if record is None:
            raise TaskNotFound(task_id)
        row = step.live(task_id)
        if row is None or row.owner is not None or not row_rules.is_changeable(row):
            raise TaskNotWaiting(task_id, record.newest_row.status)
        before = row_rules.copy_of(row)
        edit(row, step.now)
        if row.turn != before.turn:
            step.places.free(before)
        step.rewrite(row)
        await step.commit()
        return row
