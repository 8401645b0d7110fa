"""Who holds a unique key. A key is free as soon as its holder is not live; nobody has to free it.

Keys share a fixed number of cells, so that keys that are used once leave nothing behind: whoever
changes a cell drops the keys in it whose holders have ended.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

from omniq.storage.file.encoding import HOLDERS, LIVE, Holder, Live, NotARecord
from omniq.storage.file.file_names import intent_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_values import Cells
from omniq.storage.file.task_files import Ledger


class UniqueKeys:
    """The holders of all unique keys, `unique/<two letters>/`."""

    def __init__(self, disk: Disk, ledger: Ledger) -> None:
        self._disk = disk
        self._ledger = ledger
        self._cells = Cells(disk, "unique", HOLDERS, lasting=True)

    def holder(self, key: str) -> str | None:
        """The id of the live task that holds the key."""
        found = self._cells.read(_cell_of(key))
        holder = None if found is None else found.value.get(key)
        return holder.task_id if holder is not None and self._has(holder, key) else None

    def take(self, key: str, task_id: str, via: str = "") -> str | None:
        """Take the key for a task that is on its way; the id of the task that has it, if one does.

        The task's intent, or the file `via`, must be there already: to others that makes it live.
        """
        name = _cell_of(key)
        while True:
            before = self._cells.read(name)
            holders = {} if before is None else before.value
            # Read first, then look who is live: a holder is live before its key is written.
            self._ledger.refresh()
            live = {each: holder for each, holder in holders.items() if self._is_live(holder)}
            holder = live.get(key)
            if holder is not None and holder.task_id != task_id and self._has(holder, key):
                return holder.task_id
            live[key] = Holder(task_id, via)
            if self._cells.swap(name, before, live) is not None:
                return None

    def _is_live(self, holder: Holder) -> bool:
        """Whether a task of that id has not ended, or is on its way."""
        return (
            self._ledger.index.is_live(holder.task_id)
            or self._disk.exists(intent_path(holder.task_id))
            or bool(holder.via and self._disk.exists(holder.via))
        )

    def _has(self, holder: Holder, key: str) -> bool:
        """Whether the holder is live, and still the task that took the key, not one of the same id."""
        # In the order in which a task goes from one to the next, so that none is missed.
        on_its_way = (
            self._read(path, holder.task_id)
            for path in (holder.via, intent_path(holder.task_id))
            if path
        )
        if any(live is not None and live.row.unique == key for live in on_its_way):
            return True
        found = self._ledger.find_live(holder.task_id)
        return found is not None and found.row.unique == key

    def _read(self, path: str, task_id: str) -> Live | None:
        with suppress(NotARecord):
            data = self._disk.read_record(path, task_id)
            return None if data is None else LIVE.decode(data)
        return None


def _cell_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:2]
