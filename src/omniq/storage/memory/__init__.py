"""The memory backend: tasks in this process, lost when it ends. `storage` has `MemoryStorage`."""

from omniq.storage.memory.storage import MemoryStorage as MemoryStorage
