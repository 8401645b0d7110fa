"""Tasks in a Redis or Valkey server that a fleet shares.

Each verb is one script in `lua/`, which runs in one round trip and as one atomic step. What an
outcome changes is planned here by the rules of `row_rules` (see `record`), and the script applies it
if the task is still where it was. Only the claim and the gates have their rules in a script.
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
from omniq.storage.redis.connection import OutOfMemory, ServerConnection
from omniq.storage.redis.encoding import StoredRow, instant_of, stamp
from omniq.storage.redis.record import DONE, Change, ChangePlanner, KnownRows, Recording, RecordPlan
from omniq.storage.redis.scripts import Scripts, raw
from omniq.storage.redis.side_data import RedisSideData
from omniq.storage.redis.wakeups import Wakeups
from omniq.storage.row_rules import FinishedRow, Row
from omniq.storage.types import Capabilities, Claim, Durability, Entry, GivenBack, Renewal

_PREFIX = re.compile(r"[^{}\s]{1,100}")
_SHORT_TTL = 60_000_000
"""Microseconds of `result_ttl` below which a repeated enqueue may find no record of the first."""

_NOTIFIED_PAUSE, _POLLING_PAUSE = 1.0, 0.1
"""Seconds between two polls for a result, at most: with and without notifications."""


class RedisStorage(RedisSideData):
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
        # Completed when the reason to sleep may have changed: see `_sleep`.
        self._sleeper: asyncio.Future[None] | None = None
        # Whether a notification of work has arrived since the last claim began.
        self._was_notified = False

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
        """The server's settings for `omniq doctor`, each as `(name, value, verdict)`."""
        self._check_open()
        return server_check.report(await server_check.read_facts(self._scripts.command))

    # Opening and closing

    async def _open(self) -> None:
        self._pid = os.getpid()
        self._known = KnownRows()
        self._connection = ServerConnection(self._url, name=f"omniq-{os.getpid()}")
        self._scripts = Scripts(self._connection, self._prefix, self._given_now)
        # With a limit, one at a time: the first call gets the room that is left.
        self._enqueues = EnqueueBatcher(
            self._insert, concurrent_writes=2 if self._max_pending is None else 1
        )
        self._channel = self._scripts.key(f"wake:{self._clock.new_id()}")
        channels = [self._channel, self._scripts.key("awaited")]
        self._wakeups = Wakeups(self._connection, channels, self._on_message)
        try:
            # Sent once: a server that cannot be reached is reported without retries.
            await self._connection.command("PING")
            facts = await server_check.read_facts(self._scripts.command)
            server_check.check(facts)
        except BaseException:
            await self._connection.close()
            raise
        self._durability = facts.durability

    async def _close(self) -> None:
        try:
            await self._wakeups.close()
        finally:
            await self._connection.close()

    async def close(self) -> None:
        if self._is_open and self._pid != os.getpid():
            # After a fork, the connection and the claims belong to the parent. They are left alone.
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
                "after a fork; open a separate storage in each process"
            )

    # Time

    def _given_now(self) -> int:
        """The time that scripts use: 0 for the server's, or that of a clock given by a test."""
        return 0 if self._clock is SYSTEM_CLOCK else self._clock.micros()

    def _now(self) -> int:
        """The time of the store's clock, as far as it is known here."""
        return self._clock.micros() + self._clock_offset

    def _set_server_now(self, micros: bytes) -> None:
        if self._clock is SYSTEM_CLOCK:
            self._clock_offset = int(micros) - self._clock.micros()

    def _planner(self) -> ChangePlanner:
        return ChangePlanner(self._now(), self._encode_finish)

    # Enqueue

    async def _enqueue(self, rows: list[Row]) -> list[str]:
        if any(row.result_ttl < _SHORT_TTL for row in rows):
            return await self._insert(rows, has_short_ttl=True)
        self._check_open()
        return await self._enqueues.add(rows)

    async def _insert(self, rows: list[Row], *, has_short_ttl: bool = False) -> list[str]:
        nonce = raw(rows[0].nonce.encode("utf-8", "surrogatepass"))
        fresh = [encoding.new_row(row) for row in rows]
        try:
            if len(rows) == 1 and not has_short_ttl and self._max_pending is None:
                (row,) = rows
                is_plain = not (row.visible or row.unique or row.gates or row.expires is not None)
                if is_plain and await self._run("enqueue_one", *fresh[0][:6]) == 1:
                    return [row.id]
            answer, *ids = await self._run(
                "enqueue", nonce, self._max_pending or 0, fresh, int(has_short_ttl)
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
        wanted = None if claim is None else self._claim_arguments(claim)
        claimed: dict[str, StoredRow] = {}
        while True:
            if unread := recording.unread:
                recording.add_read(await self._read(unread))
            plan = recording.plan(self._planner())
            codes, is_partial = "", False
            if wanted is not None or not plan.is_empty:
                codes, taken, is_partial = await self._run_record_and_claim(owner, plan, wanted)
                claimed.update((stored.row.id, stored) for stored in taken)
            recording.apply_codes(codes)
            if recording.is_done and not is_partial:
                break
            if is_partial and wanted is not None and claim is not None:
                # The call moved or expired as many tasks as it may; claim the rest of the limit.
                wanted = (claim.limit - len(claimed), *wanted[1:4], 0, *wanted[5:])
        self._known.add(owner, [*recording.still_held(), *claimed.values()])
        return recording.answers, [stored.row for stored in claimed.values()]

    def _claim_arguments(self, claim: Claim) -> tuple[Any, ...]:
        """What to claim, as `claim` in `lua/lib/claim.lua` takes it."""
        self._claims_made += 1
        self._was_notified = False
        interest = "*" if claim.queues is None else f"/{'/'.join(claim.queues)}/"
        return (
            claim.limit,
            "" if claim.now is None else stamp(claim.now),
            0 if claim.queues is None else claim.queues,
            claim.claim_id or str(self._claims_made),
            int(bool(claim.claim_id)),
            self._channel if self._wakeups.is_open else "",
            interest,
        )

    async def _run_record_and_claim(
        self, owner: str, plan: RecordPlan, wanted: tuple[Any, ...] | None
    ) -> tuple[str, list[StoredRow], bool]:
        reply = await self._run(
            "record_and_claim", owner, plan.groups, plan.changes, 0 if wanted is None else wanted
        )
        if reply == b"lost":
            raise LeaseLost(owner)
        now, codes, taken, expired, is_partial, event = reply
        self._set_server_now(now)
        if wanted is not None:
            self._next_event = event.decode()
            # A wait that began before this reply does not know of the next event.
            self._wake_sleeper()
        claimed = [
            encoding.stored_row(taken[n + 1].decode(), taken[n], taken[n + 2], taken[n + 3])
            for n in range(0, len(taken), 4)
        ]
        if expired and not await self._expire([task_id.decode() for task_id in expired]):
            return codes.decode(), claimed, False
        return codes.decode(), claimed, is_partial == 1

    async def _expire(self, ids: list[str]) -> bool:
        """End tasks that a claim found past their `expires`; returns whether that succeeded."""
        try:
            found = await self._read(ids)
            planner = self._planner()
            await self._apply_changes(
                [
                    planner.end(
                        stored, row_rules.finish_cancelled(stored.row, planner.now, "expired")
                    )
                    for stored in found.values()
                    if stored and stored.finished is None and stored.row.owner is None
                ]
            )
        except StorageError:
            # The next claim finds them again. The tasks that this one has claimed must not be lost.
            return False
        self._local_wakeups.notify_results(ids)
        return True

    async def _apply_changes(self, changes: list[Change]) -> str:
        if not changes:
            return ""
        codes: bytes = await self._run("apply_changes", changes)
        return codes.decode()

    async def _read(self, ids: Sequence[str]) -> dict[str, StoredRow | None]:
        """The stored tasks of these ids."""
        now, *reply = await self._run("read_tasks", list(ids))
        self._set_server_now(now)
        found: dict[str, StoredRow | None] = {}
        for number, task_id in enumerate(ids):
            place, record, state = reply[3 * number : 3 * number + 3]
            if place:
                found[task_id] = encoding.stored_row(task_id, place, record, state)
            elif state:
                _, row = encoding.decode_dead(state, record)
                finished = FinishedRow(row=row, finished_at=0, expires_at=0, result=b"")
                found[task_id] = StoredRow(row, "dead", finished)
            else:
                found[task_id] = None
        return found

    async def _find(self, task_id: str) -> Row | FinishedRow | None:
        stored = (await self._read([task_id]))[task_id]
        if stored is None or stored.place == "dead":
            return None
        return stored.finished or stored.row

    # Leases

    async def _renew(self, info: WorkerInfo, lease: int) -> Renewal:
        is_first = self._identity.lease_until == 0
        reply = await self._run("renew", info.id, lease, raw(encode_internal(info)), int(is_first))
        if reply == b"lost":
            raise LeaseLost(info.id)
        paused, *held_places = reply
        held, cancelled = queries.parse_held(held_places)
        return Renewal(held, cancelled, bool(paused))

    async def _retire(self, owner: str) -> None:
        now, *reply = await self._run("retire", owner, self._channel)
        self._set_server_now(now)
        planner = self._planner()
        changes: list[Change] = []
        for stored in encoding.stored_rows(reply):
            row, token = stored.row, stored.row.token
            outcome = (
                Rescheduled(row.id, token, from_micros(planner.now))
                if row.status is TaskStatus.RETRYING
                else Released(row.id, token)
            )
            settled = row_rules.settle(row, outcome, planner.now)
            changes.append(planner.outcome(stored, settled, None)[0])
        await self._apply_changes(changes)

    async def _give_back(self, max_crashes: int) -> list[GivenBack]:
        now, *reply = await self._run("give_back_abandoned")
        self._set_server_now(now)
        planner = self._planner()
        changes: list[Change] = []
        given_back: list[GivenBack] = []
        for owner, rows in zip(reply[::2], reply[1::2], strict=True):
            held = {stored.row.id: stored for stored in encoding.stored_rows(rows)}
            lost = row_rules.give_back(
                [stored.row for stored in held.values()], planner.now, max_crashes
            )
            for row, settled in lost:
                changes.append(planner.outcome(held[row.id], settled, None)[0])
                given_back.append(GivenBack(row.id, row.func_path, owner.decode(), row.status))
        codes = await self._apply_changes(changes)
        return [back for back, code in zip(given_back, codes, strict=True) if code == DONE]

    # Cancel

    async def _cancel(self, task_id: str, reason: str) -> bool:
        while True:
            stored = (await self._read([task_id]))[task_id]
            if stored is None or stored.finished is not None:
                return False
            planner = self._planner()
            if stored.row.owner is not None:
                change = planner.cancel_request(stored)
            else:
                finish = row_rules.finish_cancelled(stored.row, planner.now, reason)
                change = planner.end(stored, finish)
            if await self._apply_changes([change]) == DONE:
                return True

    # Waiting

    def _on_message(self, channel: str, text: str) -> None:
        if channel != self._scripts.key("awaited"):
            self._was_notified = True
            self._wake_sleeper()
            self._local_wakeups.notify_work()
        else:
            self._local_wakeups.notify_results(text.split(" "))

    async def _wait_for_work(self, timeout: float) -> None:
        if timeout > 0 and await self._wakeups.open():
            # No notification was sent before the subscription; the caller's next claim finds the work.
            self._was_notified = False
            return
        deadline = self._clock.monotonic() + timeout
        with self._local_wakeups.listen_for_work() as notified:
            # The caller has just started a claim, which is to run before this.
            await self._clock.sleep(0)
            while not (self._was_notified or notified.done()):
                pause = min(deadline - self._clock.monotonic(), self._until_next_event())
                if pause <= 0:
                    # Used once: the claim that follows says what comes next.
                    self._next_event = ""
                    break
                await self._sleep(notified, pause)
        self._was_notified = False

    def _until_next_event(self) -> float:
        """Seconds until a task may become claimable by time alone, as of the last claim."""
        if not self._next_event:
            return math.inf
        return (instant_of(self._next_event) - self._now()) / 1_000_000

    async def _sleep(self, notified: asyncio.Future[None], seconds: float) -> None:
        """Sleep until the notification, or until a claim has changed the next event."""
        self._sleeper = sleeper = asyncio.get_running_loop().create_future()
        notified.add_done_callback(lambda _: finish(sleeper))
        try:
            await self._clock.wait(sleeper, seconds)
        finally:
            self._sleeper = None

    def _wake_sleeper(self) -> None:
        if self._sleeper is not None:
            finish(self._sleeper)

    async def wait_for_result(
        self, task_id: str, timeout: float | None = None
    ) -> TaskResult | None:
        if timeout is None or timeout > 0:
            result = await self.get_result(task_id)
            if result is not None and result.status.is_final:
                return result
            await self._wakeups.open()
            await self._run("await_result", task_id)
            self._longest_pause = _NOTIFIED_PAUSE if self._wakeups.is_open else _POLLING_PAUSE
        return await super().wait_for_result(task_id, timeout)
