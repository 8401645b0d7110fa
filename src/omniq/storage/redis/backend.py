"""The Redis backend: sections, the fast path, pages, counts, leases and waiting."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, cast

import msgspec

from omniq.clock import Clock
from omniq.concurrency.futures import finish
from omniq.errors import LeaseLost, OmniqError, StorageCorrupt, StorageError
from omniq.models import Runnable, StoredLetter, TaskStatus, WorkerInfo
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage.backend import (
    POLLING_PAUSE,
    Backend,
    Changes,
    Counts,
    FastReply,
    FinishedQuery,
    Lease,
    Moved,
    Work,
)
from omniq.storage.inspection import DeadQuery, Scan, ScanQuery, TaskQuery, letter_matches
from omniq.storage.newest_by_id import scan_by_id
from omniq.storage.redis import encoding, server_check, upgrade
from omniq.storage.redis.connection import ServerConnection
from omniq.storage.redis.encoding import STATUS_LETTERS, STATUSES, instant_of, raw, stamp
from omniq.storage.redis.error_replies import DAMAGED_COUNTER
from omniq.storage.redis.scripts import Scripts
from omniq.storage.redis.section import (
    RedisSection,
    document_change,
    runnable_arguments,
)
from omniq.storage.redis.wakeups import Wakeups
from omniq.storage.row_rules import Row
from omniq.storage.store_clock import clock_of_store, observe
from omniq.storage.types import Capabilities, Claim, Durability, Holder, LeaseReply, Renewal
from omniq.storage.wakeups import LocalWakeups

_T = TypeVar("_T")

_PAGE_SIZE = 500
"""Records that one call reads, at most."""

_PLACES_PER_CALL = 1_000
"""Places that one call checks, at most."""

_NOTIFIED_PAUSE = 1.0
"""Seconds between two polls for a result of whose end the server notifies this storage, at most."""

_NOTHING, _SOME, _BY_RULES, _IS_BEHIND = range(4)
"""What is left to claim, as the script `record_and_claim` says."""

_decode_info = internal_decoder(WorkerInfo)


_Call = TypeVar("_Call", bound=Callable[..., Awaitable[Any]])


def _checks_replies(call: _Call) -> _Call:
    """Have the call raise `StorageError` for replies of a wrong shape, and close the connection.

    Whatever reads such a reply fails in its own way, here and in the engine. The replies that follow on the
    connection may belong to other calls.
    """

    @functools.wraps(call)
    async def checked(self: RedisBackend, *arguments: Any, **options: Any) -> Any:
        try:
            return await call(self, *arguments, **options)
        except (OmniqError, Moved):
            raise
        except Exception as error:
            self._connection.discard()
            raise StorageError(f"Redis: a reply of an unexpected shape: {error!r}") from error

    return cast("_Call", checked)


class RedisBackend(Backend):
    """A store in the server at `url`; all its keys begin with `{prefix}`."""

    gate_kinds = frozenset(("running", "rate"))

    def __init__(
        self,
        url: str,
        prefix: str,
        clock: Clock,
        local_wakeups: LocalWakeups,
        largest: int,
        reconnect_timeout: float | None = None,
    ) -> None:
        self._url = url
        self._largest = largest
        self._reconnect_timeout = reconnect_timeout
        self._prefix = prefix
        self._clock = clock
        self._local_wakeups = local_wakeups
        self.clock = self.store_clock = clock_of_store(clock)
        self._durability: Durability = "none"
        self._numbers = itertools.count(1)
        self._next_event = ""
        # Completed when the reason to sleep may have changed: see `_sleep`.
        self._sleeper: asyncio.Future[None] | None = None
        # Whether a notification of work has arrived since the last claim began.
        self._was_notified = False
        self.fast_path = self

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="redis", durability=self._durability, reach="fleet")

    def sibling(self) -> RedisBackend:
        return RedisBackend(
            self._url,
            self._prefix,
            self._clock,
            self._local_wakeups,
            self._largest,
            self._reconnect_timeout,
        )

    # Opening and closing

    @_checks_replies
    async def open(self) -> None:
        self._connection = ServerConnection(
            self._url, name=f"omniq-{os.getpid()}", hash_tag=self._prefix
        )
        self.scripts = Scripts(
            self._connection, self._prefix, self.clock, self._largest, self._reconnect_timeout
        )
        self.channel = self.scripts.key(f"wake:{self._clock.new_id()}")
        channels = [self.channel, self.scripts.key("awaited")]
        self.wakeups = Wakeups(self._connection, channels, self._on_message)
        try:
            # Sent once: a server that cannot be reached is reported without retries.
            await self._connection.command("PING")
            facts = await self.server_facts()
            server_check.check(facts)
            await upgrade.prepare(self.run, self.scripts, self._clock.new_id())
        except BaseException:
            await self._connection.close()
            raise
        self._connection.has_worked = True
        self._durability = facts.durability

    async def close(self) -> None:
        try:
            await self.wakeups.close()
        finally:
            await self._connection.close()

    @_checks_replies
    async def server_facts(self) -> server_check.ServerFacts:
        """The settings of the server."""
        return await server_check.read_facts(self.scripts.command)

    # Time

    def now(self) -> int:
        """The time of the server's clock, as far as it is known here, or of that of a test."""
        return self.clock.micros()

    # Sections

    async def run(self, name: str, *arguments: Any) -> Any:
        """Run a script. A reply that is a list begins with the server's time, unless it is a write's."""
        sent_at = self._clock.boot_micros()
        reply = await self.scripts.run(name, *arguments)
        if name in _TIMED and isinstance(reply, list):
            observe(self.clock, int(reply[0]), sent_at=sent_at)
        return reply

    def new_nonce(self) -> str:
        """A text that no other call has."""
        return f"{self.channel.rpartition(':')[2]}-{next(self._numbers)}"

    @_checks_replies
    async def transact(
        self, work: Work[_T], *, claims_as: str | None = None, writes: bool = True
    ) -> _T:
        return await work(RedisSection(self, self.now()))

    def claim_arguments(
        self, queues: Sequence[str] | None, runnable: Runnable | None
    ) -> tuple[Any, ...]:
        """What a claim asks for, and the channel on which it waits when it finds too little, and for what."""
        self._was_notified = False
        asked = (0 if queues is None else queues, runnable_arguments(runnable))
        interest: Any = "*"
        if queues is not None or runnable is not None:
            interest = raw(msgspec.msgpack.encode(asked))
        return (*asked, self.channel if self.wakeups.is_open else "", interest)

    # The fast paths

    async def enqueue_one(self, row: Row) -> bool:
        """Store a new task that is due and needs no other changes; False when its id is taken."""
        record, lane = raw(encoding.record_of(row)), f"0{row.queue}/{row.func_path}/"
        parts = (row.id, encoding.head_of(row), encoding.foot_of(row), record, lane)
        return bool(await self.scripts.run("enqueue_one", *parts))

    @_checks_replies
    async def record_and_claim(
        self, owner: str, changes: Changes, claim: Claim | None
    ) -> FastReply:
        """Record planned outcomes, and claim rows that are plain or only limited, in one script."""
        wanted: Any = 0 if claim is None else self._claim_request(claim)
        left, missed, rows = await self._record_and_claim(owner, changes, claim, wanted)
        found = {row.id: row for row in rows}
        while left == _SOME and claim is not None:
            # Without asking for rows of the same claim, which the call before has returned.
            wanted = (claim.limit - len(found), *wanted[1:-1], 0)
            left, _, rows = await self._record_and_claim(owner, Changes(), claim, wanted)
            found |= {row.id: row for row in rows}
        return FastReply(
            missed,
            list(found.values()),
            is_partial=left != _NOTHING,
            is_behind=left == _IS_BEHIND,
        )

    async def _record_and_claim(
        self, owner: str, changes: Changes, claim: Claim | None, wanted: Any
    ) -> tuple[int, frozenset[str], list[Row]]:
        """What is left to claim, the outcomes that were missed, and the claimed rows."""
        holder = self.identity.holder(owner)
        witness = None if claim is None else claim.witness
        reply = await self.run(
            "record_and_claim",
            owner,
            encoding.end_groups(changes.ended),
            [
                (row.id, str(row.token), encoding.place_of(row), raw(encoding.state_of(row)))
                for row in changes.updated
            ],
            [document_change(change) for change in changes.documents],
            wanted,
            holder.epoch,
            holder.beat,
            "" if witness is None else witness.id,
            0 if witness is None else witness.token,
            encoding.limits_of([*(each.row for each in changes.ended), *changes.updated]),
            holder.claims,
        )
        if reply == b"lost":
            raise LeaseLost(owner)
        _, missed, claimed, left, event, claims = reply
        if claims != b"":
            self.identity.count_claims(owner, int(claims))
        if left == _NOTHING and claim is not None:
            self.set_next_event(event)
        ids = frozenset(task_id.decode() for task_id in missed)
        return left, ids, encoding.read_rows(claimed)

    def _claim_request(self, claim: Claim) -> tuple[Any, ...]:
        queues, runnable, *waiting = self.claim_arguments(claim.queues, claim.runnable)
        return (
            claim.limit,
            "" if claim.now is None else stamp(claim.now),
            queues,
            runnable,
            claim.claim_id or f"#{next(self._numbers)}",
            *waiting,
            int(bool(claim.claim_id)),
        )

    # Pages

    @_checks_replies
    async def page(self, query: Any) -> Any:
        match query:
            case TaskQuery():
                return await self._list(query)
            case ScanQuery():
                return await self._scan(query)
            case DeadQuery():
                return await self._list_dead(query)
            case FinishedQuery():
                return await self._list_finished(query)

    async def _list(self, query: TaskQuery) -> list[Row]:
        rows: list[Row] = []
        after: str | None = query.after
        while len(rows) < query.limit and after is not None:
            part, after = await self._read_part(query, after, query.limit - len(rows))
            rows += part
        return rows

    async def _scan(self, query: ScanQuery) -> Scan:
        async def read_backwards(before: str, limit: int) -> tuple[list[Row], str | None]:
            rows: list[Row] = []
            reached: str | None = before
            size = min(query.max_scanned, _PLACES_PER_CALL)
            for _ in range(0, query.max_scanned, size):
                assert reached is not None
                part, reached = await self._read_part(
                    query, reached, limit - len(rows), is_reversed=True, max_places=size
                )
                rows += part
                if reached is None or len(rows) == limit:
                    return rows, None
            return rows, reached

        return await scan_by_id(query, read_backwards, self._list)

    async def _read_part(
        self,
        query: TaskQuery | ScanQuery,
        after: str,
        limit: int,
        *,
        is_reversed: bool = False,
        max_places: int = _PLACES_PER_CALL,
    ) -> tuple[list[Row], str | None]:
        """Rows after an id, and the id to continue after; None at the end."""
        cursor, *reply = await self.run(
            "list_tasks",
            after,
            min(limit, _PAGE_SIZE),
            "" if query.status is None else STATUS_LETTERS[query.status],
            query.queue or "",
            query.func_path or "",
            int(is_reversed),
            max_places,
        )
        rows: list[Row] = []
        for name, *parts in zip(*[iter(reply)] * 4, strict=True):
            # A damaged row costs its reader nothing but that row.
            with suppress(StorageCorrupt):
                is_finished = parts[0][:1] == b"f"
                task_id = name.decode()
                rows.append(
                    encoding.read_finished(task_id, *parts).row
                    if is_finished
                    else encoding.read_row(task_id, *parts)
                )
        return rows, cursor.decode() or None

    async def _list_dead(self, query: DeadQuery) -> list[StoredLetter]:
        letters: list[StoredLetter] = []
        since = "-inf" if query.since is None else str(query.since)
        before = "+inf" if query.until is None else f"({query.until}"
        after = query.after
        while len(letters) < query.limit:
            # A filter may leave none of a page.
            is_filtered = query.func_path is not None or query.reason is not None
            size = _PAGE_SIZE if is_filtered else min(query.limit - len(letters), _PAGE_SIZE)
            reached, *found = await self.run("list_dead", after, size, since, before)
            read = encoding.read_letters(found)
            letters += [letter for letter in read if letter_matches(letter, query)]
            after = reached.decode()
            if not after:
                break
        return letters[: query.limit]

    async def _list_finished(self, query: FinishedQuery) -> list[str]:
        ids: list[str] = []
        after = query.after
        while True:
            left = query.limit - len(ids)
            reached, *found = await self.run("finished", query.by, query.before, left, after)
            ids += [task_id.decode() for task_id in found]
            after = reached.decode()
            if not after or len(ids) == query.limit:
                return ids

    @_checks_replies
    async def counts(self, *, only_waiting: bool = False) -> Counts:
        now, waiting, *reply = await self.run("counts", int(only_waiting))
        counts = Counts(now=int(now), waiting=waiting)
        if only_waiting:
            return counts
        counters, finished, counts.dead, first_due = reply
        counts.by_status, counts.by_queue = dict.fromkeys(TaskStatus, 0), {}
        for name, count in encoding.pairs(counters):
            queue, _, letter = name.decode().rpartition("/")
            try:
                number = int(count)
            except ValueError as error:
                raise StorageCorrupt(f"Redis: {DAMAGED_COUNTER}") from error
            counts.by_status[STATUSES[letter]] += number
            counts.by_queue[queue] = counts.by_queue.get(queue, 0) + number
        for letter, count in zip("sfc", finished, strict=True):
            counts.by_status[STATUSES[letter]] = count
        counts.oldest = {
            queue.decode(): instant_of(due.decode()) for queue, due in encoding.pairs(first_due)
        }
        return counts

    # Leases

    @_checks_replies
    async def leases(self) -> list[Lease]:
        now, *reply = await self.run("leases")
        found = [
            _lease(reply[n].decode(), int(reply[n + 1] or 0), reply[n + 2], int(now))
            for n in range(0, len(reply), 3)
        ]
        return sorted(found, key=lambda lease: lease.owner)

    @_checks_replies
    async def renew(self, info: WorkerInfo, length: int, holder: Holder) -> LeaseReply:
        reply = await self.run(
            "renew",
            info.id,
            length,
            raw(encode_internal(info)),
            holder.epoch,
            holder.beat,
            holder.claims,
        )
        _, epoch, beat, store, paused, *held_places = reply
        if not paused:
            return LeaseReply(int(epoch), int(beat), store)
        held, cancelled = encoding.read_held(held_places)
        renewal = Renewal(held, cancelled, paused == b"1")
        return LeaseReply(int(epoch), int(beat), store, renewal)

    async def fence(self, owner: str, *, retires: bool = False) -> bool:
        return await self._fence(owner, retires=retires)

    async def fence_overdue(self, lease: Lease) -> bool:
        return await self._fence(lease.owner, overdue=str(lease.until))

    @_checks_replies
    async def _fence(self, owner: str, *, retires: bool = False, overdue: str = "") -> bool:
        channel = self.channel if retires else ""
        fenced: int = await self.run("fence", owner, int(retires), channel, overdue)
        return fenced == 1

    @_checks_replies
    async def pause_worker(self, owner: str, *, paused: bool) -> bool:
        return bool(await self.run("pause_worker", owner, int(paused)))

    # Waiting

    def set_next_event(self, event: bytes) -> None:
        """Note when a task may become claimable by time alone, as a claim has read it."""
        self._next_event = event.decode()
        # A wait that began before this reply does not know of the next event.
        self._wake_sleeper()

    def _on_message(self, channel: str, text: str) -> None:
        if channel != self.scripts.key("awaited"):
            self._was_notified = True
            self._wake_sleeper()
            self._local_wakeups.notify_work()
        else:
            self._local_wakeups.notify_results(text.split(" "))

    async def wait_for_work(self, timeout: float) -> None:
        if timeout > 0 and await self.wakeups.open():
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

    @_checks_replies
    async def read_clock(self) -> None:
        sent_at = self.clock.boot_micros()
        seconds, micros = await self.scripts.command("TIME")
        observe(self.clock, int(seconds) * 1_000_000 + int(micros), sent_at=sent_at)

    @asynccontextmanager
    async def watch_result(self, task_id: str) -> AsyncIterator[float]:
        await self.wakeups.open()
        await self.run("await_result", task_id)
        yield _NOTIFIED_PAUSE if self.wakeups.is_open else POLLING_PAUSE

    def _until_next_event(self) -> float:
        """Seconds until a task may become claimable by time alone, as of the last claim."""
        if not self._next_event:
            return math.inf
        return (instant_of(self._next_event) - self.now()) / 1_000_000

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


_TIMED = frozenset(
    {
        *("begin_claim", "load", "held", "candidates", "parked", "find_documents"),
        *("record_and_claim", "counts", "leases", "renew", "prepare"),
    }
)
"""Scripts whose reply begins with the server's time."""


def _lease(owner: str, until: int, worker: bytes, now: int) -> Lease:
    """A lease; `worker` is as the script `renew` stores it."""
    if not worker:
        return Lease(owner, None, until > now)
    paused, length, _, _, info = worker.split(b"/", 4)
    shown = msgspec.structs.replace(_decode_info(info), paused=paused == b"1")
    return Lease(owner, shown, until > now, until, int(length), now)
