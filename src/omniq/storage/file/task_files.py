"""Where the truth about a task is, and the one protocol by which it changes.

A task's record is never changed in place. A change writes the new record beside it as a part, then
renames the old file to `.done`, a name that says which part holds from now on: that rename is the
change. Moving the part to its place is left for whoever comes by, and can be done twice.
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
from omniq.storage.file.checkpoints import Notes
from omniq.storage.file.encoding import (
    ENDED,
    LIVE,
    Ended,
    Live,
    NotARecord,
    Waiter,
    decode_part,
    decode_waiter,
)
from omniq.storage.file.file_names import Claimed, Committed, dead_path, result_path, task_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.index import Index
from omniq.storage.file.listed_records import ListedRecords
from omniq.storage.file.shared_file import gather
from omniq.storage.file.wakeups import Watch

T = TypeVar("T")

_TRIES = 50
"""How often a reader follows a task that is moved on under its eyes."""

_RESCAN_AFTER = 60.0
"""Seconds. A folder of a hundred thousand names takes most of one to read."""


class Change(msgspec.Struct):
    """A task's next record. It holds once the file `source` has been renamed to `committed`."""

    source: str
    committed: Committed
    after: Live | Ended
    holds: bool = False


class Ledger:
    """The queue folder, the records in it, and the changes under way."""

    def __init__(self, disk: Disk, clock: Clock, *, watched: bool = True) -> None:
        self.disk = disk
        self.clock = clock
        self.index = Index()
        self.notes = Notes(disk, clock)
        self.watch: Watch | None = None
        self._is_watched = watched
        self._scanned_at = -1
        self._rescanned_at: float | None = None
        self._unsynced: set[str] = set()
        self._applied: dict[str, Committed] = {}
        self._unreadable: set[str] = set()
        self._arrivals_met = 0
        self._news: set[str] | None = set()

    def close(self) -> None:
        """May be called twice."""
        if self.watch is not None:
            self.watch.close()

    # Knowing

    def refresh(self) -> set[str] | None:
        """Learn what has changed; ids of tasks that were touched, None when it may be any."""
        is_scanned = self._rescanned_at is not None
        if self.watch is not None and is_scanned:
            events = self.watch.read()
            if events is not None:
                touched = self.index.follow(events)
                if touched and self._news is not None:
                    self._news |= touched
                return touched
        elif is_scanned and not self._may_have_changed():
            return set()
        self.rescan()
        return None

    def recheck(self) -> None:
        """Learn what has changed, and once a minute from the folder itself, whatever the watch says."""
        before = self._rescanned_at
        if before is None or self.clock.monotonic() - before > _RESCAN_AFTER:
            self.rescan()
        else:
            self.refresh()

    def rescan(self) -> None:
        """Read the names of the whole queue folder."""
        if self._is_watched and self.watch is None:
            # Not before something has to be known: watches are scarce, and many objects need none.
            self.watch = Watch.open(str(self.disk.root / "queue"))
            self._is_watched = self.watch is not None
        if self.watch is not None:
            self._rescan_watched(self.watch)
        else:
            changed_at = self.disk.changed_at("queue")
            # Only if a change from now on would show in the folder's time can that be relied on.
            is_settled = self.disk.disk_time() > changed_at
            self.index.replace(self.disk.scan("queue"))
            self._scanned_at = changed_at if is_settled else -1
        self._rescanned_at = self.clock.monotonic()
        self._unreadable.clear()
        self._news = None

    def _rescan_watched(self, watch: Watch) -> None:
        watch.read()
        for _ in range(_TRIES):
            self.index.replace(self.disk.scan("queue"))
            # A name that was moved while the folder was read may have been missed: it is told now.
            events = watch.read()
            if events is not None:
                self.index.follow(events)
                return

    def forget_news(self) -> None:
        """Begin to gather anew what `has_news_of` tells."""
        self._news = set()

    def has_news_of(self, task_id: str) -> bool:
        """Whether others may have touched the task since then, however often we have looked."""
        return self._news is None or task_id in self._news

    def _may_have_changed(self) -> bool:
        return self.disk.changed_at("queue") != self._scanned_at

    def learn_order(self) -> None:
        """Read what ordering needs to know of every waiting task that was not read yet."""
        index, now = self.index, self.clock.micros()
        listed = ListedRecords(self.disk)
        for task_id, inode in sorted(index.unread.items(), key=itemgetter(1)):
            if task_id in self._unreadable:
                continue
            read = partial(listed.read, inode=inode)
            try:
                waiter = self._read(task_path(task_id), decode_waiter, task_id, _id_of_waiter, read)
            except PermissionError:
                # Not ours, or not now. It is not in the way of others; the next scan tries again.
                self._unreadable.add(task_id)
                continue
            if waiter is None:
                index.unread.pop(task_id, None)
            else:
                index.learn(waiter, now)

    def meet_arrivals(self) -> None:
        """A claim looks at all that waits."""
        self.learn_order()
        self._arrivals_met = self.index.arrivals

    def has_arrivals(self) -> bool:
        """Whether tasks have come to wait that no claim has looked at; others may have read them."""
        return self.index.arrivals != self._arrivals_met

    # Reading

    def read_waiting(self, task_id: str) -> Live | None:
        """The record of a task that nobody holds; None when it is not waiting (any more)."""
        return self._read(task_path(task_id), LIVE.decode, task_id, _id_of_record)

    def read_claimed(self, claimed: Claimed) -> Live | None:
        """The record of a task that is held, as the claim has changed it; None when it is not."""
        live = self._read(claimed.path, LIVE.decode, claimed.id, _id_of_record)
        if live is None:
            return None
        row = live.row
        if row.owner is None and row.token + 1 == claimed.token:
            row_rules.claim(row, claimed.owner, claimed.started)
        if (row.owner, row.token) != (claimed.owner, claimed.token):
            self.disk.quarantine(claimed.path, "the record is not of the claim in its name")
            self.index.forget(claimed.path)
            return None
        row.cancel_requested = claimed.is_cancelled
        return live

    def read_held_waiter(self, claimed: Claimed) -> Live | None:
        """The record of a task just claimed, as it was while it waited."""
        return self._read(claimed.path, LIVE.decode, claimed.id, _id_of_record)

    def read_ended(self, task_id: str) -> Ended | None:
        """The record of a task that has ended, past its time or not."""
        return self._read(result_path(task_id), ENDED.decode, task_id, _id_of_record)

    def read_dead(self, task_id: str) -> Ended | None:
        """The record of a dead letter."""
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
            self.index.forget(path)
            return None
        return record

    def find_live(self, task_id: str) -> Live | None:
        """The record of a task that has not ended, wherever it is moved meanwhile."""
        touched = self.refresh()
        for _ in range(_TRIES):
            for committed in self.index.committed(task_id):
                self.carry_out(committed)
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
                # Gone without a word: set aside as corrupt by somebody else, most likely.
                self.rescan()
        return None

    def find(self, task_id: str) -> Live | Ended | None:
        """The record of the task, live or ended; None also when its time has passed."""
        ended = None
        for attempt in range(_TRIES):
            live = self.find_live(task_id)
            if live is not None:
                return live
            ended = self.read_ended(task_id)
            touched = self.refresh()
            # It may have been enqueued, or have ended, between the two looks.
            if attempt > 0 if touched is None else task_id not in touched:
                break
        if ended is None or ended.expires_at <= self.clock.micros():
            return None
        return ended

    def standing(self, task_id: str) -> row_rules.Row | None:
        """The row that occupies the id: live, a dead letter, or ended and not past its time."""
        found = self.find(task_id) or self.read_dead(task_id)
        return None if found is None else found.row

    # Changing

    def change(self, source: str, before: int, task_id: str, after: Live | Ended) -> Change:
        """A change of the record in `source`, whose token was `before`. Nothing happens yet."""
        return Change(source, Committed(task_id, before, self.disk.nonce()), after)

    def commit(self, changes: Sequence[Change]) -> None:
        """Make the changes, those whose source is still there: `holds` says which."""
        self.prepare(changes)
        undecided = list(reversed(changes))
        try:
            hit("file.record.after_part")
            while undecided:
                self.decide(undecided.pop())
        except BaseException:
            for change in undecided:
                self.drop_parts(change)
            raise

    def prepare(self, changes: Sequence[Change]) -> None:
        """Write the parts. Until `decide` they mean nothing."""
        by_id = {change.committed.id: change for change in changes}
        records = ((task_id, _encode(change.after)) for task_id, change in by_id.items())
        self.disk.write_all(
            [
                ([name for task_id in ids for name in _parts(by_id[task_id])], data)
                for ids, data in gather(records)
            ]
        )

    def decide(self, change: Change) -> None:
        """Make a prepared change if its source is still there; drop it if not."""
        committed = change.committed
        change.holds = self.disk.move(change.source, committed.path)
        if not change.holds:
            self.drop_parts(change)
            return
        self._unsynced.add("queue")
        self.index.commit(committed)
        hit("file.record.after_commit")
        self._put_in_place(committed, change.after)
        self._applied[committed.path] = committed

    def drop_parts(self, change: Change) -> None:
        """Forget a change that was prepared and is not wanted any more."""
        for part in _parts(change):
            self.disk.remove_quietly(part)

    def carry_out(self, committed: Committed) -> None:
        """Finish a change that somebody made and perhaps did not live to finish."""
        if committed.path in self._applied:
            return
        hit("file.recover.before_part")
        try:
            data = self.disk.read_record(committed.part, committed.id)
            if data is not None:
                self._put_in_place(committed, decode_part(data))
            else:
                # Moved already, but the dead letter may have been the step that was not reached.
                self._move_dead_part(committed)
        except NotARecord as error:
            self.disk.quarantine(committed.part, str(error))
            self.disk.quarantine(committed.path, f"what it came to cannot be read: {error}")
        self._unsynced.update(("queue", "results"))
        self._applied[committed.path] = committed
        hit("file.recover.after_part")

    def _put_in_place(self, committed: Committed, after: Live | Ended) -> None:
        """Move the part to where it belongs. Of many that do so, one does; the rest find it done."""
        if isinstance(after, Ended):
            self._put_ended(committed, after)
        else:
            self._put_live(committed, after)

    def _put_live(self, committed: Committed, live: Live) -> None:
        row = live.row
        if live.clears_notes:
            self.notes.clear(row.id)
        hit("file.requeue.before_task")
        if row.owner is not None:
            claimed = Claimed(row.id, row.token, row.owner, row.started_at)
            if self.disk.move(committed.part, claimed.path):
                self.index.hold(claimed)
        elif self.disk.move(committed.part, task_path(row.id)):
            self.index.put(Waiter.of(row), self.clock.micros())
        hit("file.requeue.after_task")

    def _put_ended(self, committed: Committed, ended: Ended) -> None:
        self._unsynced.add("results")
        self.notes.end(ended.row.id, keeps_checkpoint=ended.letter is not None)
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

    def touch(self, folder: str) -> None:
        """A name in this folder has changed; `flush` makes it last."""
        self._unsynced.add(folder)

    def flush(self) -> None:
        """Make every change so far last as long as was asked for, then forget how it came about."""
        if self._unsynced:
            self.disk.sync(*sorted(self._unsynced))
            self._unsynced.clear()
        hit("file.record.before_clear")
        for committed in self._applied.values():
            # Only now: until the new record's name lasts, the change must be found and finished.
            self.disk.remove_quietly(committed.path)
            self.index.clear(committed)
        self._applied.clear()


def _parts(change: Change) -> list[str]:
    """The names of the record to be: a dead letter's has two."""
    after, committed = change.after, change.committed
    if isinstance(after, Ended) and after.letter is not None:
        return [committed.part, committed.dead_part]
    return [committed.part]


def _encode(record: Live | Ended) -> bytes:
    return LIVE.encode(record) if isinstance(record, Live) else ENDED.encode(record)


def _id_of_record(record: Live | Ended) -> str:
    return record.row.id


def _id_of_waiter(waiter: Waiter) -> str:
    return waiter.id
