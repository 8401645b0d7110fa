"""Schedules: one shared value for each schedule, `schedules/<id>/`."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from omniq.errors import SerializationError
from omniq.models import Schedule, Task
from omniq.serialization import Serializer
from omniq.storage.file.encoding import SCHEDULE, StoredSchedule
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_values import SharedValues, Version


class Schedules:
    """Stores schedules; every change increments the schedule's version."""

    def __init__(self, disk: Disk, serializer: Serializer) -> None:
        self._serializer = serializer
        self._values = SharedValues(disk, "schedules", SCHEDULE, durable=True)

    def put(self, schedule: Schedule) -> None:
        """Store the schedule, replacing one with the same id."""
        while True:
            before = self._values.read(schedule.id)
            known = None if before is None else before.value.schedule.version
            version = schedule.version if known is None else known + 1
            if self._swap(before, schedule, version):
                return

    def get(self, schedule_id: str) -> Schedule | None:
        """Return the schedule, or None."""
        found = self._values.read(schedule_id)
        return None if found is None else self._load(found.value)

    def all(self) -> list[Schedule]:
        """All schedules in id order, without those that cannot be decoded."""
        found: list[Schedule] = []
        for name in sorted(self._values.names()):
            with suppress(SerializationError):
                found += filter(None, [self.get(name)])
        return found

    def delete(self, schedule_id: str) -> bool:
        """Delete the schedule; False when there is none."""
        return self._values.remove(schedule_id)

    def read_if_unchanged(self, schedule: Schedule) -> Version[StoredSchedule] | None:
        """Return the stored schedule if it still has that version, else None."""
        found = self._values.read(schedule.id)
        if found is None or found.value.schedule.version != schedule.version:
            return None
        return found

    def advance(self, before: Version[StoredSchedule], advanced: Schedule) -> bool:
        """Replace the schedule that was read; False when it has been changed meanwhile."""
        return self._swap(before, advanced, before.value.schedule.version + 1)

    def _swap(
        self, before: Version[StoredSchedule] | None, schedule: Schedule, version: int
    ) -> bool:
        body = self._serializer.encode_task(schedule.task)
        plain = Task(id=schedule.task.id, func_path=schedule.task.func_path)
        bare = msgspec.structs.replace(schedule, task=plain, version=version)
        stored = StoredSchedule(bare, body)
        return self._values.swap(schedule.id, before, stored, first=version) is not None

    def _load(self, stored: StoredSchedule) -> Schedule:
        task = self._serializer.decode_task(stored.body)
        return msgspec.structs.replace(stored.schedule, task=task)
