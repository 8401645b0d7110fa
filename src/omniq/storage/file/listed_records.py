"""Records of tasks whose names were just listed: a file of many tasks is read once for all of them."""

from __future__ import annotations

from contextlib import suppress

from omniq.storage.file.encoding import NotARecord
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_file import pick, split


class ListedRecords:
    """Remembers the file of many tasks that it read last. For one pass, in the order of inodes.

    Numbers of files that are gone are given to new ones. That does no harm: what the file does not
    hold is read from where it is, and a name that is not where it was listed is told of by the
    watch, or found out by the next listing.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._inode = 0
        self._records: dict[str, bytes] = {}

    def read(self, path: str, task_id: str, inode: int) -> bytes | None:
        """The task's record; None when there is no such file. The inode is 0 where it is not known."""
        if inode == self._inode and task_id in self._records:
            return self._records[task_id]
        found = self._disk.read_file(path)
        if found is None:
            return None
        self._inode, data = found
        self._records = {}
        # A head that is damaged is not to be trusted for others; `pick` says what is wrong with it.
        with suppress(NotARecord):
            self._records = split(data)
        return pick(data, task_id)
