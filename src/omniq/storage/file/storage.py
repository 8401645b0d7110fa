"""Storage: tasks as files in a folder that any number of processes on one machine share.

There are no locks. Correctness rests on two system calls: rename (of several processes that move
one file, one succeeds) and link (of several processes that create one name, one succeeds).

    tasks/      live tasks and documents, by names that are never used twice (see `file_names`)
    parts/      new records of writes that are not committed yet (see `writes`)
    results/<id>.result, dead/<id>.dead     ended; dead letter (with the task's record)
    leases/     see `leases`
    corrupt/    files that are not records, and the reasons
    queue       an empty file: versions of omniq that kept tasks in a folder of this name fail here

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

from omniq.clock import SYSTEM_CLOCK, Clock
from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage.base import BaseStorage
from omniq.storage.enqueue_batcher import EnqueueBatcher
from omniq.storage.file.backend import FileBackend
from omniq.storage.row_rules import Row


class FileStorage(BaseStorage):
    """A store in a folder of a local disk.

    With `settings.durability` "power", calls are acknowledged after the data is on the disk. With
    "os" they are not: a power cut may lose what was acknowledged in the seconds before it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        serializer: Serializer | None = None,
        clock: Clock = SYSTEM_CLOCK,
        settings: Settings | None = None,
        max_pending: int | None = None,
    ) -> None:
        super().__init__(
            serializer=serializer, clock=clock, settings=settings, max_pending=max_pending
        )
        self.path = Path(path)
        self._use(FileBackend(self.path, clock, self._local_wakeups, self._settings.durability))

    async def _open(self) -> None:
        await super()._open()
        self._batcher = EnqueueBatcher(super()._enqueue)

    async def _enqueue(self, rows: list[Row]) -> list[str]:
        return await self._batcher.add(rows)
