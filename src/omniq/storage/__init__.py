"""Where tasks are stored. `open_storage(url)` picks the backend; `BaseStorage` is the contract.

| module | job |
|---|---|
| `urls` | `open_storage`: a storage object from a URL |
| `base` | `BaseStorage`: enqueue, claim, record, renew and wait, over the verbs of a backend |
| `side_data` | the contract's second part: dead letters, checkpoints, schedules, pauses, retention |
| `inspection` | the contract's read side |
| `types` | values that a storage exchanges with its callers and its backend |
| `row_rules` | a task as a storage holds it, and every change it may go through |
| `ready_queue` | the claim order of tasks, for backends that order them in memory |
| `newest_by_id` | the newest tasks, for backends that sort tasks by id |
| `enqueue_batcher` | writes concurrent enqueues together, for backends on a server |
| `wakeups` | wake-ups within one process |
| `permissions` | refuses files and folders that other users may write to |
| `health` | stalled workers, stuck tasks, open breakers |
| `memory`, `file`, `sqlite`, `postgres`, `redis` | the backends, a package each |
"""

from omniq.storage.base import BaseStorage
from omniq.storage.types import Capabilities
from omniq.storage.urls import open_storage

__all__ = ["BaseStorage", "Capabilities", "open_storage"]
