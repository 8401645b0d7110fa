"""How tasks get into the queue folder: whole, durable, once.

    tmp/<nonce>.tmp           written and synced; means nothing
    tmp/<id>.task.tmp         linked: of many that enqueue one id, one goes on; not claimable yet
    queue/<id>.task           renamed: enqueued

Between the second and the third step the id is looked up once more: whoever enqueued it before has
gone through the same name, so nothing can have been missed. What a process left at the second step
when it died is whole, and is put into the queue by whoever comes by later.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from omniq.errors import DuplicateTask, OmniqError, QueueFull
from omniq.failpoints import hit
from omniq.storage.file.encoding import LIVE, Live, NotARecord, Waiter
from omniq.storage.file.file_names import dead_path, id_of, intent_path, result_path, task_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_file import gather
from omniq.storage.file.task_files import Ledger
from omniq.storage.file.unique_keys import UniqueKeys
from omniq.storage.row_rules import Row

_ABANDONED_AFTER = 5 * 10**9
"""Nanoseconds after which a task that is about to be enqueued was left so by a dead process."""


class Batch(msgspec.Struct):
    """The rows of one call. What became of it: its `error`, or else its `ids`."""

    rows: list[Row]
    ids: list[str] = msgspec.field(default_factory=list)
    fresh: list[Row] = msgspec.field(default_factory=list)
    drafts: dict[str, str] = msgspec.field(default_factory=dict)
    """Where the record of each task has been written, perhaps together with those of others."""
    intents: set[str] = msgspec.field(default_factory=set)
    published: list[str] = msgspec.field(default_factory=list)
    error: Exception | None = None


class Numbers:
    """Numbers that order what this process enqueues after what it enqueued before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self, now: int) -> int:
        """The next number; across processes it follows the clock."""
        with self._lock:
            self._last = max(now << 12, self._last + 1)
            return self._last


class Entrance:
    """Enqueues batches, each as a whole or not at all, with one barrier for all of them."""

    def __init__(
        self, ledger: Ledger, unique: UniqueKeys, sequence: Numbers, max_pending: int | None
    ) -> None:
        self._ledger = ledger
        self._disk: Disk = ledger.disk
        self._unique = unique
        self._sequence = sequence
        self._max_pending = max_pending

    def enqueue(self, batches: Sequence[Batch]) -> None:
        """Enqueue batches that have no id in common; each gets its `ids` or its `error`."""
        self._ledger.refresh()
        self._ledger.forget_news()
        more = 0
        for batch in batches:
            try:
                self._check(batch)
                self.check_room(more + len(batch.fresh))
                more += len(batch.fresh)
            except (OmniqError, OSError) as error:
                batch.error = error
        try:
            self._write([batch for batch in batches if batch.error is None])
            for batch in batches:
                if batch.error is None:
                    self._admit(batch)
        finally:
            for draft in {draft for batch in batches for draft in batch.drafts.values()}:
                self._disk.remove_quietly(draft)
        try:
            self._ledger.touch("queue")
            self._ledger.flush()
        except OSError as error:
            # Visible and perhaps not lasting: nothing may be promised. A repeat will find them.
            for batch in batches:
                batch.error = batch.error or error

    def check_room(self, more: int) -> None:
        """Refuse to enqueue that many when there is no room for them."""
        limit = self._max_pending
        if limit is not None and more and self._ledger.index.waiting + more > limit:
            raise QueueFull(limit)

    def next_seq(self) -> int:
        """The number of a task that comes in by another door."""
        return self._sequence.next(self._ledger.clock.micros())

    def _check(self, batch: Batch) -> None:
        """Sort out what the batch adds, what it repeats and what others stand for."""
        keys: dict[str, str] = {}
        for row in batch.rows:
            holder = row.id if self._is_repeat(row) else None
            if holder is None and row.unique is not None:
                holder = keys.get(row.unique) or self._unique.holder(row.unique)
            batch.ids.append(holder or row.id)
            if holder is None:
                batch.fresh.append(row)
                if row.unique is not None:
                    keys[row.unique] = row.id

    def _is_repeat(self, row: Row) -> bool:
        """Whether the same call has enqueued it before; `DuplicateTask` if another one has."""
        if not self._is_on_record(row.id):
            return False
        standing = self._ledger.standing(row.id)
        if standing is None:
            return False
        if standing.nonce != row.nonce:
            raise DuplicateTask(row.id)
        return True

    def _is_on_record(self, task_id: str) -> bool:
        return (
            self._ledger.index.is_live(task_id)
            or self._disk.exists(result_path(task_id))
            or self._disk.exists(dead_path(task_id))
        )

    def _write(self, batches: list[Batch]) -> None:
        now = self._ledger.clock.micros()
        rows = [row for batch in batches for row in batch.fresh]
        for row in rows:
            row.seq = self._sequence.next(now)
        files: list[tuple[tuple[str], bytes]] = []
        drafts: dict[str, str] = {}
        for ids, data in gather((row.id, LIVE.encode(Live(row))) for row in rows):
            draft = f"tmp/{self._disk.nonce()}.tmp"
            files.append(((draft,), data))
            drafts.update(dict.fromkeys(ids, draft))
        try:
            self._disk.write_all(files)
            for batch in batches:
                batch.drafts = {row.id: drafts[row.id] for row in batch.fresh}
        except OSError as error:
            if len(batches) == 1:
                batches[0].error = error
                return
            # What is too much for all of them together may be fine for some of them.
            for batch in batches:
                self._write([batch])

    def _admit(self, batch: Batch) -> None:
        """Put a batch that is written into the queue, all of it or nothing."""
        try:
            hit("file.enqueue.before_link")
            self._announce(batch)
            hit("file.enqueue.after_link")
            self._look_again(batch)
            self._take_keys(batch)
            hit("file.enqueue.before_publish")
            self._publish(batch)
        except (OmniqError, OSError) as error:
            batch.error = error
            self._withdraw(batch)

    def _announce(self, batch: Batch) -> None:
        for row in batch.fresh:
            if self._disk.link(batch.drafts[row.id], intent_path(row.id)):
                batch.intents.add(row.id)
                continue
            rival = self._read_intent(row.id)
            if rival is None or rival.row.nonce != row.nonce:
                raise DuplicateTask(row.id)
            # The same call, made before and perhaps still under way: let it be done.
            self._complete(row.id)

    def _look_again(self, batch: Batch) -> None:
        """Whoever came first with one of these ids is known by now."""
        self._ledger.refresh()
        for row in batch.fresh:
            if self._ledger.has_news_of(row.id) and self._is_repeat(row):
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
        now = self._ledger.clock.micros()
        for row in batch.fresh:
            if row.id not in batch.intents:
                continue
            if self._disk.move(intent_path(row.id), task_path(row.id)):
                batch.published.append(row.id)
                self._ledger.index.put(Waiter.of(row), now)
            else:
                # Somebody took it for abandoned, and has either enqueued or refused it.
                self._ledger.refresh()
                if not self._is_repeat(row):
                    raise DuplicateTask(row.id)
            batch.intents.discard(row.id)

    def _withdraw(self, batch: Batch) -> None:
        for task_id in batch.intents:
            self._disk.remove_quietly(intent_path(task_id))
        for task_id in batch.published:
            self._unpublish(task_id)

    def _unpublish(self, task_id: str) -> None:
        draft = f"tmp/{self._disk.nonce()}.tmp"
        try:
            if self._disk.move(task_path(task_id), draft):
                self._ledger.index.drop(task_id)
                self._disk.remove_quietly(draft)
        except OSError:
            # It stays, unacknowledged: the caller was told that the call failed.
            self._ledger.index.arrive(task_id)

    # What others have left

    def complete_abandoned(self) -> None:
        """Enqueue what processes that died had announced."""
        names = [name for name in self._disk.names("tmp") if name.endswith(".task.tmp")]
        if not names:
            return
        now = self._disk.disk_time()
        for name in names:
            task_id = id_of(name, ".task.tmp")
            if task_id is not None and self._age(f"tmp/{name}", now) > _ABANDONED_AFTER:
                self._complete(task_id)

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

    def _complete(self, task_id: str) -> None:
        live = self._read_intent(task_id)
        if live is None:
            return
        self._ledger.refresh()
        row, path = live.row, intent_path(task_id)
        is_taken = self._is_on_record(row.id) and self._ledger.standing(row.id) is not None
        if is_taken or (row.unique and self._unique.take(row.unique, row.id) is not None):
            self._disk.remove_quietly(path)
        elif self._disk.move(path, task_path(row.id)):
            self._ledger.index.put(Waiter.of(row), self._ledger.clock.micros())
            self._ledger.touch("queue")
