"""The queues that programs use: `AsyncTaskQueue` and `TaskQueue`.

- `async_queue`: the queue for async code, and the options of an enqueue
- `blocking_queue`: the same queue for blocking code
- `dead_letters`: dead letters: read, retry, delete, export
"""

from omniq.queue.async_queue import AsyncTaskQueue as AsyncTaskQueue
from omniq.queue.blocking_queue import TaskQueue as TaskQueue
from omniq.tasks.handle import AsyncTaskHandle as AsyncTaskHandle
from omniq.tasks.handle import TaskHandle as TaskHandle
