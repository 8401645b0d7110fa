"""The queues that programs use: `AsyncTaskQueue` and `TaskQueue`."""

from omniq.queue.async_queue import AsyncTaskQueue as AsyncTaskQueue
from omniq.queue.blocking_queue import TaskQueue as TaskQueue
from omniq.tasks.handle import AsyncTaskHandle as AsyncTaskHandle
from omniq.tasks.handle import TaskHandle as TaskHandle
