"""Tasks in this process's memory: the reference backend. Nothing survives the process.

It stores the same rows and encodings as the other backends, so that a test against it tests the
contract.
"""

from __future__ import annotations

from typing import Unpack

from omniq.serialization import Serializer
from omniq.settings import Settings
from omniq.storage.base import BaseStorage, StorageOptions
from omniq.storage.memory.backend import Memory, MemoryBackend


class MemoryStorage(BaseStorage):
    """A separate store in this process."""

    def __init__(self, **options: Unpack[StorageOptions]) -> None:
        super().__init__(**options)
        self._memory = Memory()
        self._use(MemoryBackend(self._memory, self._clock, self._local_wakeups))

    def another(
        self,
        *,
        serializer: Serializer | None = None,
        settings: Settings | None = None,
        max_pending: int | None = None,
    ) -> MemoryStorage:
        """An unopened object on the same memory that is a separate owner.

        What no argument overrides is as in this object.
        """
        other = MemoryStorage(
            serializer=serializer or (self._serializer if settings is None else None),
            clock=self._clock,
            settings=settings or self._settings,
            max_pending=max_pending or self._max_pending,
        )
        other._memory = self._memory
        other._local_wakeups = self._local_wakeups
        other._use(self._backend.sibling())
        return other
