"""Schedules: one cell for each, `schedules/<id>/`."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from omniq.errors import SerializationError
from omniq.models import Schedule, Task
from omniq.serialization import Serializer
from omniq.storage.file.encoding import SCHEDULE, StoredSchedule
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_values import Cells, Version


class Schedules:
    """Keeps schedules; every change raises a schedule's version."""

    def __init__(self, disk: Disk, serializer: Serializer) -> None:
        self._serializer = serializer
        self._cells = Cells(disk, "schedules", SCHEDULE, lasting=True)

    def put(self, schedule: Schedule) -> None:
        """Keep the schedule in the place of one with the same id."""
        while True:
            before = self._cells.read(schedule.id)
            known = None if before is None else before.value.schedule.version
            version = schedule.version if known is None else known + 1
            if self._swap(before, schedule, version):
                return

    def get(self, schedule_id: str) -> Schedule | None:
        """The schedule as it is now."""
        found = self._cells.read(schedule_id)
        return None if found is None else self._load(found.value)

    def all(self) -> list[Schedule]:
        """All schedules, in id order. One that cannot be read must not hold up the others."""
        found: list[Schedule] = []
        for name in sorted(self._cells.names()):
            with suppress(SerializationError):
                found += filter(None, [self.get(name)])
        return found

    def delete(self, schedule_id: str) -> bool:
        """Forget the schedule; False when there is none."""
        return self._cells.remove(schedule_id)

    def reading(self, schedule: Schedule) -> Version[StoredSchedule] | None:
        """The schedule as it is now, if it is still the version that was read."""
        found = self._cells.read(schedule.id)
        if found is None or found.value.schedule.version != schedule.version:
            return None
        return found

    def advance(self, before: Version[StoredSchedule], advanced: Schedule) -> bool:
        """Replace what was read; False when somebody else has changed it meanwhile."""
        return self._swap(before, advanced, before.value.schedule.version + 1)

    def _swap(
        self, before: Version[StoredSchedule] | None, schedule: Schedule, version: int
    ) -> bool:
        body = self._serializer.encode_task(schedule.task)
        plain = Task(id=schedule.task.id, func_path=schedule.task.func_path)
        kept = msgspec.structs.replace(schedule, task=plain, version=version)
        stored = StoredSchedule(kept, body)
        return self._cells.swap(schedule.id, before, stored, first=version) is not None

    def _load(self, stored: StoredSchedule) -> Schedule:
        task = self._serializer.decode_task(stored.body)
        return msgspec.structs.replace(stored.schedule, task=task)
