"""Storage: tasks as files in a folder that any number of processes on one machine share.

There are no locks. Correctness rests on two system calls: rename (of several processes that move
one file, one succeeds) and link (of several processes that create one name, one succeeds).

    tasks/      live tasks and documents, by names that are never used twice (see `file_names`)
    parts/      new records of writes that are not committed yet (see `writes`)
    results/<id>.result, dead/<id>.dead     ended; dead letter (with the task's record)
    leases/     see `leases`
    corrupt/    files that are not records, and the reasons
    queue, unique   in the way of older versions of omniq, which fail here (see `upgrade`)

A live task is a name and a record. The record is never changed in place; the name says who holds the
task, whether it is parked, and whether its cancellation was requested. So claims, parking and
cancellation requests are renames. A task that was claimed, changed or ended meanwhile has another name,
and a rename of the old one fails. Changes of several names are made together, by the protocol at the
top of `writes`, which also says what follows after a crash in each of its steps.

Records that are written together share a file with many names (see `shared_file`). The rename of a
claim is synced before the claim is returned: no token is given out twice, not even after a power cut.

When the disk is full, calls raise `StorageError`, no file is left incomplete, and the storage works
again when there is space.
"""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from omniq.storage.base import BaseStorage, StorageOptions
from omniq.storage.file.backend import FileBackend


class FileStorage(BaseStorage):
    """A store in a folder of a local disk.

    With `settings.durability` "power", calls are acknowledged after the data is on the disk. With
    "os" they are not: a power cut may lose what was acknowledged in the seconds before it.
    """

    _enqueue_writes = 1

    def __init__(self, path: str | Path, **options: Unpack[StorageOptions]) -> None:
        super().__init__(**options)
        self.path = Path(path)
        self._use(FileBackend(self.path, self._clock, self._local_wakeups, self._settings))
