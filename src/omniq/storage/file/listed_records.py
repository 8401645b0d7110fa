"""Listed records: reads the records of listed names; a file of many tasks is read only once."""

from __future__ import annotations

from contextlib import suppress

from omniq.storage.file.encoding import NotARecord
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_file import unpack_all, unpack_one


class ListedRecords:
    """Caches the shared file that it read last. For one pass over names sorted by inode number.

    A file system gives the inode numbers of deleted files to new ones. That does no harm: a record
    that the cached file does not contain is read from its path, and a name that has moved since the
    listing is reported by the watch, or found by the next listing.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._inode = 0
        self._records: dict[str, bytes] = {}

    def read(self, path: str, task_id: str, inode: int) -> bytes | None:
        """Return the task's record; None when the file is missing. `inode` is 0 when unknown."""
        if inode == self._inode and task_id in self._records:
            return self._records[task_id]
        found = self._disk.read_file(path)
        if found is None:
            return None
        self._inode, data = found
        self._records = {}
        # With a damaged header nothing is cached; `unpack_one` then raises the reason.
        with suppress(NotARecord):
            self._records = unpack_all(data)
        return unpack_one(data, task_id)
