"""Enqueue: adds tasks to the queue folder: complete, durable, and each id once.

    tmp/<nonce>.tmp           a draft: written and synced; has no effect yet
    tmp/<id>.task.tmp         the intent, linked: of several processes that enqueue one id, one
                              succeeds; not claimable yet
    queue/<id>.task           renamed: enqueued

Between the second and the third step the id is looked up once more. A process that enqueued it
earlier has used the same name, so the lookup finds it. An intent that a process left when it died
is complete; another storage moves it into the queue later.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from omniq.errors import DuplicateTask, OmniqError, QueueFull
from omniq.failpoints import hit
from omniq.storage.file.encoding import LIVE, IndexEntry, Live, NotARecord
from omniq.storage.file.file_names import dead_path, id_of, intent_path, result_path, task_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_file import pack
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.file.unique_keys import UniqueKeys
from omniq.storage.row_rules import Row

_ABANDONED_AFTER = 5 * 10**9
"""Nanoseconds after which an intent counts as left behind by a process that died."""


class Batch(msgspec.Struct):
    """The rows of one call, and its outcome: `error`, or else `ids`."""

    rows: list[Row]
    ids: list[str] = msgspec.field(default_factory=list)
    new_rows: list[Row] = msgspec.field(default_factory=list)
    drafts: dict[str, str] = msgspec.field(default_factory=dict)
    """The file in which the record of each task was written; it may hold records of other tasks."""
    intents: set[str] = msgspec.field(default_factory=set)
    published: list[str] = msgspec.field(default_factory=list)
    error: Exception | None = None


class SequenceNumbers:
    """Sequence numbers: in this process, later enqueues get larger numbers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self, now: int) -> int:
        """Return the next number. Across processes the clock decides the order."""
        with self._lock:
            self._last = max(now << 12, self._last + 1)
            return self._last


class Enqueuer:
    """Enqueues batches, each completely or not at all, with one wait for the disk for all."""

    def __init__(
        self,
        task_files: TaskFiles,
        unique: UniqueKeys,
        sequence: SequenceNumbers,
        max_pending: int | None,
    ) -> None:
        self._task_files = task_files
        self._disk: Disk = task_files.disk
        self._unique = unique
        self._sequence = sequence
        self._max_pending = max_pending

    def enqueue(self, batches: Sequence[Batch]) -> None:
        """Enqueue batches that have no id in common, and set the `ids` or the `error` of each."""
        self._task_files.refresh()
        self._task_files.clear_touched()
        more = 0
        for batch in batches:
            try:
                self._check(batch)
                self.check_room(more + len(batch.new_rows))
                more += len(batch.new_rows)
            except (OmniqError, OSError) as error:
                batch.error = error
        try:
            self._write([batch for batch in batches if batch.error is None])
            for batch in batches:
                if batch.error is None:
                    self._add_to_queue(batch)
        finally:
            for draft in {draft for batch in batches for draft in batch.drafts.values()}:
                self._disk.remove_quietly(draft)
        try:
            self._task_files.mark_unsynced("queue")
            self._task_files.flush()
        except OSError as error:
            # The tasks are visible but perhaps not durable, so the call must fail. A repeated call
            # finds them.
            for batch in batches:
                batch.error = batch.error or error

    def check_room(self, more: int) -> None:
        """Raise `QueueFull` when that many more tasks would exceed `max_pending`."""
        limit = self._max_pending
        if limit is not None and more and self._task_files.index.waiting + more > limit:
            raise QueueFull(limit)

    def next_seq(self) -> int:
        """Return the sequence number for a task that is not enqueued by `enqueue`."""
        return self._sequence.next(self._task_files.clock.micros())

    def _check(self, batch: Batch) -> None:
        """Separate the new tasks from repeats and from tasks whose unique key is held."""
        keys: dict[str, str] = {}
        for row in batch.rows:
            holder = row.id if self._is_repeat(row) else None
            if holder is None and row.unique is not None:
                holder = keys.get(row.unique) or self._unique.holder(row.unique)
            batch.ids.append(holder or row.id)
            if holder is None:
                batch.new_rows.append(row)
                if row.unique is not None:
                    keys[row.unique] = row.id

    def _is_repeat(self, row: Row) -> bool:
        """Whether the same call has enqueued it already; raises `DuplicateTask` if another has."""
        if not self._has_record(row.id):
            return False
        stored = self._task_files.row_with_id(row.id)
        if stored is None:
            return False
        if stored.nonce != row.nonce:
            raise DuplicateTask(row.id)
        return True

    def _has_record(self, task_id: str) -> bool:
        return (
            self._task_files.index.is_live(task_id)
            or self._disk.exists(result_path(task_id))
            or self._disk.exists(dead_path(task_id))
        )

    def _write(self, batches: list[Batch]) -> None:
        now = self._task_files.clock.micros()
        rows = [row for batch in batches for row in batch.new_rows]
        for row in rows:
            row.seq = self._sequence.next(now)
        files: list[tuple[tuple[str], bytes]] = []
        drafts: dict[str, str] = {}
        for ids, data in pack((row.id, LIVE.encode(Live(row))) for row in rows):
            draft = f"tmp/{self._disk.nonce()}.tmp"
            files.append(((draft,), data))
            drafts.update(dict.fromkeys(ids, draft))
        try:
            self._disk.write_all(files)
            for batch in batches:
                batch.drafts = {row.id: drafts[row.id] for row in batch.new_rows}
        except OSError as error:
            if len(batches) == 1:
                batches[0].error = error
                return
            # The disk may have room for some of the batches.
            for batch in batches:
                self._write([batch])

    def _add_to_queue(self, batch: Batch) -> None:
        """Add a written batch to the queue, completely or not at all."""
        try:
            hit("file.enqueue.before_link")
            self._link_intents(batch)
            hit("file.enqueue.after_link")
            self._recheck_ids(batch)
            self._take_keys(batch)
            hit("file.enqueue.before_publish")
            self._publish(batch)
        except (OmniqError, OSError) as error:
            batch.error = error
            self._undo(batch)

    def _link_intents(self, batch: Batch) -> None:
        for row in batch.new_rows:
            if self._disk.link(batch.drafts[row.id], intent_path(row.id)):
                batch.intents.add(row.id)
                continue
            other = self._read_intent(row.id)
            if other is None or other.row.nonce != row.nonce:
                raise DuplicateTask(row.id)
            # A repeat of the same call, whose first attempt may still be running: finish that one.
            self._publish_intent(row.id)

    def _recheck_ids(self, batch: Batch) -> None:
        """Check the ids again, now that other processes that enqueue them have become visible."""
        self._task_files.refresh()
        for row in batch.new_rows:
            if self._task_files.may_be_touched(row.id) and self._is_repeat(row):
                self._disk.remove_quietly(intent_path(row.id))
                batch.intents.discard(row.id)

    def _take_keys(self, batch: Batch) -> None:
        for place, row in enumerate(batch.rows):
            if row.unique is None or row.id not in batch.intents:
                continue
            holder = self._unique.take(row.unique, row.id)
            if holder is not None:
                batch.ids[place] = holder
                self._disk.remove_quietly(intent_path(row.id))
                batch.intents.discard(row.id)

    def _publish(self, batch: Batch) -> None:
        now = self._task_files.clock.micros()
        for row in batch.new_rows:
            if row.id not in batch.intents:
                continue
            if self._disk.move(intent_path(row.id), task_path(row.id)):
                batch.published.append(row.id)
                self._task_files.index.put(IndexEntry.of(row), now)
            else:
                # Another storage took it for abandoned, and has either enqueued or refused it.
                self._task_files.refresh()
                if not self._is_repeat(row):
                    raise DuplicateTask(row.id)
            batch.intents.discard(row.id)

    def _undo(self, batch: Batch) -> None:
        for task_id in batch.intents:
            self._disk.remove_quietly(intent_path(task_id))
        for task_id in batch.published:
            self._unpublish(task_id)

    def _unpublish(self, task_id: str) -> None:
        draft = f"tmp/{self._disk.nonce()}.tmp"
        try:
            if self._disk.move(task_path(task_id), draft):
                self._task_files.index.drop(task_id)
                self._disk.remove_quietly(draft)
        except OSError:
            # The task stays, unacknowledged: the caller receives the error.
            self._task_files.index.add_unread(task_id)

    # Abandoned intents

    def enqueue_abandoned(self) -> None:
        """Enqueue the intents that were left by processes that died."""
        names = [name for name in self._disk.names("tmp") if name.endswith(".task.tmp")]
        if not names:
            return
        now = self._disk.disk_time()
        for name in names:
            task_id = id_of(name, ".task.tmp")
            if task_id is not None and self._age(f"tmp/{name}", now) > _ABANDONED_AFTER:
                self._publish_intent(task_id)

    def _age(self, path: str, now: int) -> int:
        try:
            return now - self._disk.changed_at(path)
        except FileNotFoundError:
            return 0

    def _read_intent(self, task_id: str) -> Live | None:
        path = intent_path(task_id)
        try:
            data = self._disk.read_record(path, task_id)
            return None if data is None else LIVE.decode(data)
        except NotARecord as error:
            self._disk.quarantine(path, str(error))
            return None

    def _publish_intent(self, task_id: str) -> None:
        live = self._read_intent(task_id)
        if live is None:
            return
        self._task_files.refresh()
        row, path = live.row, intent_path(task_id)
        is_taken = self._has_record(row.id) and self._task_files.row_with_id(row.id) is not None
        if is_taken or (row.unique and self._unique.take(row.unique, row.id) is not None):
            self._disk.remove_quietly(path)
        elif self._disk.move(path, task_path(row.id)):
            self._task_files.index.put(IndexEntry.of(row), self._task_files.clock.micros())
            self._task_files.mark_unsynced("queue")
