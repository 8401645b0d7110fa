"""The queues that programs use: `AsyncTaskQueue` and `TaskQueue`.

- `async_queue`: the queue for async code, and the options of an enqueue
- `blocking_queue`: the same queue for blocking code
- `dead_letters`: dead letters: read, retry, delete, export
- `operators`: queues, workers, breakers and limits: list, pause, resume
- `blocking_operators`: the same for blocking code
- `bulk`: changes of all tasks that match a filter
- `deploy_check`: whether new code can run what is stored
"""

from omniq.operations.handle import AsyncTaskHandle as AsyncTaskHandle
from omniq.operations.handle import TaskHandle as TaskHandle
from omniq.queue.async_queue import AsyncTaskQueue as AsyncTaskQueue
from omniq.queue.blocking_queue import TaskQueue as TaskQueue
