"""Who holds a unique key. A key is free as soon as its holder is not live; nobody has to free it.

Keys share a fixed number of cells, so that keys that are used once leave nothing behind: whoever
changes a cell drops the keys in it whose holders have ended.
"""

from __future__ import annotations

import hashlib

from omniq.storage._files.cells import Cells
from omniq.storage._files.disk import Disk
from omniq.storage._files.ledger import Ledger
from omniq.storage._files.names import intent_path
from omniq.storage._files.records import HOLDERS, Holder


class UniqueKeys:
    """The holders of all unique keys, `unique/<two letters>/`."""

    def __init__(self, disk: Disk, ledger: Ledger) -> None:
        self._disk = disk
        self._ledger = ledger
        self._cells = Cells(disk, "unique", HOLDERS, lasting=True)

    def holder(self, key: str) -> str | None:
        """The id of the live task that holds the key."""
        found = self._cells.read(_cell_of(key))
        if found is None or key not in found.value:
            return None
        self._ledger.refresh()
        return found.value[key].task_id if self._is_live(found.value[key]) else None

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
            if key in live and live[key].task_id != task_id:
                return live[key].task_id
            live[key] = Holder(task_id, via)
            if self._cells.swap(name, before, live) is not None:
                return None

    def _is_live(self, holder: Holder) -> bool:
        if self._ledger.index.is_live(holder.task_id):
            for committed in self._ledger.index.committed(holder.task_id):
                self._ledger.carry_out(committed)
                self._ledger.flush()
            return self._ledger.index.is_live(holder.task_id)
        return self._disk.exists(intent_path(holder.task_id)) or bool(
            holder.via and self._disk.exists(holder.via)
        )


def _cell_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:2]
