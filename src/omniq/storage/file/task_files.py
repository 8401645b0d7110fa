"""Task files: reads the records of tasks, and changes them by one protocol.

A task's record is never changed in place. A change writes the new record to a separate file, the
part, and then renames the old file to `.done`, a name that contains the nonce of the part: this
rename commits the change. Any process may then move the part to its final name; doing so twice is
harmless. The table at the top of `storage` shows the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TypeVar

import msgspec

from omniq.clock import Clock
from omniq.failpoints import hit
from omniq.storage import row_rules
from omniq.storage.file.checkpoints import Checkpoints
from omniq.storage.file.encoding import (
    ENDED,
    LIVE,
    Ended,
    IndexEntry,
    Live,
    NotARecord,
    decode_index_entry,
    decode_part,
)
from omniq.storage.file.file_names import Claimed, Committed, dead_path, result_path, task_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.index import Index
from omniq.storage.file.listed_records import ListedRecords
from omniq.storage.file.shared_file import pack
from omniq.storage.file.wakeups import FolderWatch

T = TypeVar("T")

_TRIES = 50
"""How often a reader looks up a task again whose file was renamed before it could be read."""

_RESCAN_AFTER = 60.0
"""Seconds between full listings. A folder of a hundred thousand names takes almost one to list."""


class Change(msgspec.Struct):
    """A task's next record. It is valid once the file `source` has been renamed to `committed`."""

    source: str
    committed: Committed
    after: Live | Ended
    is_committed: bool = False


class TaskFiles:
    """The queue folder, the records in it, and the changes under way."""

    def __init__(self, disk: Disk, clock: Clock, *, watched: bool = True) -> None:
        self.disk = disk
        self.clock = clock
        self.index = Index()
        self.checkpoints = Checkpoints(disk, clock)
        self.watch: FolderWatch | None = None
        self._is_watched = watched
        self._scanned_at = -1
        self._rescanned_at: float | None = None
        self._unsynced: set[str] = set()
        self._applied: dict[str, Committed] = {}
        self._unreadable: set[str] = set()
        self._arrivals_read = 0
        self._touched: set[str] | None = set()

    def close(self) -> None:
        """Close; does nothing when called again."""
        if self.watch is not None:
            self.watch.close()

    # Following changes of the folder

    def refresh(self) -> set[str] | None:
        """Update the index; returns the ids of tasks that others changed, None when unknown."""
        is_scanned = self._rescanned_at is not None
        if self.watch is not None and is_scanned:
            events = self.watch.read()
            if events is not None:
                touched = self.index.apply_events(events)
                if touched and self._touched is not None:
                    self._touched |= touched
                return touched
        elif is_scanned and not self._may_have_changed():
            return set()
        self.rescan()
        return None

    def recheck(self) -> None:
        """Update the index; once a minute by a full listing, in case the watch missed a change."""
        before = self._rescanned_at
        if before is None or self.clock.monotonic() - before > _RESCAN_AFTER:
            self.rescan()
        else:
            self.refresh()

    def rescan(self) -> None:
        """Read the names of the whole queue folder."""
        if self._is_watched and self.watch is None:
            # Opened as late as possible: inotify watches are limited, and many storages need none.
            self.watch = FolderWatch.open(str(self.disk.root / "queue"))
            self._is_watched = self.watch is not None
        if self.watch is not None:
            self._rescan_watched(self.watch)
        else:
            changed_at = self.disk.changed_at("queue")
            # The folder's time is reliable only if a change from now on would get a later time.
            is_settled = self.disk.disk_time() > changed_at
            self.index.replace(self.disk.scan("queue"))
            self._scanned_at = changed_at if is_settled else -1
        self._rescanned_at = self.clock.monotonic()
        self._unreadable.clear()
        self._touched = None

    def _rescan_watched(self, watch: FolderWatch) -> None:
        watch.read()
        for _ in range(_TRIES):
            self.index.replace(self.disk.scan("queue"))
            # The listing may have missed a name that was moved meanwhile: the events include it.
            events = watch.read()
            if events is not None:
                self.index.apply_events(events)
                return

    def clear_touched(self) -> None:
        """Start a new collection of changed tasks for `may_be_touched`."""
        self._touched = set()

    def may_be_touched(self, task_id: str) -> bool:
        """Whether others may have changed the task since `clear_touched`, refreshed or not."""
        return self._touched is None or task_id in self._touched

    def _may_have_changed(self) -> bool:
        return self.disk.changed_at("queue") != self._scanned_at

    def read_unread(self) -> None:
        """Read the order of every waiting task that was not read yet."""
        index, now = self.index, self.clock.micros()
        listed = ListedRecords(self.disk)
        for task_id, inode in sorted(index.unread.items(), key=itemgetter(1)):
            if task_id in self._unreadable:
                continue
            read = partial(listed.read, inode=inode)
            try:
                entry = self._read(
                    task_path(task_id), decode_index_entry, task_id, _id_of_entry, read
                )
            except PermissionError:
                # Skipped, so that it does not block the other tasks; the next listing tries again.
                self._unreadable.add(task_id)
                continue
            if entry is None:
                index.unread.pop(task_id, None)
            else:
                index.set_order(entry, now)

    def read_arrivals(self) -> None:
        """Read the order of all waiting tasks, for a claim."""
        self.read_unread()
        self._arrivals_read = self.index.arrivals

    def has_arrivals(self) -> bool:
        """Whether tasks were added that no claim of this storage has considered yet."""
        return self.index.arrivals != self._arrivals_read

    # Reading

    def read_waiting(self, task_id: str) -> Live | None:
        """Return the record of a waiting task; None when it is not waiting (any more)."""
        return self._read(task_path(task_id), LIVE.decode, task_id, _id_of_record)

    def read_claimed(self, claimed: Claimed) -> Live | None:
        """Return the record of a held task with the claim applied; None when it is not held."""
        live = self._read(claimed.path, LIVE.decode, claimed.id, _id_of_record)
        if live is None:
            return None
        row = live.row
        if row.owner is None and row.token + 1 == claimed.token:
            row_rules.claim(row, claimed.owner, claimed.started)
        if (row.owner, row.token) != (claimed.owner, claimed.token):
            self.disk.quarantine(claimed.path, "the record is not of the claim in its name")
            self.index.remove_path(claimed.path)
            return None
        row.cancel_requested = claimed.is_cancelled
        return live

    def read_just_claimed(self, claimed: Claimed) -> Live | None:
        """Return the record of a task that was just claimed, without the claim applied."""
        return self._read(claimed.path, LIVE.decode, claimed.id, _id_of_record)

    def read_ended(self, task_id: str) -> Ended | None:
        """Return the record of a task that has ended, expired or not; None when there is none."""
        return self._read(result_path(task_id), ENDED.decode, task_id, _id_of_record)

    def read_dead(self, task_id: str) -> Ended | None:
        """Return the record of a dead letter, or None."""
        ended = self._read(dead_path(task_id), ENDED.decode, task_id, _id_of_record)
        if ended is not None and ended.letter is None:
            self.disk.quarantine(dead_path(task_id), "the record has no dead letter")
            return None
        return ended

    def _read(
        self,
        path: str,
        decode: Callable[[bytes], T],
        task_id: str,
        id_of: Callable[[T], str],
        read: Callable[[str, str], bytes | None] | None = None,
    ) -> T | None:
        try:
            data = (read or self.disk.read_record)(path, task_id)
            if data is None:
                return None
            record = decode(data)
            if id_of(record) != task_id:
                raise NotARecord(f"the record of another task, {id_of(record)}")
        except NotARecord as error:
            self.disk.quarantine(path, str(error))
            self.index.remove_path(path)
            return None
        return record

    def find_live(self, task_id: str) -> Live | None:
        """Return the record of a live task, also when its file is renamed meanwhile; or None."""
        touched = self.refresh()
        for _ in range(_TRIES):
            for committed in self.index.committed(task_id):
                self.finish_change(committed)
            if self.index.is_waiting(task_id):
                live = self.read_waiting(task_id)
            elif (claimed := self.index.running.get(task_id)) is not None:
                live = self.read_claimed(claimed)
            else:
                return None
            if live is not None:
                return live
            touched = self.refresh()
            if touched is not None and task_id not in touched:
                # Gone without an event: another process has probably moved it to `corrupt/`.
                self.rescan()
        return None

    def find(self, task_id: str) -> Live | Ended | None:
        """Return the record of the task, live or ended and not expired; or None."""
        ended = None
        for attempt in range(_TRIES):
            live = self.find_live(task_id)
            if live is not None:
                return live
            ended = self.read_ended(task_id)
            touched = self.refresh()
            # It may have been enqueued, or have ended, between the two reads.
            if attempt > 0 if touched is None else task_id not in touched:
                break
        if ended is None or ended.expires_at <= self.clock.micros():
            return None
        return ended

    def row_with_id(self, task_id: str) -> row_rules.Row | None:
        """Return the row that occupies the id: live, a dead letter, or ended and not expired."""
        found = self.find(task_id) or self.read_dead(task_id)
        return None if found is None else found.row

    # Changing

    def change(self, source: str, before: int, task_id: str, after: Live | Ended) -> Change:
        """Build a change of the record in `source`, whose token was `before`. Writes nothing."""
        return Change(source, Committed(task_id, before, self.disk.nonce()), after)

    def commit(self, changes: Sequence[Change]) -> None:
        """Commit the changes whose source still exists, and set `is_committed` of each."""
        self.prepare(changes)
        undecided = list(reversed(changes))
        try:
            hit("file.record.after_part")
            while undecided:
                self.commit_prepared(undecided.pop())
        except BaseException:
            for change in undecided:
                self.delete_parts(change)
            raise

    def prepare(self, changes: Sequence[Change]) -> None:
        """Write the parts. They have no effect until `commit_prepared`."""
        by_id = {change.committed.id: change for change in changes}
        records = ((task_id, _encode(change.after)) for task_id, change in by_id.items())
        self.disk.write_all(
            [
                ([name for task_id in ids for name in _parts(by_id[task_id])], data)
                for ids, data in pack(records)
            ]
        )

    def commit_prepared(self, change: Change) -> None:
        """Commit a prepared change if its source still exists; else delete its parts."""
        committed = change.committed
        change.is_committed = self.disk.move(change.source, committed.path)
        if not change.is_committed:
            self.delete_parts(change)
            return
        self._unsynced.add("queue")
        self.index.commit(committed)
        hit("file.record.after_commit")
        self._move_part(committed, change.after)
        self._applied[committed.path] = committed

    def delete_parts(self, change: Change) -> None:
        """Delete the parts of a prepared change that is not committed."""
        for part in _parts(change):
            self.disk.remove_quietly(part)

    def finish_change(self, committed: Committed) -> None:
        """Finish a committed change: its process may have died before it could."""
        if committed.path in self._applied:
            return
        hit("file.recover.before_part")
        try:
            data = self.disk.read_record(committed.part, committed.id)
            if data is not None:
                self._move_part(committed, decode_part(data))
            else:
                # The part is in place, but perhaps not yet that of the dead letter.
                self._move_dead_part(committed)
        except NotARecord as error:
            self.disk.quarantine(committed.part, str(error))
            self.disk.quarantine(committed.path, f"the new record cannot be read: {error}")
        self._unsynced.update(("queue", "results"))
        self._applied[committed.path] = committed
        hit("file.recover.after_part")

    def _move_part(self, committed: Committed, after: Live | Ended) -> None:
        """Move the part to its final name. Of several processes that do so, one succeeds."""
        if isinstance(after, Ended):
            self._put_ended(committed, after)
        else:
            self._put_live(committed, after)

    def _put_live(self, committed: Committed, live: Live) -> None:
        row = live.row
        if live.clears_notes:
            self.checkpoints.clear(row.id)
        hit("file.requeue.before_task")
        if row.owner is not None:
            claimed = Claimed(row.id, row.token, row.owner, row.started_at)
            if self.disk.move(committed.part, claimed.path):
                self.index.hold(claimed)
        elif self.disk.move(committed.part, task_path(row.id)):
            self.index.put(IndexEntry.of(row), self.clock.micros())
        hit("file.requeue.after_task")

    def _put_ended(self, committed: Committed, ended: Ended) -> None:
        self._unsynced.add("results")
        self.checkpoints.task_ended(ended.row.id, keeps_checkpoint=ended.letter is not None)
        hit("file.record.before_result")
        if ended.row.result_ttl:
            self.disk.move(committed.part, result_path(committed.id))
        else:
            self.disk.remove(committed.part)
        hit("file.record.after_result")
        if ended.letter is not None:
            self._move_dead_part(committed)

    def _move_dead_part(self, committed: Committed) -> None:
        if self.disk.move(committed.dead_part, dead_path(committed.id)):
            self._unsynced.add("dead")

    def mark_unsynced(self, folder: str) -> None:
        """Have `flush` sync this folder, in which a name has changed."""
        self._unsynced.add(folder)

    def flush(self) -> None:
        """Sync the changed folders, then remove the `.done` files of finished changes."""
        if self._unsynced:
            self.disk.sync(*sorted(self._unsynced))
            self._unsynced.clear()
        hit("file.record.before_clear")
        for committed in self._applied.values():
            # After the sync: until the new record's name is durable, the change may have to be
            # finished again.
            self.disk.remove_quietly(committed.path)
            self.index.clear(committed)
        self._applied.clear()


def _parts(change: Change) -> list[str]:
    """The paths of the new record: two if it has a dead letter."""
    after, committed = change.after, change.committed
    if isinstance(after, Ended) and after.letter is not None:
        return [committed.part, committed.dead_part]
    return [committed.part]


def _encode(record: Live | Ended) -> bytes:
    return LIVE.encode(record) if isinstance(record, Live) else ENDED.encode(record)


def _id_of_record(record: Live | Ended) -> str:
    return record.row.id


def _id_of_entry(entry: IndexEntry) -> str:
    return entry.id
