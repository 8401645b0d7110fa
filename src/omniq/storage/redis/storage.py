"""Tasks in a Redis or Valkey server that a fleet shares.

Each verb is one script (`storage/lua`), run in one round trip and in one step. What an outcome does
to a task is worked out here by the rules of `_rows` and made there on the condition that the task
is still where it was (`_redis.changes`); only the claim and the gates have their rules in a script.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from omniq._futures import finish
from omniq.clock import SYSTEM_CLOCK, Clock, from_micros
from omniq.errors import DuplicateTask, LeaseLost, QueueFull, SettingsError, StorageError
from omniq.models import (
    TaskResult,
    TaskStatus,
    WorkerInfo,
)
from omniq.outcomes import Released, Rescheduled
from omniq.serialization import Serializer, encode_internal
from omniq.settings import Settings
from omniq.storage import row_rules
from omniq.storage.enqueue_batcher import EnqueueBatcher
from omniq.storage.redis import encoding, queries, server_check
from omniq.storage.redis.connection import Link, OutOfMemory
from omniq.storage.redis.encoding import Kept, instant_of, stamp
from omniq.storage.redis.record import DONE, Change, Changes, KnownRows, Plan, Recording
from omniq.storage.redis.scripts import Scripts, raw
from omniq.storage.redis.side_data import RedisKeeping
from omniq.storage.redis.wakeups import Ear
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.types import Capabilities, Claim, Durability, Entry, GivenBack, Renewal

_PREFIX = re.compile(r"[^{}\s]{1,100}")
_BRIEF = 60_000_000
"""Microseconds of `result_ttl` below which a repeated enqueue may find no trace of the first."""

_PUSHED_PAUSE, _UNPUSHED_PAUSE = 1.0, 0.1
"""Seconds between two looks for a result, at most."""


class RedisStorage(RedisKeeping):
    """A store in the server at `url`; all its keys begin with `{prefix}`."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "omniq",
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        settings: Settings | None = None,
        max_pending: int | None = None,
    ) -> None:
        super().__init__(
            serializer=serializer, clock=clock, settings=settings, max_pending=max_pending
        )
        if not _PREFIX.fullmatch(prefix):
            raise SettingsError(
                f"prefix {prefix!r}: expected 1 to 100 characters, no space or brace"
            )
        self._url = url
        self._prefix = prefix
        self._pid = 0
        self._durability: Durability = "none"
        self._known = KnownRows()
        self._clock_offset = 0
        self._claims_made = 0
        self._next_event = ""
        self._nudge: asyncio.Future[None] | None = None
        self._has_hint = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="redis", durability=self._durability, reach="fleet")

    def sibling(self) -> RedisStorage:
        sibling = RedisStorage(
            self._url,
            prefix=self._prefix,
            serializer=self._serializer,
            clock=self._clock,
            settings=self._settings,
            max_pending=self._max_pending,
        )
        sibling._identity = self._identity
        sibling._local_wakeups = self._local_wakeups
        sibling._is_sibling = True
        return sibling

    async def server_report(self) -> list[tuple[str, str, str]]:
        """What the server's settings promise: `(name, value, verdict)` each, for `omniq doctor`."""
        self._check_open()
        return server_check.report(await server_check.read_facts(self._scripts.command))

    # Opening and closing

    async def _open(self) -> None:
        self._pid = os.getpid()
        self._known = KnownRows()
        self._link = Link(self._url, name=f"omniq-{os.getpid()}")
        self._scripts = Scripts(self._link, self._prefix, self._asked_now)
        # One after the other where it matters who comes first: there may be room for few.
        self._enqueues = EnqueueBatcher(
            self._insert, concurrent_writes=2 if self._max_pending is None else 1
        )
        self._channel = self._scripts.key(f"wake:{self._clock.new_id()}")
        channels = [self._channel, self._scripts.key("awaited")]
        self._ear = Ear(self._link, channels, self._on_message)
        try:
            # Sent once: a server that is not there should be told of at once.
            await self._link.command("PING")
            facts = await server_check.read_facts(self._scripts.command)
            server_check.check(facts)
        except BaseException:
            await self._link.close()
            raise
        self._durability = facts.durability

    async def _close(self) -> None:
        try:
            await self._ear.close()
        finally:
            await self._link.close()

    async def close(self) -> None:
        if self._is_open and self._pid != os.getpid():
            # After a fork everything here is the parent's. It is left alone, and so is what it holds.
            self._is_open = False
            self._held.clear()
            self._claim_ids.clear()
            return
        await super().close()

    def _check_open(self) -> None:
        super()._check_open()
        if self._pid != os.getpid():
            raise StorageError(
                f"Redis storage: opened by process {self._pid}, and used in process {os.getpid()} "
                "after a fork; open a storage of its own in each process"
            )

    # Time

    def _asked_now(self) -> int:
        """The time for scripts to go by: the server's own, or that of a clock given by a test."""
        return 0 if self._clock is SYSTEM_CLOCK else self._clock.micros()

    def _now(self) -> int:
        """The time by the store's clock, as far as it is known here."""
        return self._clock.micros() + self._clock_offset

    def _learn_now(self, told: bytes) -> None:
        if self._clock is SYSTEM_CLOCK:
            self._clock_offset = int(told) - self._clock.micros()

    def _changes(self) -> Changes:
        return Changes(self._now(), self._encode_finish)

    # Enqueue

    async def _enqueue(self, rows: list[Row]) -> list[str]:
        if any(row.result_ttl < _BRIEF for row in rows):
            return await self._insert(rows, is_brief=True)
        self._check_open()
        return await self._enqueues.add(rows)

    async def _insert(self, rows: list[Row], *, is_brief: bool = False) -> list[str]:
        nonce = raw(rows[0].nonce.encode("utf-8", "surrogatepass"))
        fresh = [encoding.new_row(row) for row in rows]
        try:
            if len(rows) == 1 and not is_brief and self._max_pending is None:
                (row,) = rows
                is_plain = not (row.visible or row.unique or row.gates or row.expires is not None)
                if is_plain and await self._run("enqueue_one", *fresh[0][:6]) == 1:
                    return [row.id]
            answer, *ids = await self._run(
                "enqueue", nonce, self._max_pending or 0, fresh, int(is_brief)
            )
        except OutOfMemory as error:
            raise QueueFull(await self.count_waiting()) from error
        if answer == b"taken":
            raise DuplicateTask(ids[0].decode())
        if answer == b"full":
            raise self._full()
        return [task_id.decode() for task_id in ids]

    # Record and claim

    async def _record_and_claim(
        self, owner: str, entries: list[Entry], claim: Claim | None
    ) -> tuple[list[bool], list[Row]]:
        recording = Recording(owner, entries, self._known.take(owner, entries))
        wish = None if claim is None else self._wish(claim)
        claimed: dict[str, Kept] = {}
        while True:
            if unread := recording.unread:
                recording.learn(await self._read(unread))
            plan = recording.plan(self._changes())
            codes, is_partial = "", False
            if wish is not None or not plan.is_empty:
                codes, taken, is_partial = await self._take_turn(owner, plan, wish)
                claimed.update((kept.row.id, kept) for kept in taken)
            recording.take(codes)
            if recording.is_done and not is_partial:
                break
            if is_partial and wish is not None and claim is not None:
                # What was moved or has expired made way; the rest of the limit is still wanted.
                wish = (claim.limit - len(claimed), *wish[1:4], 0, *wish[5:])
        self._known.add(owner, [*recording.still_held(), *claimed.values()])
        return recording.answers, [kept.row for kept in claimed.values()]

    def _wish(self, claim: Claim) -> tuple[Any, ...]:
        """What to claim, as `lua/claiming.lua` takes it."""
        self._claims_made += 1
        self._has_hint = False
        interest = "*" if claim.queues is None else f"/{'/'.join(claim.queues)}/"
        return (
            claim.limit,
            "" if claim.now is None else stamp(claim.now),
            0 if claim.queues is None else claim.queues,
            claim.claim_id or str(self._claims_made),
            int(bool(claim.claim_id)),
            self._channel if self._ear.is_open else "",
            interest,
        )

    async def _take_turn(
        self, owner: str, plan: Plan, wish: tuple[Any, ...] | None
    ) -> tuple[str, list[Kept], bool]:
        reply = await self._run(
            "turn", owner, plan.groups, plan.changes, 0 if wish is None else wish
        )
        if reply == b"lost":
            raise LeaseLost(owner)
        now, codes, taken, expired, is_partial, event = reply
        self._learn_now(now)
        if wish is not None:
            self._next_event = event.decode()
            if self._nudge is not None:
                # Whoever waits began to wait before this was known.
                finish(self._nudge)
        kept = [
            encoding.kept_of(taken[n + 1].decode(), taken[n], taken[n + 2], taken[n + 3])
            for n in range(0, len(taken), 4)
        ]
        if expired and not await self._expire([task_id.decode() for task_id in expired]):
            return codes.decode(), kept, False
        return codes.decode(), kept, is_partial == 1

    async def _expire(self, ids: list[str]) -> bool:
        """End tasks that a claim found past their `expires`; whether that could be done."""
        try:
            found = await self._read(ids)
            changes = self._changes()
            await self._settle(
                [
                    changes.of_end(
                        kept, row_rules.finish_cancelled(kept.row, changes.now, "expired")
                    )
                    for kept in found.values()
                    if kept and kept.finished is None and kept.row.owner is None
                ]
            )
        except StorageError:
            # The next claim finds them again. What this one has taken must not be lost for that.
            return False
        self._local_wakeups.notify_results(ids)
        return True

    async def _settle(self, changes: list[Change]) -> str:
        if not changes:
            return ""
        codes: bytes = await self._run("settle", changes)
        return codes.decode()

    async def _read(self, ids: Sequence[str]) -> dict[str, Kept | None]:
        """What is on record of these tasks."""
        now, *reply = await self._run("read", list(ids))
        self._learn_now(now)
        found: dict[str, Kept | None] = {}
        for number, task_id in enumerate(ids):
            place, record, state = reply[3 * number : 3 * number + 3]
            if place:
                found[task_id] = encoding.kept_of(task_id, place, record, state)
            elif state:
                _, row = encoding.read_grave(state, record)
                finished = FinishedRow(row=row, finished_at=0, expires_at=0, result=b"")
                found[task_id] = Kept(row, "dead", finished)
            else:
                found[task_id] = None
        return found

    async def _find(self, task_id: str) -> Row | FinishedRow | None:
        kept = (await self._read([task_id]))[task_id]
        if kept is None or kept.place == "dead":
            return None
        return kept.finished or kept.row

    # Leases

    async def _renew(self, info: WorkerInfo, lease: int) -> Renewal:
        is_first = self._identity.lease_until == 0
        reply = await self._run("renew", info.id, lease, raw(encode_internal(info)), int(is_first))
        if reply == b"lost":
            raise LeaseLost(info.id)
        paused, *holding = reply
        held, cancelled = queries.held_of(holding)
        return Renewal(held, cancelled, bool(paused))

    async def _retire(self, owner: str) -> None:
        now, *reply = await self._run("retire", owner, self._channel)
        self._learn_now(now)
        changes = self._changes()
        plan: list[Change] = []
        for kept in encoding.kept_rows(reply):
            row, token = kept.row, kept.row.token
            outcome = (
                Rescheduled(row.id, token, from_micros(changes.now))
                if row.status is TaskStatus.RETRYING
                else Released(row.id, token)
            )
            settled = row_rules.settle(row, outcome, changes.now)
            plan.append(changes.of_outcome(kept, settled, None)[0])
        await self._settle(plan)

    async def _give_back(self, max_crashes: int) -> list[GivenBack]:
        now, *reply = await self._run("abandoned")
        self._learn_now(now)
        changes = self._changes()
        plan: list[Change] = []
        given_back: list[GivenBack] = []
        for owner, rows in zip(reply[::2], reply[1::2], strict=True):
            kept = {each.row.id: each for each in encoding.kept_rows(rows)}
            lost = row_rules.give_back(
                [each.row for each in kept.values()], changes.now, max_crashes
            )
            for row, settled in lost:
                plan.append(changes.of_outcome(kept[row.id], settled, None)[0])
                given_back.append(GivenBack(row.id, row.func_path, owner.decode(), row.status))
        codes = await self._settle(plan)
        return [back for back, code in zip(given_back, codes, strict=True) if code == DONE]

    # Cancel

    async def _cancel(self, task_id: str, reason: str) -> bool:
        while True:
            kept = (await self._read([task_id]))[task_id]
            if kept is None or kept.finished is not None:
                return False
            changes = self._changes()
            if kept.row.owner is not None:
                change = changes.of_cancel_request(kept)
            else:
                finish = row_rules.finish_cancelled(kept.row, changes.now, reason)
                change = changes.of_end(kept, finish)
            if await self._settle([change]) == DONE:
                return True

    # Waiting

    def _on_message(self, channel: str, text: str) -> None:
        if channel != self._scripts.key("awaited"):
            self._has_hint = True
            if self._nudge is not None:
                finish(self._nudge)
            self._local_wakeups.notify_work()
        else:
            self._local_wakeups.notify_results(text.split(" "))

    async def _wait_for_work(self, timeout: float) -> None:
        if timeout > 0 and await self._ear.open():
            # What came before anybody listened was not told; the claim that follows finds it.
            self._has_hint = False
            return
        deadline = self._clock.monotonic() + timeout
        with self._local_wakeups.listen_for_work() as hint:
            # Whoever waits again has just asked for a claim, which should not have to wait for this.
            await self._clock.sleep(0)
            while not (self._has_hint or hint.done()):
                patience = min(deadline - self._clock.monotonic(), self._until_next_event())
                if patience <= 0:
                    # Told once: the claim that follows says what comes next.
                    self._next_event = ""
                    break
                await self._rest(hint, patience)
        self._has_hint = False

    def _until_next_event(self) -> float:
        """Seconds until something may become claimable by itself, as far as the last claim knew."""
        if not self._next_event:
            return math.inf
        return (instant_of(self._next_event) - self._now()) / 1_000_000

    async def _rest(self, hint: asyncio.Future[None], patience: float) -> None:
        """Until the hint, or until a claim has changed what there is to wait for."""
        self._nudge = nudge = asyncio.get_running_loop().create_future()
        hint.add_done_callback(lambda _: finish(nudge))
        try:
            await self._clock.wait(nudge, patience)
        finally:
            self._nudge = None

    async def wait_for_result(
        self, task_id: str, timeout: float | None = None
    ) -> TaskResult | None:
        if timeout is None or timeout > 0:
            result = await self.get_result(task_id)
            if result is not None and result.status.is_final:
                return result
            await self._ear.open()
            await self._run("await", task_id)
            self._longest_pause = _PUSHED_PAUSE if self._ear.is_open else _UNPUSHED_PAUSE
        return await super().wait_for_result(task_id, timeout)
