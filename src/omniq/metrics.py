"""Counts events: how many tasks were enqueued, succeeded and failed, and their durations."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from omniq.events import Event, QueueHighWater, TaskEnqueued, TaskFailure, TaskSucceeded

WINDOW = 1000
"""The default number of newest durations of each type that the average is taken over."""


class Metrics:
    """Counts since it was created; thread-safe. Subscribe `observe` to the events of a pool.

    A pool reports what it runs, and what this process enqueues on its storage object: by `submit`, by a
    queue, or from a task. It also reports the highest number of waiting tasks that it knows of.
    The type of a task is the path of its function. The data of each type is bounded.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._lock = threading.Lock()
        self._submitted = 0
        self._completed = 0
        self._failed = 0
        self._failed_by_type: dict[str, int] = {}
        self._high_water = 0
        self._counts: dict[str, int] = {}
        self._durations: dict[str, deque[float]] = {}

    def observe(self, event: Event) -> None:
        """Count an enqueued, succeeded or failed task, and the queue's size. Other events are ignored."""
        match event:
            case TaskEnqueued():
                self.record_submission()
                self.update_queue_size(event.waiting)
            case QueueHighWater():
                self.update_queue_size(event.waiting)
            case TaskSucceeded():
                self.record_completion(event.task_type or event.func_path, event.seconds)
            case TaskFailure():
                self.record_failure(event.task_type or event.func_path)
            case _:
                pass

    def record_submission(self) -> None:
        """Count an enqueued task."""
        with self._lock:
            self._submitted += 1

    def record_completion(self, task_type: str, seconds: float) -> None:
        """Count a task of that type that succeeded after that many seconds."""
        with self._lock:
            self._completed += 1
            self._counts[task_type] = self._counts.get(task_type, 0) + 1
            newest = self._durations.setdefault(task_type, deque(maxlen=self._window))
            newest.append(seconds)

    def record_failure(self, task_type: str | None = None) -> None:
        """Count a task that failed for good."""
        with self._lock:
            self._failed += 1
            if task_type is not None:
                self._failed_by_type[task_type] = self._failed_by_type.get(task_type, 0) + 1

    def update_queue_size(self, size: int) -> None:
        """Update the highest number of waiting tasks."""
        with self._lock:
            self._high_water = max(self._high_water, size)

    def failed(self, task_type: str) -> int:
        """The number of tasks of that type that failed for good."""
        with self._lock:
            return self._failed_by_type.get(task_type, 0)

    def get_metrics(self) -> dict[str, Any]:
        """Return all counts. `task_durations` has, for each type that succeeded, the number of
        successes and the average duration of the newest ones in milliseconds."""
        with self._lock:
            return {
                "total_submitted": self._submitted,
                "total_completed": self._completed,
                "total_failed": self._failed,
                "queue_high_water": self._high_water,
                "task_durations": {
                    task_type: {
                        "count": self._counts[task_type],
                        "average": sum(newest) / len(newest) * 1000,
                    }
                    for task_type, newest in self._durations.items()
                },
            }
