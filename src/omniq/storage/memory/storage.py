"""Tasks in this process's memory: the reference backend. Nothing survives the process.

It uses the same rows, encodings and verbs as the other backends, so that a test against it tests the
contract.
"""

from __future__ import annotations

import copy
import heapq
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec

from omniq import gate_rules
from omniq.clock import SYSTEM_CLOCK, Clock, to_micros
from omniq.errors import DuplicateTask, LeaseLost, QueueFull
from omniq.gate_rules import Gate, GateState
from omniq.models import (
    DeadLetter,
    Progress,
    QueueStats,
    Schedule,
    TaskStatus,
    WorkerInfo,
)
from omniq.outcomes import Released, Rescheduled
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage import row_rules
from omniq.storage.base import BaseStorage
from omniq.storage.inspection import (
    DeadQuery,
    Scan,
    ScanQuery,
    TaskQuery,
    cursor_sequence,
    queue_stats,
    scan_by_sequence,
)
from omniq.storage.ready_queue import ClaimFilter, ReadyQueue
from omniq.storage.row_rules import Finish, FinishedRow, Row, Settled
from omniq.storage.types import Capabilities, Claim, Entry, GivenBack, Renewal


class _Lease(msgspec.Struct):
    info: WorkerInfo
    until: int


class _StoredDeadLetter(msgspec.Struct):
    letter: DeadLetter
    row: Row


class _Memory:
    """Everything a memory store holds. Siblings share it, each from its own thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seq = 0
        self.rows: dict[str, Row] = {}
        self.waiting: ReadyQueue[Row] = ReadyQueue()
        self.held: dict[str, dict[str, Row]] = {}
        self.leases: dict[str, _Lease] = {}
        self.fenced: set[str] = set()
        self.unique: dict[str, str] = {}
        self.finished: dict[str, FinishedRow] = {}
        self.newest: dict[str, bytes] = {}
        self.dead: dict[str, _StoredDeadLetter] = {}
        self.checkpoints: dict[str, tuple[int, bytes]] = {}
        self.progress: dict[str, Progress] = {}
        self.schedules: dict[str, Schedule] = {}
        self.paused: set[str] = set()
        self.gates: dict[str, GateState] = {}

    def gate(self, key: str) -> GateState:
        return self.gates.setdefault(key, GateState())


class MemoryStorage(BaseStorage):
    """A separate store in this process."""

    def __init__(
        self,
        *,
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        settings: Settings | None = None,
        max_pending: int | None = None,
    ) -> None:
        super().__init__(
            serializer=serializer, clock=clock, settings=settings, max_pending=max_pending
        )
        self._memory = _Memory()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="memory", durability="none", reach="process")

    def sibling(self) -> MemoryStorage:
        sibling = self.another()
        sibling._identity = self._identity
        sibling._is_sibling = True
        return sibling

    def another(
        self,
        *,
        serializer: Serializer | None = None,
        settings: Settings | None = None,
        max_pending: int | None = None,
    ) -> MemoryStorage:
        """An unopened object on the same memory that is a separate owner.

        What no argument overrides is as in this object.
        """
        other = MemoryStorage(
            serializer=serializer or (self._serializer if settings is None else None),
            clock=self._clock,
            settings=settings or self._settings,
            max_pending=max_pending or self._max_pending,
        )
        other._memory = self._memory
        other._local_wakeups = self._local_wakeups
        return other

    async def _open(self) -> None:
        """Nothing to open."""

    async def _close(self) -> None:
        """Nothing to close: the memory is freed with its last storage object."""

    # Enqueue

    async def _enqueue(self, rows: list[Row]) -> list[str]:
        memory, now = self._memory, self._clock.micros()
        with memory.lock:
            ids: list[str] = []
            fresh: list[Row] = []
            keys: dict[str, str] = {}
            for row in rows:
                holder = memory.unique.get(row.unique) if row.unique else None
                holder = holder or keys.get(row.unique or "")
                if self._is_repeat(row, now):
                    ids.append(row.id)
                elif holder is not None:
                    ids.append(holder)
                else:
                    ids.append(row.id)
                    fresh.append(row)
                    if row.unique:
                        keys[row.unique] = row.id
            self._check_room(len(fresh))
            for row in fresh:
                self._insert(row, now)
            return ids

    def _is_repeat(self, row: Row, now: int) -> bool:
        """Whether the same call has enqueued it before; raises DuplicateTask if another one has."""
        known = self._record_of(row.id, now)
        if known is None:
            return False
        if known.nonce != row.nonce:
            raise DuplicateTask(row.id)
        return True

    def _record_of(self, task_id: str, now: int) -> Row | None:
        memory = self._memory
        if task_id in memory.rows:
            return memory.rows[task_id]
        if task_id in memory.dead:
            return memory.dead[task_id].row
        finished = memory.finished.get(task_id)
        return finished.row if finished is not None and finished.expires_at > now else None

    def _check_room(self, more: int) -> None:
        limit = self._max_pending
        if limit is not None and more and len(self._memory.waiting.items) + more > limit:
            raise QueueFull(limit)

    def _insert(self, row: Row, now: int) -> None:
        memory = self._memory
        memory.finished.pop(row.id, None)
        memory.seq += 1
        row.seq = memory.seq
        memory.rows[row.id] = row
        if row.unique:
            memory.unique[row.unique] = row.id
        memory.waiting.put(row, now)

    # Record and claim

    async def _record_and_claim(
        self, owner: str, entries: list[Entry], claim: Claim | None
    ) -> tuple[list[bool], list[Row]]:
        now = self._clock.micros()
        with self._memory.lock:
            if claim is not None and owner not in self._memory.leases:
                raise LeaseLost(owner)
            recorded = [self._record(owner, entry, now) for entry in entries]
            rows = self._claim(owner, claim, now) if claim is not None else []
            return recorded, [copy.copy(row) for row in rows]

    def _record(self, owner: str, entry: Entry, now: int) -> bool:
        outcome = entry.outcome
        row = self._memory.rows.get(outcome.task_id)
        if row is None:
            gone = self._record_of(outcome.task_id, now)
            return gone is not None and row_rules.was_recorded(gone, outcome)
        if not row_rules.is_current(row, outcome, owner):
            return row_rules.was_recorded(row, outcome)
        token = row.token
        settled = row_rules.settle(row, outcome, now)
        self._apply(row, owner, token, settled, entry.result, now)
        return True

    def _apply(
        self, row: Row, owner: str, token: int, settled: Settled, result: bytes | None, now: int
    ) -> None:
        """Store a settled row, and have it leave its gates."""
        memory = self._memory
        for gate in row.gates:
            state = memory.gate(gate.key)
            gate_rules.leave(gate, state, row.id, token, settled.effect, now, settled.reason)
        if settled.result is not None and result is not None:
            memory.newest[row.id] = result
            memory.checkpoints.pop(row.id, None)
            memory.progress.pop(row.id, None)
        if settled.finish is not None:
            self._remove_held(owner, row.id)
            self._finish(row, settled.finish, self._encode_finish(settled.finish, result), now)
        elif row.owner is None:
            self._remove_held(owner, row.id)
            memory.waiting.put(row, now)

    def _remove_held(self, owner: str, task_id: str) -> None:
        held = self._memory.held.get(owner)
        if held is not None:
            held.pop(task_id, None)
            if not held:
                del self._memory.held[owner]

    def _finish(self, row: Row, finish: Finish, result: bytes, now: int) -> None:
        memory = self._memory
        del memory.rows[row.id]
        memory.waiting.discard(row.id)
        memory.progress.pop(row.id, None)
        memory.newest.pop(row.id, None)
        if row.unique and memory.unique.get(row.unique) == row.id:
            del memory.unique[row.unique]
        finished = row_rules.finished_row(row, finish, result, now)
        if row.result_ttl:
            memory.finished[row.id] = finished
        if finish.dead is not None:
            memory.dead[row.id] = _StoredDeadLetter(finish.dead, row)
        else:
            memory.checkpoints.pop(row.id, None)

    def _claim(self, owner: str, claim: Claim, now: int) -> list[Row]:
        memory = self._memory
        due_by = now if claim.now is None else claim.now
        memory.waiting.promote(due_by, now)

        def room(gate: Gate) -> int:
            return gate_rules.room(gate, memory.gate(gate.key), now)

        groups = memory.waiting.groups_with_room(lambda gate: self._room_if_awake(gate, now))
        held = memory.held.setdefault(owner, {})
        wanted = ClaimFilter(
            claim.queues,
            memory.paused,
            suspects=not any(row.is_suspect for row in held.values()),
        )
        claimed: list[Row] = []
        not_due: list[Row] = []
        while len(claimed) < claim.limit:
            row = memory.waiting.take_next(wanted, groups, room)
            if row is None:
                break
            if row.visible > due_by:
                not_due.append(row)
            elif row_rules.is_expired(row, due_by):
                expired = row_rules.finish_cancelled(row, now, "expired")
                self._finish(row, expired, self._encode_finish(expired, None), now)
                self._local_wakeups.notify_results((row.id,))
            elif self._enter_gates(row, now):
                row_rules.claim(row, owner, now)
                held[row.id] = row
                wanted.suspects = wanted.suspects and not row.is_suspect
                claimed.append(row)
        for row in not_due:
            memory.waiting.put(row, now)
        if not held:
            del memory.held[owner]
        return claimed

    def _room_if_awake(self, gate: Gate, now: int) -> int:
        """How many tasks the gate admits; 0 without a check while it cannot have changed."""
        state = self._memory.gate(gate.key)
        if state.wake_at > now:
            return 0
        free = gate_rules.room(gate, state, now)
        if free == 0:
            state.wake_at = gate_rules.ask_again_at(gate, state, now)
        return free

    def _enter_gates(self, row: Row, now: int) -> bool:
        """Enter all gates of the row, or park it under the one that blocks it."""
        if not row.gates:
            return True
        memory = self._memory
        states = {gate.key: memory.gate(gate.key) for gate in row.gates}
        blocking = gate_rules.blocking(row.gates, states, now)
        if blocking is not None:
            row.parked = blocking.key
            memory.waiting.put(row, now)
            return False
        for gate in row.gates:
            gate_rules.enter(gate, states[gate.key], row.id, row.token + 1, now)
        return True

    # Leases

    async def _renew(self, info: WorkerInfo, lease: int) -> Renewal:
        memory = self._memory
        with memory.lock:
            if info.id in memory.fenced:
                raise LeaseLost(info.id)
            known = memory.leases.get(info.id)
            info = msgspec.structs.replace(info, paused=known is not None and known.info.paused)
            memory.leases[info.id] = _Lease(info, self._clock.boot_micros() + lease)
            held = memory.held.get(info.id, {})
            return Renewal(
                {row.id: row.token for row in held.values()},
                frozenset(row.id for row in held.values() if row.cancel_requested),
                info.paused,
            )

    async def _retire(self, owner: str) -> None:
        memory, now = self._memory, self._clock.micros()
        with memory.lock:
            for row in list(memory.held.get(owner, {}).values()):
                token = row.token
                outcome = (
                    Rescheduled(row.id, token, self._clock.now())
                    if row.status is TaskStatus.RETRYING
                    else Released(row.id, token)
                )
                self._apply(row, owner, token, row_rules.settle(row, outcome, now), None, now)
            memory.leases.pop(owner, None)
            memory.fenced.add(owner)

    async def _give_back(self, max_crashes: int) -> list[GivenBack]:
        memory, now, boot_now = self._memory, self._clock.micros(), self._clock.boot_micros()
        given_back: list[GivenBack] = []
        with memory.lock:
            for owner in [o for o, lease in memory.leases.items() if lease.until <= boot_now]:
                memory.fenced.add(owner)
                del memory.leases[owner]
            for owner in [owner for owner in memory.held if owner not in memory.leases]:
                memory.fenced.add(owner)
                rows = list(memory.held[owner].values())
                tokens = {row.id: row.token for row in rows}
                for row, settled in row_rules.give_back(rows, now, max_crashes):
                    self._apply(row, owner, tokens[row.id], settled, None, now)
                    given_back.append(GivenBack(row.id, row.func_path, owner, row.status))
        return given_back

    # Cancel

    async def _cancel(self, task_id: str, reason: str) -> bool:
        memory, now = self._memory, self._clock.micros()
        with memory.lock:
            row = memory.rows.get(task_id)
            if row is None:
                return False
            if row.owner is not None:
                row.cancel_requested = True
            else:
                finish = row_rules.finish_cancelled(row, now, reason)
                self._finish(row, finish, self._encode_finish(finish, None), now)
            return True

    # Waiting

    async def _wait_for_work(self, timeout: float) -> None:
        with self._local_wakeups.listen_for_work() as notified:
            with self._memory.lock:
                next_due = self._memory.waiting.next_due()
            if next_due is not None:
                timeout = min(timeout, max(0.0, (next_due - self._clock.micros()) / 1_000_000))
            await self._clock.wait(notified, timeout)

    # Retention

    async def _purge_results(self, before: int) -> int:
        return self._purge(lambda finished: finished.finished_at < before)

    async def _purge_expired(self) -> int:
        now = self._clock.micros()
        return self._purge(lambda finished: finished.expires_at <= now)

    def _purge(self, is_old: Callable[[FinishedRow], bool]) -> int:
        memory = self._memory
        with memory.lock:
            old = [task_id for task_id, finished in memory.finished.items() if is_old(finished)]
            for task_id in old:
                del memory.finished[task_id]
            return len(old)

    async def _delete_task(self, task_id: str) -> bool:
        now = self._clock.micros()
        return self._purge(lambda each: each.row.id == task_id and each.expires_at > now) == 1

    # Dead letters

    async def _retry_dead(self, task_id: str, body: bytes | None, from_start: bool) -> bool:
        memory, now = self._memory, self._clock.micros()
        with memory.lock:
            stored = memory.dead.get(task_id)
            if stored is None:
                return False
            self._check_room(1)
            row = copy.copy(stored.row)
            if row.unique and row.unique in memory.unique:
                raise DuplicateTask(memory.unique[row.unique])
            row_rules.retry_dead(row, now, body=body)
            del memory.dead[task_id]
            if from_start:
                memory.checkpoints.pop(task_id, None)
            self._insert(row, now)
            return True

    async def delete_dead(self, task_id: str) -> bool:
        self._check_open()
        with self._memory.lock:
            return self._delete_dead(task_id)

    def _delete_dead(self, task_id: str) -> bool:
        if self._memory.dead.pop(task_id, None) is None:
            # The checkpoint, if there is one, belongs to a live task.
            return False
        self._memory.checkpoints.pop(task_id, None)
        return True

    async def _purge_dead(self, before: int) -> int:
        memory = self._memory
        with memory.lock:
            old = [
                task_id
                for task_id, stored in memory.dead.items()
                if to_micros(stored.letter.last_failure) < before
            ]
            return sum(self._delete_dead(task_id) for task_id in old)

    async def _list_dead(self, query: DeadQuery) -> list[DeadLetter]:
        self._check_open()
        with self._memory.lock:
            letters = [
                stored.letter
                for task_id, stored in self._memory.dead.items()
                if task_id > query.after
                and query.func_path in (None, stored.letter.func_path)
                and query.reason in (None, stored.letter.failure_reason)
            ]
        return heapq.nsmallest(query.limit, letters, key=lambda letter: letter.task_id)

    async def get_dead(self, task_id: str) -> DeadLetter | None:
        self._check_open()
        memory = self._memory
        with memory.lock:
            stored = memory.dead.get(task_id)
            if stored is None:
                return None
            _, checkpoint = memory.checkpoints.get(task_id, (0, None))
            return msgspec.structs.replace(stored.letter, checkpoint=checkpoint)

    # Checkpoints and progress

    async def _save_checkpoint(
        self, owner: str, task_id: str, token: int, checkpoint: bytes
    ) -> bool:
        with self._memory.lock:
            if not self._is_held(owner, task_id, token):
                return False
            self._memory.checkpoints[task_id] = (self._clock.micros(), checkpoint)
            return True

    def _is_held(self, owner: str, task_id: str, token: int) -> bool:
        row = self._memory.held.get(owner, {}).get(task_id)
        return row is not None and row.token == token

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        self._check_open()
        with self._memory.lock:
            _, checkpoint = self._memory.checkpoints.get(task_id, (0, None))
            return checkpoint

    async def _purge_checkpoints(self, before: int) -> int:
        memory = self._memory
        with memory.lock:
            orphans = [
                task_id
                for task_id, (saved_at, _) in memory.checkpoints.items()
                if saved_at < before and task_id not in memory.rows and task_id not in memory.dead
            ]
            for task_id in orphans:
                del memory.checkpoints[task_id]
            return len(orphans)

    async def _report_progress(self, owner: str, reports: Sequence[Progress]) -> None:
        with self._memory.lock:
            for report in reports:
                if self._is_held(owner, report.task_id, report.token):
                    self._memory.progress[report.task_id] = report

    async def get_progress(self, task_id: str) -> Progress | None:
        self._check_open()
        with self._memory.lock:
            return self._memory.progress.get(task_id)

    # Schedules

    async def _put_schedule(self, schedule: Schedule) -> None:
        with self._memory.lock:
            known = self._memory.schedules.get(schedule.id)
            version = schedule.version if known is None else known.version + 1
            self._memory.schedules[schedule.id] = _copied(schedule, version)

    async def get_schedule(self, schedule_id: str) -> Schedule | None:
        self._check_open()
        with self._memory.lock:
            schedule = self._memory.schedules.get(schedule_id)
            return None if schedule is None else _copied(schedule, schedule.version)

    async def list_schedules(self) -> list[Schedule]:
        self._check_open()
        with self._memory.lock:
            found = sorted(self._memory.schedules.items())
            return [_copied(schedule, schedule.version) for _, schedule in found]

    async def delete_schedule(self, schedule_id: str) -> bool:
        self._check_open()
        with self._memory.lock:
            return self._memory.schedules.pop(schedule_id, None) is not None

    async def _fire_schedule(self, schedule: Schedule, advanced: Schedule, row: Row | None) -> bool:
        memory, now = self._memory, self._clock.micros()
        with memory.lock:
            known = memory.schedules.get(schedule.id)
            if known is None or known.version != schedule.version:
                return False
            is_new = row is not None and self._record_of(row.id, now) is None
            if row is not None and is_new and row.unique not in memory.unique:
                self._check_room(1)
                self._insert(row, now)
            memory.schedules[schedule.id] = _copied(advanced, known.version + 1)
            return True

    # Queues and gates

    async def _set_paused(self, queue: str, paused: bool) -> None:
        with self._memory.lock:
            if paused:
                self._memory.paused.add(queue)
            else:
                self._memory.paused.discard(queue)

    async def paused_queues(self) -> frozenset[str]:
        self._check_open()
        with self._memory.lock:
            return frozenset(self._memory.paused)

    async def gates(self) -> dict[str, GateState]:
        self._check_open()
        with self._memory.lock:
            return copy.deepcopy(self._memory.gates)

    # Reading

    async def _find(self, task_id: str) -> Row | FinishedRow | None:
        self._check_open()
        memory, now = self._memory, self._clock.micros()
        with memory.lock:
            row = memory.rows.get(task_id)
            if row is not None:
                return copy.copy(row)
            finished = memory.finished.get(task_id)
            return finished if finished is not None and finished.expires_at > now else None

    async def _find_dead_row(self, task_id: str) -> Row | None:
        self._check_open()
        with self._memory.lock:
            stored = self._memory.dead.get(task_id)
            return None if stored is None else copy.copy(stored.row)

    async def _find_newest_result(self, task_id: str) -> bytes | None:
        with self._memory.lock:
            return self._memory.newest.get(task_id)

    async def _list(self, query: TaskQuery) -> list[Row]:
        self._check_open()
        memory, now = self._memory, self._clock.micros()
        with memory.lock:
            matching = [
                row for row in self._all_rows(now) if row.id > query.after and _matches(row, query)
            ]
            page = heapq.nsmallest(query.limit, matching, key=lambda row: row.id)
            return [copy.copy(row) for row in page]

    async def _scan(self, query: ScanQuery) -> Scan:
        self._check_open()
        memory, now = self._memory, self._clock.micros()
        begin = cursor_sequence(query.cursor)
        with memory.lock:
            rows = sorted(self._all_rows(now), key=lambda row: row.seq, reverse=True)
            if begin is None and query.until is not None:
                rows = [row for row in rows if row.created_at < query.until]
            older = [row for row in rows if begin is None or row.seq < begin]
            found = [copy.copy(row) for row in older[: query.max_scanned] if _matches(row, query)]
        last = older[query.max_scanned - 1].seq if len(older) > query.max_scanned else None
        return scan_by_sequence(found[: query.limit + 1], query.limit, last)

    def _all_rows(self, now: int) -> Iterator[Row]:
        yield from self._memory.rows.values()
        for finished in self._memory.finished.values():
            if finished.expires_at > now:
                yield finished.row

    async def count_waiting(self) -> int:
        """How many tasks wait for their next run. A pool calls this often: it does not read all rows."""
        self._check_open()
        memory = self._memory
        with memory.lock:
            held = [row for rows in memory.held.values() for row in rows.values()]
            return len(memory.rows) - sum(row.status is TaskStatus.RUNNING for row in held)

    async def stats(self) -> QueueStats:
        self._check_open()
        memory, now = self._memory, self._clock.micros()
        by_status = dict.fromkeys(TaskStatus, 0)
        by_queue: dict[str, int] = {}
        oldest: dict[str, int] = {}
        with memory.lock:
            for row in self._all_rows(now):
                by_status[row.status] += 1
                if not row.status.is_final:
                    by_queue[row.queue] = by_queue.get(row.queue, 0) + 1
                    if row.owner is None:
                        oldest[row.queue] = min(row.due, oldest.get(row.queue, row.due))
            dead = len(memory.dead)
        return queue_stats(by_status, by_queue, oldest, now=now, dead=dead)

    async def _set_worker_paused(self, owner: str, paused: bool) -> bool:
        memory = self._memory
        with memory.lock:
            lease = memory.leases.get(owner)
            if lease is None or lease.until <= self._clock.boot_micros():
                return False
            info = msgspec.structs.replace(lease.info, paused=paused)
            memory.leases[owner] = _Lease(info, lease.until)
            return True

    async def workers(self) -> list[WorkerInfo]:
        self._check_open()
        memory, boot_now = self._memory, self._clock.boot_micros()
        with memory.lock:
            return [
                msgspec.structs.replace(
                    lease.info, running=tuple(sorted(memory.held.get(owner, {})))
                )
                for owner, lease in sorted(memory.leases.items())
                if lease.until > boot_now
            ]

    async def held_by(self, owner: str) -> dict[str, int]:
        self._check_open()
        with self._memory.lock:
            return {row.id: row.token for row in self._memory.held.get(owner, {}).values()}


def _copied(schedule: Schedule, version: int) -> Schedule:
    # The caller that passed the task's arguments, or gets them, may change them. The rest is frozen.
    task = schedule.task
    copied = msgspec.structs.replace(
        task,
        args=copy.deepcopy(task.args),
        kwargs=copy.deepcopy(task.kwargs),
        metadata=copy.deepcopy(task.metadata),
    )
    return msgspec.structs.replace(schedule, task=copied, version=version)


def _matches(row: Row, query: TaskQuery | ScanQuery) -> bool:
    return (
        query.status in (None, row.status)
        and query.queue in (None, row.queue)
        and query.func_path in (None, row.func_path)
    )
