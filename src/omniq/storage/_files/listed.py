"""Records of tasks whose names were just listed: a file of many tasks is read once for all of them."""

from __future__ import annotations

from contextlib import suppress

from omniq.storage._files.disk import Disk
from omniq.storage._files.gathered import pick
from omniq.storage._files.records import NotARecord


class ListedRecords:
    """Remembers the file that it read last. For one pass over a listing, in the order of inodes.

    Numbers of files that are gone are given to new ones. Within a pass that does no harm: a name
    that is not where it was listed is told of by the watch, or found out by the next listing.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._inode = 0
        self._data = b""

    def read(self, path: str, task_id: str, inode: int) -> bytes | None:
        """The task's record; None when there is no such file. The inode is 0 where it is not known."""
        if inode != 0 and inode == self._inode:
            # Not in it after all: then the name is of another file by now.
            with suppress(NotARecord):
                return pick(self._data, task_id)
        found = self._disk.read_file(path)
        if found is None:
            return None
        self._inode, self._data = found
        return pick(self._data, task_id)
