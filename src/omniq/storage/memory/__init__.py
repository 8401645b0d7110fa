"""The memory backend: tasks in this process, lost when it ends.

| module | job |
|---|---|
| `storage` | `MemoryStorage` |
| `backend` | the port of the engine, over tables behind one lock |
"""

from omniq.storage.memory.storage import MemoryStorage as MemoryStorage
