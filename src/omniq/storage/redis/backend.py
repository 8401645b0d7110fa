"""The Redis backend: sections, the fast path, pages, counts, leases and waiting."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from omniq._futures import finish
from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.errors import LeaseLost, StorageCorrupt
from omniq.models import DeadLetter, TaskStatus, WorkerInfo
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage.backend import (
    Backend,
    Changes,
    Counts,
    DocumentQuery,
    FastReply,
    FinishedQuery,
    Lease,
    Wanted,
    Work,
)
from omniq.storage.claim import PAUSED_QUEUE
from omniq.storage.gate_states import DUE_GATES
from omniq.storage.gate_states import KIND as GATE
from omniq.storage.inspection import DeadQuery, Scan, ScanQuery, TaskQuery
from omniq.storage.newest_by_id import scan_by_id
from omniq.storage.redis import encoding, server_check, upgrade
from omniq.storage.redis.connection import ServerConnection
from omniq.storage.redis.encoding import STATUS_LETTERS, STATUSES, instant_of, stamp
from omniq.storage.redis.scripts import Scripts, raw
from omniq.storage.redis.section import (
    RedisSection,
    document_change,
    inserted,
    read_document,
    runnable_arguments,
)
from omniq.storage.redis.wakeups import Wakeups
from omniq.storage.row_rules import Row
from omniq.storage.store_clock import StoreClock
from omniq.storage.types import Capabilities, Claim, Durability, Renewal
from omniq.storage.wakeups import LocalWakeups

_T = TypeVar("_T")

_PAGE_SIZE = 500
"""Records that one call reads, at most."""

_PLACES_PER_CALL = 1_000
"""Places that one call checks, at most."""

_DEAD_IDS_PER_CALL = 4_000
"""Ids of dead letters that one call reads, at most."""

_MAX_USED = 50
"""Documents of one claim that the next one reads in advance, at most."""

_decode_info = internal_decoder(WorkerInfo)


class RedisBackend(Backend):
    """A store in the server at `url`; all its keys begin with `{prefix}`."""

    def __init__(self, url: str, prefix: str, clock: Clock, local_wakeups: LocalWakeups) -> None:
        self._url = url
        self._prefix = prefix
        self._clock = clock
        self._local_wakeups = local_wakeups
        self._store_clock = StoreClock(clock) if clock is SYSTEM_CLOCK else None
        self._durability: Durability = "none"
        self._numbers = itertools.count(1)
        self._used_documents: list[str] = []
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
        return RedisBackend(self._url, self._prefix, self._clock, self._local_wakeups)

    # Opening and closing

    async def open(self) -> None:
        self._connection = ServerConnection(self._url, name=f"omniq-{os.getpid()}")
        self.scripts = Scripts(self._connection, self._prefix, self._given_now)
        self.channel = self.scripts.key(f"wake:{self._clock.new_id()}")
        channels = [self.channel, self.scripts.key("awaited")]
        self.wakeups = Wakeups(self._connection, channels, self._on_message)
        try:
            # Sent once: a server that cannot be reached is reported without retries.
            await self._connection.command("PING")
            facts = await server_check.read_facts(self.scripts.command)
            server_check.check(facts)
            await upgrade.prepare(self.run, self.scripts, self._clock.new_id())
        except BaseException:
            await self._connection.close()
            raise
        self._durability = facts.durability

    async def close(self) -> None:
        try:
            await self.wakeups.close()
        finally:
            await self._connection.close()

    # Time

    def _given_now(self) -> int:
        """The time that scripts use: 0 for the server's, or that of a clock given by a test."""
        return 0 if self._clock is SYSTEM_CLOCK else self._clock.micros()

    @property
    def clock(self) -> Clock:
        """The server's clock, as far as it is known here, or that of a test."""
        return self._store_clock or self._clock

    def now(self) -> int:
        """The time of that clock."""
        return self.clock.micros()

    # Sections

    async def run(self, name: str, *arguments: Any) -> Any:
        """Run a script. A reply that is a list begins with the server's time, unless it is a write's."""
        sent_at = self._clock.boot_micros()
        reply = await self.scripts.run(name, *arguments)
        if self._store_clock is not None and name in _TIMED and isinstance(reply, list):
            self._store_clock.observe(int(reply[0]), sent_at=sent_at)
        return reply

    async def read_fields(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        """Read fields of a hash."""
        found: list[bytes | None] = await self.scripts.command(
            "HMGET", self.scripts.key(key), *fields
        )
        return found

    def new_nonce(self) -> str:
        """A text that no other call has."""
        return f"{self.channel.rpartition(':')[2]}-{next(self._numbers)}"

    async def transact(
        self, work: Work[_T], *, claims_as: str | None = None, writes: bool = True
    ) -> _T:
        if claims_as is None:
            return await work(RedisSection(self, self.now()))
        self._was_notified = False
        used, self._used_documents = self._used_documents, []
        reply = await self.run("begin_claim", claims_as, DUE_GATES, used)
        if reply == b"lost":
            raise LeaseLost(claims_as)
        now, paused, due, suspects, values = reply
        section = RedisSection(self, int(now), claims_as)
        names = [queue.decode() for queue in paused]
        found = {
            DocumentQuery(kind=PAUSED_QUEUE): [
                read_document(f"{PAUSED_QUEUE}/{name}", b"/") for name in names
            ],
            DocumentQuery(kind=GATE, due_by=section.now, limit=DUE_GATES): [
                read_document(name.decode(), value) for name, value in encoding.pairs(due) if value
            ],
        }
        known = {name: value or None for name, value in zip(used, values, strict=True)}
        section.prefetch(found, known, names, suspects)
        return await work(section)

    def note_used(self, names: list[str]) -> None:
        """Note which documents claims use: the next claim probably uses them again."""
        self._used_documents = names[:_MAX_USED]

    async def run_candidates(self, wanted: Wanted, *arguments: Any) -> list[bytes]:
        """Run the script `candidates`, until it has moved all tasks that have come due."""
        waiting = self._waiting(wanted.queues, wanted.runnable)
        is_partial = 1
        rows: list[bytes] = []
        while is_partial:
            reply = await self.run("candidates", *arguments, *waiting)
            _, is_partial, event, rows = reply
            self._set_next_event(event)
        return rows

    # The fast paths

    async def enqueue_one(self, row: Row) -> bool:
        """Store a new task that is due and needs no other changes; False when its id is taken."""
        parts = (*inserted(row), row.queue, row.func_path)
        return bool(await self.scripts.run("enqueue_one", *parts))

    async def record_and_claim(
        self, owner: str, changes: Changes, claim: Claim | None
    ) -> FastReply:
        """Record planned outcomes, and claim plain rows, in one script."""
        groups: dict[tuple[Any, ...], list[Any]] = {}
        for ended in changes.ended:
            row, finished = ended.row, ended.finished
            expires_at = str(finished.expires_at) if row.result_ttl else "0"
            status = encoding.status_letter(row.status)
            key = (row.queue, row.func_path, status, str(finished.finished_at), expires_at)
            record = raw(encoding.end_record(ended)) if row.result_ttl else ""
            groups.setdefault(key, []).extend((row.id, str(row.token), record))
        outcomes = [
            (row.id, str(row.token), encoding.place_of(row), raw(encoding.state_of(row)))
            for row in changes.updated
        ]
        reply = await self.run(
            "record_and_claim",
            owner,
            [(*key, values) for key, values in groups.items()],
            outcomes,
            [document_change(change) for change in changes.documents],
            0 if claim is None else self._claim_arguments(claim),
        )
        if reply == b"lost":
            raise LeaseLost(owner)
        _, missed, claimed, event = reply
        rows: list[Row] | None = None
        if isinstance(claimed, list):
            rows = [row for row, _, _ in encoding.read_rows(claimed)]
            self._set_next_event(event)
        return FastReply(frozenset(task_id.decode() for task_id in missed), rows)

    def _claim_arguments(self, claim: Claim) -> tuple[Any, ...]:
        self._was_notified = False
        return (
            claim.limit,
            "" if claim.now is None else stamp(claim.now),
            0 if claim.queues is None else claim.queues,
            runnable_arguments(claim.runnable),
            claim.claim_id or f"#{next(self._numbers)}",
            *self._waiting(claim.queues, claim.runnable),
            int(bool(claim.claim_id)),
        )

    # Pages

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
        rows = [
            encoding.read_finished(reply[n].decode(), *reply[n + 1 : n + 4]).row
            if reply[n + 1][:1] == b"f"
            else encoding.read_row(reply[n].decode(), *reply[n + 1 : n + 4])
            for n in range(0, len(reply), 4)
        ]
        return rows, cursor.decode() or None

    async def _list_dead(self, query: DeadQuery) -> list[DeadLetter]:
        letters: list[DeadLetter] = []
        is_filtered = query.func_path is not None or query.reason is not None
        after, is_end = query.after, False
        while len(letters) < query.limit and not is_end:
            ids, after, is_end = await self._dead_ids(query, after)
            for start in range(0, len(ids), _PAGE_SIZE):
                wanted = _PAGE_SIZE if is_filtered else query.limit - len(letters)
                part = ids[start : start + min(wanted, _PAGE_SIZE)]
                if not part:
                    break
                for dead in await self.read_fields("dead", part):
                    if dead is not None and _is_wanted(letter := encoding.read_letter(dead), query):
                        letters.append(letter)
                if len(letters) >= query.limit:
                    break
        return letters[: query.limit]

    async def _dead_ids(self, query: DeadQuery, after: str) -> tuple[list[str], str, bool]:
        """Ids of letters that failed in the time of the query, in order; where to continue; at the end."""
        since = "-inf" if query.since is None else str(query.since)
        before = "+inf" if query.until is None else f"({query.until}"
        is_timed = query.since is not None or query.until is not None
        size = _DEAD_IDS_PER_CALL if is_timed else _PAGE_SIZE
        is_complete, found, times = await self.run("list_dead", after, size, since, before)
        ids = [task_id.decode() for task_id in found]
        if is_complete:
            return sorted(task_id for task_id in ids if task_id > after), after, True
        is_end = len(ids) < size
        after = ids[-1] if ids else after
        if is_timed:
            low = -math.inf if query.since is None else query.since
            high = math.inf if query.until is None else query.until
            ids = [
                task_id
                for task_id, failed_at in zip(ids, times, strict=True)
                if failed_at is not None and low <= float(failed_at) < high
            ]
        return ids, after, is_end

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
                raise StorageCorrupt("a counter in Redis is damaged") from error
            counts.by_status[STATUSES[letter]] += number
            counts.by_queue[queue] = counts.by_queue.get(queue, 0) + number
        for letter, count in zip("sfc", finished, strict=True):
            counts.by_status[STATUSES[letter]] = count
        counts.oldest = {
            queue.decode(): instant_of(due.decode()) for queue, due in encoding.pairs(first_due)
        }
        return counts

    async def count_waiting(self) -> int:
        """The number of tasks that wait for a run."""
        return (await self.counts(only_waiting=True)).waiting

    # Leases

    async def leases(self) -> list[Lease]:
        now, *reply = await self.run("leases")
        found = [
            Lease(
                reply[n].decode(),
                _worker_info(reply[n + 2]),
                is_live=bool(reply[n + 1]) and int(reply[n + 1]) > int(now),
            )
            for n in range(0, len(reply), 3)
        ]
        return sorted(found, key=lambda lease: lease.owner)

    async def renew(self, info: WorkerInfo, length: int, *, is_first: bool) -> Renewal:
        reply = await self.run("renew", info.id, length, raw(encode_internal(info)), int(is_first))
        if reply == b"lost":
            raise LeaseLost(info.id)
        _, paused, *held_places = reply
        held, cancelled = encoding.read_held(held_places)
        return Renewal(held, cancelled, paused == b"1")

    async def fence(self, owner: str, *, retires: bool = False) -> bool:
        fenced: int = await self.run("fence", owner, int(retires), self.channel if retires else "")
        return fenced == 1

    async def pause_worker(self, owner: str, *, paused: bool) -> bool:
        return bool(await self.run("pause_worker", owner, int(paused)))

    # Waiting

    def _waiting(self, queues: Any, runnable: Any) -> tuple[Any, Any]:
        """The channel on which a claim that finds too little waits for more, and for what."""
        interest: Any = "*"
        if queues is not None or runnable is not None:
            asked = (0 if queues is None else queues, runnable_arguments(runnable))
            interest = raw(msgspec.msgpack.encode(asked))
        return (self.channel if self.wakeups.is_open else "", interest)

    def _set_next_event(self, event: bytes) -> None:
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


def _worker_info(stored: bytes) -> WorkerInfo | None:
    """A worker as the script `renew` stores it."""
    paused, _, rest = stored.partition(b"/")
    info = rest.partition(b"/")[2].partition(b"/")[2].partition(b"/")[2]
    if not info:
        return None
    return msgspec.structs.replace(_decode_info(info), paused=paused == b"1")


def _is_wanted(letter: DeadLetter, query: DeadQuery) -> bool:
    return query.func_path in (None, letter.func_path) and query.reason in (
        None,
        letter.failure_reason,
    )
