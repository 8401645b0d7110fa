"""Everything a file store does, without waiting for anything but the disk. Runs in one thread."""

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
from omniq.storage.file.enqueue import Batch, Entrance, Numbers
from omniq.storage.file.file_names import Claimed, dead_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.finished import Archive
from omniq.storage.file.gates import Gatekeeper
from omniq.storage.file.leases import Lease, Leases
from omniq.storage.file.record import EncodeFinish, Holdings, Recorder
from omniq.storage.file.schedules import Schedules
from omniq.storage.file.task_files import Ledger
from omniq.storage.file.unique_keys import UniqueKeys
from omniq.storage.row_rules import Row
from omniq.storage.types import Claim, Entry, GivenBack, Renewal

_SESSION = 12
"""How much of a fresh id names a storage object in its files: the random end. Names cost space."""

_numbers: WeakValueDictionary[tuple[int, int], Numbers] = WeakValueDictionary()
_numbers_lock = threading.Lock()


def _numbers_of(root: Path) -> Numbers:
    """Storage objects of one process on one folder count together, so that order holds among them."""
    facts = os.stat(root)
    with _numbers_lock:
        return _numbers.setdefault((facts.st_dev, facts.st_ino), Numbers())


class Needs(msgspec.Struct):
    """What a store is made of."""

    root: Path
    is_durable: bool
    clock: Clock
    serializer: Serializer
    max_pending: int | None
    holdings: Holdings
    encode_finish: EncodeFinish
    is_watched: bool = True


class Store:
    """One folder. `open` comes first; after that every method leaves the store whole."""

    def __init__(self, needs: Needs) -> None:
        self._clock = needs.clock
        self.holdings = needs.holdings
        self.disk = Disk(
            needs.root, is_durable=needs.is_durable, session=needs.clock.new_id()[-_SESSION:]
        )
        self.ledger = Ledger(self.disk, needs.clock, watched=needs.is_watched)
        self.leases = Leases(self.disk, needs.clock)
        self.gatekeeper = Gatekeeper(self.disk, self.ledger)
        self.archive = Archive(self.ledger)
        self.schedules = Schedules(self.disk, needs.serializer)
        unique = UniqueKeys(self.disk, self.ledger)
        self.recorder = Recorder(
            self.ledger, self.gatekeeper, unique, needs.holdings, needs.encode_finish
        )
        self.claimer = Claimer(self.ledger, self.gatekeeper, needs.holdings, self.recorder)
        self._unique = unique
        self._needs = needs

    def open(self) -> None:
        """Make what is missing, and finish what processes that died have left."""
        self.disk.open()
        try:
            self.entrance = Entrance(
                self.ledger, self._unique, _numbers_of(self.disk.root), self._needs.max_pending
            )
            if not self._needs.holdings.lease_path:
                self.entrance.complete_abandoned()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """May be called twice."""
        self.ledger.close()
        self.disk.close()

    # Tasks

    def enqueue(self, batches: list[Batch]) -> None:
        """Enqueue the batches; each knows afterwards what became of it."""
        self.entrance.enqueue(batches)

    def turn(
        self, owner: str, entries: list[Entry], claim: Claim | None
    ) -> tuple[list[bool], list[Row]]:
        """Record, then claim."""
        now = self._clock.micros()
        self.ledger.refresh()
        if claim is not None:
            self._check_lease(owner)
        recorded = self.recorder.record(owner, entries, now)
        rows: list[Row] = []
        if claim is not None:
            rows = self.claimer.claim(owner, claim, now)
            if rows and not self._has_lease(owner):
                # Fenced between the two looks: nobody would give these back but by a charge.
                self.claimer.give_up_unseen(rows, now)
                self.ledger.flush()
                self._check_lease(owner)
        self.ledger.flush()
        return recorded, [copy.copy(row) for row in rows]

    def give_up(self, rows: list[Row]) -> None:
        """Undo claims whose caller has gone away."""
        self.claimer.give_up_unseen(rows, self._clock.micros())
        self.ledger.flush()

    def cancel(self, task_id: str, reason: str) -> bool:
        """See `Recorder.cancel`."""
        is_cancelled = self.recorder.cancel(task_id, reason, self._clock.micros())
        self.ledger.flush()
        return is_cancelled

    def retry_dead(self, task_id: str, body: bytes | None, from_start: bool) -> bool:
        """Put a dead letter's task back in the queue."""
        self.ledger.refresh()
        dead = self.ledger.read_dead(task_id)
        if dead is None:
            return False
        self.entrance.check_room(1)
        seq, now = self.entrance.next_seq(), self._clock.micros()
        is_back = self.recorder.revive(dead, body, from_start, seq, now)
        self.ledger.flush()
        return is_back

    def purge_expired(self) -> int:
        """Forget tasks whose record's time has passed, and what dead processes left long ago."""
        now = self._clock.micros()
        purged = self.archive.purge(lambda brief: brief.expires_at <= now)
        self.archive.sweep()
        return purged

    # Owners

    def _has_lease(self, owner: str) -> bool:
        path = self.holdings.lease_path
        if path.startswith(f"workers/{owner}.") and self.disk.exists(path):
            return True
        lease = self.leases.of(owner)
        if lease is not None:
            self.holdings.lease_path = lease.path
        return lease is not None

    def _check_lease(self, owner: str) -> None:
        if not self._has_lease(owner):
            self.holdings.forget(owner)
            raise LeaseLost(owner)

    def renew(self, info: WorkerInfo, duration: int, *, is_first: bool) -> Renewal:
        """Renew the lease, and look at the files of what the owner holds."""
        try:
            lease = self.leases.renew(info, duration, is_first=is_first)
        except LeaseLost:
            self.holdings.forget(info.id)
            raise
        self.holdings.lease_path = lease.path
        held: dict[str, int] = {}
        cancelled: set[str] = set()
        for each in self.holdings.of(info.id):
            claimed = each.claimed
            if self.disk.exists(claimed.cancelled().path):
                cancelled.add(claimed.id)
            elif not self.disk.exists(claimed.path) and claimed.id not in self.holdings.changing:
                continue
            held[claimed.id] = claimed.token
        return Renewal(held, frozenset(cancelled), self.leases.is_paused(info.id))

    def retire(self, owner: str) -> None:
        """Release all that the owner holds, and forget its lease."""
        self.recorder.retire(owner, self._clock.micros())
        self.ledger.flush()
        lease = self.leases.of(owner)
        if lease is not None:
            self.leases.end(lease)
        self.holdings.forget(owner)

    def give_back(self, max_crashes: int) -> list[GivenBack]:
        """Finish what was left unfinished, fence owners whose lease has ended, take what they held."""
        self.entrance.complete_abandoned()
        self.ledger.recheck()
        for committed in self.ledger.index.committed():
            self.ledger.carry_out(committed)
        # The claims were read first: an owner that comes into being only now is not among them.
        for lease in self.leases.all().values():
            if not self.leases.is_live(lease):
                self.leases.end(lease)
        hit("file.recover.after_fence")
        by_owner: dict[str, list[Claimed]] = {}
        for claimed in self.ledger.index.running.values():
            by_owner.setdefault(claimed.owner, []).append(claimed)
        now = self._clock.micros()
        given_back: list[GivenBack] = []
        for owner, claims in by_owner.items():
            if not self._is_alive(self.leases.of(owner)):
                for row, _ in self.recorder.give_back(claims, now, max_crashes):
                    given_back.append(GivenBack(row.id, row.func_path, owner, row.status))
        self.ledger.flush()
        self.leases.sweep()
        return given_back

    def _is_alive(self, lease: Lease | None) -> bool:
        return lease is not None and self.leases.is_live(lease)

    def workers(self) -> list[WorkerInfo]:
        """Workers whose lease has not ended, in id order."""
        self.ledger.refresh()
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
        """Task ids and tokens of what the owner holds."""
        self.ledger.refresh()
        return self._held_by(owner)

    def _held_by(self, owner: str) -> dict[str, int]:
        running = self.ledger.index.running.values()
        return {claimed.id: claimed.token for claimed in running if claimed.owner == owner}

    def count_waiting(self) -> int:
        """How many live tasks do not run: nobody holds them, or their owner is about to put them back."""
        ledger = self.ledger
        ledger.refresh()
        for committed in ledger.index.committed():
            ledger.carry_out(committed)
        count = ledger.index.waiting
        for claimed in list(ledger.index.running.values()):
            held = self.holdings.held.get(claimed.id)
            if held is not None and held.claimed.token == claimed.token:
                live: Live | None = held.live
            else:
                live = ledger.read_claimed(claimed)
            count += live is not None and live.row.status is TaskStatus.RETRYING
        return count

    # Beside the task

    def is_held(self, owner: str, task_id: str, token: int) -> bool:
        """Whether that claim is the current one."""
        self.ledger.refresh()
        claimed = self.ledger.index.running.get(task_id)
        return claimed is not None and (claimed.owner, claimed.token) == (owner, token)

    def save_checkpoint(self, owner: str, task_id: str, token: int, data: bytes) -> bool:
        """Keep the checkpoint if the claim is the current one."""
        if not self.is_held(owner, task_id, token):
            return False
        self.ledger.notes.save(task_id, token, data)
        return True

    def report_progress(self, owner: str, reports: Sequence[Progress]) -> None:
        """Keep those reports whose claim is the current one."""
        for report in reports:
            if self.is_held(owner, report.task_id, report.token):
                self.ledger.notes.report(report)

    def purge_checkpoints(self, before: int) -> int:
        """Forget checkpoints that belong to nothing."""
        self.ledger.refresh()
        purged = 0
        for task_id in self.ledger.notes.saved():
            if self.ledger.index.is_live(task_id) or self.disk.exists(dead_path(task_id)):
                continue
            checkpoint = self.ledger.notes.load(task_id)
            if checkpoint is not None and checkpoint.saved_at < before:
                self.ledger.notes.clear(task_id)
                purged += 1
        return purged

    def get_dead(self, task_id: str) -> DeadLetter | None:
        """The dead letter with its checkpoint."""
        dead = self.ledger.read_dead(task_id)
        if dead is None or dead.letter is None:
            return None
        checkpoint = self.ledger.notes.load(task_id)
        data = None if checkpoint is None else checkpoint.data
        return msgspec.structs.replace(dead.letter, checkpoint=data)

    def fire_schedule(self, schedule: Schedule, advanced: Schedule, row: Row | None) -> bool:
        """Enqueue the row, then advance the schedule, if it is still as it was read."""
        before = self.schedules.reading(schedule)
        if before is None:
            return False
        if row is not None:
            # The task first: dying in between leaves a schedule that fires the same id once more.
            batch = Batch([row])
            self.entrance.enqueue([batch])
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
