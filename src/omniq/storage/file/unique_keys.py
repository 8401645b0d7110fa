"""Unique keys: the tasks that hold unique keys. A key is free as soon as its holder is not live.

No step frees a key. Keys share a fixed number of buckets, so that the store does not grow with keys
that are used once: a process that changes a bucket removes the keys whose holders have ended.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

from omniq.storage.file.encoding import HOLDERS, LIVE, Holder, Live, NotARecord
from omniq.storage.file.file_names import intent_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_values import SharedValues
from omniq.storage.file.task_files import TaskFiles


class UniqueKeys:
    """The holders of all unique keys, `unique/<two hexadecimal digits>/`."""

    def __init__(self, disk: Disk, task_files: TaskFiles) -> None:
        self._disk = disk
        self._task_files = task_files
        self._values = SharedValues(disk, "unique", HOLDERS, durable=True)

    def holder(self, key: str) -> str | None:
        """Return the id of the live task that holds the key, or None."""
        found = self._values.read(_bucket_of(key))
        holder = None if found is None else found.value.get(key)
        return holder.task_id if holder is not None and self._has(holder, key) else None

    def take(self, key: str, task_id: str, via: str = "") -> str | None:
        """Take the key for a task that is being enqueued, and return None.

        When another live task holds the key, returns its id instead. The task's intent, or the file
        `via`, must exist already: other processes take that as a sign that the task is live.
        """
        name = _bucket_of(key)
        while True:
            before = self._values.read(name)
            holders = {} if before is None else before.value
            # Read first, then check which are live: a holder is live before its key is written.
            self._task_files.refresh()
            live = {each: holder for each, holder in holders.items() if self._is_live(holder)}
            holder = live.get(key)
            if holder is not None and holder.task_id != task_id and self._has(holder, key):
                return holder.task_id
            live[key] = Holder(task_id, via)
            if self._values.swap(name, before, live) is not None:
                return None

    def _is_live(self, holder: Holder) -> bool:
        """Whether a task of that id is live or is being enqueued."""
        return (
            self._task_files.index.is_live(holder.task_id)
            or self._disk.exists(intent_path(holder.task_id))
            or bool(holder.via and self._disk.exists(holder.via))
        )

    def _has(self, holder: Holder, key: str) -> bool:
        """Whether the holder is live, and is the task that took the key, not another of that id."""
        # In the order in which a task goes through these files, so that none is missed.
        being_enqueued = (
            self._read(path, holder.task_id)
            for path in (holder.via, intent_path(holder.task_id))
            if path
        )
        if any(live is not None and live.row.unique == key for live in being_enqueued):
            return True
        found = self._task_files.find_live(holder.task_id)
        return found is not None and found.row.unique == key

    def _read(self, path: str, task_id: str) -> Live | None:
        with suppress(NotARecord):
            data = self._disk.read_record(path, task_id)
            return None if data is None else LIVE.decode(data)
        return None


def _bucket_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:2]
