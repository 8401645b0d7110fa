"""Store: carries out the verbs of the file backend, with blocking calls, in one thread."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from omniq.clock import Clock, from_micros
from omniq.errors import DuplicateTask, LeaseLost
from omniq.failpoints import hit
from omniq.models import DeadLetter, Progress, Schedule, TaskStatus, WorkerInfo
from omniq.serialization import Serializer
from omniq.storage.file.claim import Claimer
from omniq.storage.file.encoding import Live
from omniq.storage.file.enqueue import Batch, Enqueuer, SequenceNumbers
from omniq.storage.file.file_names import Claimed, dead_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.finished import FinishedTasks
from omniq.storage.file.gates import Gates
from omniq.storage.file.leases import Lease, Leases
from omniq.storage.file.record import EncodeFinish, HeldTasks, Recorder
from omniq.storage.file.schedules import Schedules
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.file.unique_keys import UniqueKeys
from omniq.storage.row_rules import Row
from omniq.storage.types import Claim, Entry, GivenBack, Renewal

_NONCE_PREFIX_LENGTH = 12
"""Characters of a new id that begin a store's nonces: its random end. Long names cost space."""

_sequences: WeakValueDictionary[tuple[int, int], SequenceNumbers] = WeakValueDictionary()
_sequences_lock = threading.Lock()


def _sequence_numbers_of(root: Path) -> SequenceNumbers:
    """The sequence numbers of a folder, shared by all storages of this process, to order them."""
    facts = os.stat(root)
    with _sequences_lock:
        return _sequences.setdefault((facts.st_dev, facts.st_ino), SequenceNumbers())


class StoreOptions(msgspec.Struct):
    """The options and collaborators of a store."""

    root: Path
    is_durable: bool
    clock: Clock
    serializer: Serializer
    max_pending: int | None
    held_tasks: HeldTasks
    encode_finish: EncodeFinish
    is_watched: bool = True


class Store:
    """One folder. Call `open` first; after that every method leaves the store consistent."""

    def __init__(self, options: StoreOptions) -> None:
        self._clock = options.clock
        self.held_tasks = options.held_tasks
        self.disk = Disk(
            options.root,
            is_durable=options.is_durable,
            nonce_prefix=options.clock.new_id()[-_NONCE_PREFIX_LENGTH:],
        )
        self.task_files = TaskFiles(self.disk, options.clock, watched=options.is_watched)
        self.leases = Leases(self.disk, options.clock)
        self.gates = Gates(self.disk, self.task_files)
        self.finished = FinishedTasks(self.task_files)
        self.schedules = Schedules(self.disk, options.serializer)
        unique = UniqueKeys(self.disk, self.task_files)
        self.recorder = Recorder(
            self.task_files, self.gates, unique, options.held_tasks, options.encode_finish
        )
        self.claimer = Claimer(self.task_files, self.gates, options.held_tasks, self.recorder)
        self._unique = unique
        self._options = options

    def open(self) -> None:
        """Create the missing folders, and enqueue the intents of processes that died."""
        self.disk.open()
        try:
            self.enqueuer = Enqueuer(
                self.task_files,
                self._unique,
                _sequence_numbers_of(self.disk.root),
                self._options.max_pending,
            )
            if not self._options.held_tasks.lease_path:
                self.enqueuer.enqueue_abandoned()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close; does nothing when called again."""
        self.task_files.close()
        self.disk.close()

    # Tasks

    def enqueue(self, batches: list[Batch]) -> None:
        """Enqueue the batches, and set the `ids` or the `error` of each."""
        self.enqueuer.enqueue(batches)

    def record_and_claim(
        self, owner: str, entries: list[Entry], claim: Claim | None
    ) -> tuple[list[bool], list[Row]]:
        """Record the outcomes, then claim; returns what was recorded and the claimed rows."""
        now = self._clock.micros()
        self.task_files.refresh()
        if claim is not None:
            self._check_lease(owner)
        recorded = self.recorder.record(owner, entries, now)
        rows: list[Row] = []
        if claim is not None:
            rows = self.claimer.claim(owner, claim, now)
            if rows and not self._has_lease(owner):
                # Fenced between the two checks. Undone here, the claims cost the tasks no crash.
                self.claimer.undo_claims(rows, now)
                self.task_files.flush()
                self._check_lease(owner)
        self.task_files.flush()
        return recorded, [copy.copy(row) for row in rows]

    def undo_claims(self, rows: list[Row]) -> None:
        """Undo claims whose caller was cancelled."""
        self.claimer.undo_claims(rows, self._clock.micros())
        self.task_files.flush()

    def cancel(self, task_id: str, reason: str) -> bool:
        """See `Recorder.cancel`."""
        is_cancelled = self.recorder.cancel(task_id, reason, self._clock.micros())
        self.task_files.flush()
        return is_cancelled

    def retry_dead(self, task_id: str, body: bytes | None, from_start: bool) -> bool:
        """Put a dead letter's task back into its queue; False when there is no such dead letter."""
        self.task_files.refresh()
        dead = self.task_files.read_dead(task_id)
        if dead is None:
            return False
        self.enqueuer.check_room(1)
        seq, now = self.enqueuer.next_seq(), self._clock.micros()
        is_retried = self.recorder.retry_dead(dead, body, from_start, seq, now)
        self.task_files.flush()
        return is_retried

    def purge_expired(self) -> int:
        """Delete expired records; returns how many. Also removes leftovers of dead processes."""
        now = self._clock.micros()
        purged = self.finished.purge(lambda summary: summary.expires_at <= now)
        self.finished.remove_leftovers()
        return purged

    # Leases and recovery

    def _has_lease(self, owner: str) -> bool:
        path = self.held_tasks.lease_path
        if path.startswith(f"workers/{owner}.") and self.disk.exists(path):
            return True
        lease = self.leases.of(owner)
        if lease is not None:
            self.held_tasks.lease_path = lease.path
        return lease is not None

    def _check_lease(self, owner: str) -> None:
        if not self._has_lease(owner):
            self.held_tasks.forget(owner)
            raise LeaseLost(owner)

    def renew(self, info: WorkerInfo, duration: int, *, is_first: bool) -> Renewal:
        """Renew the lease; returns the tasks that the owner still holds, by their files."""
        try:
            lease = self.leases.renew(info, duration, is_first=is_first)
        except LeaseLost:
            self.held_tasks.forget(info.id)
            raise
        self.held_tasks.lease_path = lease.path
        held: dict[str, int] = {}
        cancelled: set[str] = set()
        for each in self.held_tasks.of(info.id):
            claimed = each.claimed
            if self.disk.exists(claimed.cancelled().path):
                cancelled.add(claimed.id)
            elif not self.disk.exists(claimed.path) and claimed.id not in self.held_tasks.changing:
                continue
            held[claimed.id] = claimed.token
        return Renewal(held, frozenset(cancelled), self.leases.is_paused(info.id))

    def retire(self, owner: str) -> None:
        """Release all tasks of the owner, and remove its lease."""
        self.recorder.retire(owner, self._clock.micros())
        self.task_files.flush()
        lease = self.leases.of(owner)
        if lease is not None:
            self.leases.fence(lease)
        self.held_tasks.forget(owner)

    def give_back(self, max_crashes: int) -> list[GivenBack]:
        """Finish abandoned enqueues and changes, fence expired owners, give back their tasks."""
        self.enqueuer.enqueue_abandoned()
        self.task_files.recheck()
        for committed in self.task_files.index.committed():
            self.task_files.finish_change(committed)
        # The claims were read before the leases, so an owner that starts now is not among them.
        for lease in self.leases.all().values():
            if not self.leases.is_live(lease):
                self.leases.fence(lease)
        hit("file.recover.after_fence")
        by_owner: dict[str, list[Claimed]] = {}
        for claimed in self.task_files.index.running.values():
            by_owner.setdefault(claimed.owner, []).append(claimed)
        now = self._clock.micros()
        given_back: list[GivenBack] = []
        for owner, claims in by_owner.items():
            if not self._is_alive(self.leases.of(owner)):
                for row, _ in self.recorder.give_back(claims, now, max_crashes):
                    given_back.append(GivenBack(row.id, row.func_path, owner, row.status))
        self.task_files.flush()
        self.leases.remove_leftovers()
        return given_back

    def _is_alive(self, lease: Lease | None) -> bool:
        return lease is not None and self.leases.is_live(lease)

    def workers(self) -> list[WorkerInfo]:
        """Workers with a valid lease, in id order."""
        self.task_files.refresh()
        found: list[WorkerInfo] = []
        for owner, lease in sorted(self.leases.all().items()):
            if not self.leases.is_live(lease):
                continue
            unknown = WorkerInfo(
                id=owner, host="", pid=0, started_at=from_micros(0), last_heartbeat=from_micros(0)
            )
            info = self.leases.info(owner) or unknown
            running = tuple(sorted(self._held_by(owner)))
            paused = self.leases.is_paused(owner)
            found.append(msgspec.structs.replace(info, running=running, paused=paused))
        return found

    def held_by(self, owner: str) -> dict[str, int]:
        """The claims of an owner: task id to token."""
        self.task_files.refresh()
        return self._held_by(owner)

    def _held_by(self, owner: str) -> dict[str, int]:
        running = self.task_files.index.running.values()
        return {claimed.id: claimed.token for claimed in running if claimed.owner == owner}

    def count_waiting(self) -> int:
        """The number of live tasks that are not running: waiting, or failed and still held."""
        task_files = self.task_files
        task_files.refresh()
        for committed in task_files.index.committed():
            task_files.finish_change(committed)
        count = task_files.index.waiting
        for claimed in list(task_files.index.running.values()):
            held = self.held_tasks.held.get(claimed.id)
            if held is not None and held.claimed.token == claimed.token:
                live: Live | None = held.live
            else:
                live = task_files.read_claimed(claimed)
            count += live is not None and live.row.status is TaskStatus.RETRYING
        return count

    # Side data

    def is_held(self, owner: str, task_id: str, token: int) -> bool:
        """Whether that claim is the current one."""
        self.task_files.refresh()
        claimed = self.task_files.index.running.get(task_id)
        return claimed is not None and (claimed.owner, claimed.token) == (owner, token)

    def save_checkpoint(self, owner: str, task_id: str, token: int, data: bytes) -> bool:
        """Store the checkpoint; False when that claim is not the current one."""
        if not self.is_held(owner, task_id, token):
            return False
        self.task_files.checkpoints.save(task_id, token, data)
        return True

    def report_progress(self, owner: str, reports: Sequence[Progress]) -> None:
        """Store the reports whose claims are current."""
        for report in reports:
            if self.is_held(owner, report.task_id, report.token):
                self.task_files.checkpoints.report(report)

    def purge_checkpoints(self, before: int) -> int:
        """Delete old checkpoints of tasks that are neither live nor dead; returns how many."""
        self.task_files.refresh()
        purged = 0
        for task_id in self.task_files.checkpoints.task_ids():
            if self.task_files.index.is_live(task_id) or self.disk.exists(dead_path(task_id)):
                continue
            checkpoint = self.task_files.checkpoints.load(task_id)
            if checkpoint is not None and checkpoint.saved_at < before:
                self.task_files.checkpoints.clear(task_id)
                purged += 1
        return purged

    def get_dead(self, task_id: str) -> DeadLetter | None:
        """Return the dead letter with its checkpoint, or None."""
        dead = self.task_files.read_dead(task_id)
        if dead is None or dead.letter is None:
            return None
        checkpoint = self.task_files.checkpoints.load(task_id)
        data = None if checkpoint is None else checkpoint.data
        return msgspec.structs.replace(dead.letter, checkpoint=data)

    def fire_schedule(self, schedule: Schedule, advanced: Schedule, row: Row | None) -> bool:
        """Enqueue the row, then advance the schedule; False if the schedule has changed."""
        before = self.schedules.read_if_unchanged(schedule)
        if before is None:
            return False
        if row is not None:
            # The task first: after a crash in between, the schedule fires the same id again.
            batch = Batch([row])
            self.enqueuer.enqueue([batch])
            if batch.error is not None and not isinstance(batch.error, DuplicateTask):
                raise batch.error
            hit("file.schedule.after_task")
        return self.schedules.advance(before, advanced)

    def set_paused(self, queue: str, paused: bool) -> None:
        """Pause or resume a queue."""
        path = f"paused/{queue}.paused"
        if paused:
            self.disk.replace(path, b"")
        else:
            self.disk.remove(path)
        self.disk.sync("paused")
