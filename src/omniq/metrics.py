"""Counts events: how many tasks came, ended and failed, and how long they took, by type."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from omniq.events import Event, TaskEnqueued, TaskFailure, TaskSucceeded

WINDOW = 1000
"""How many of the newest durations of each type the average is made of, unless said otherwise."""


class Metrics:
    """Numbers since it was made, from any thread. Subscribe `observe` to a pool's events.

    A type of task is its function's path. What is kept of each is bounded.
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
        """Count the event if it is one that counts."""
        match event:
            case TaskEnqueued():
                self.record_submission()
            case TaskSucceeded():
                self.record_completion(event.func_path, event.seconds)
            case TaskFailure():
                self.record_failure(event.func_path)
            case _:
                pass

    def record_submission(self) -> None:
        """A task was enqueued."""
        with self._lock:
            self._submitted += 1

    def record_completion(self, task_type: str, seconds: float) -> None:
        """A task of that type succeeded, after that many seconds."""
        with self._lock:
            self._completed += 1
            self._counts[task_type] = self._counts.get(task_type, 0) + 1
            newest = self._durations.setdefault(task_type, deque(maxlen=self._window))
            newest.append(seconds)

    def record_failure(self, task_type: str | None = None) -> None:
        """A task failed for good."""
        with self._lock:
            self._failed += 1
            if task_type is not None:
                self._failed_by_type[task_type] = self._failed_by_type.get(task_type, 0) + 1

    def update_queue_size(self, size: int) -> None:
        """So many tasks wait now; the highest number is kept."""
        with self._lock:
            self._high_water = max(self._high_water, size)

    def failed(self, task_type: str) -> int:
        """How many tasks of that type failed for good."""
        with self._lock:
            return self._failed_by_type.get(task_type, 0)

    def get_metrics(self) -> dict[str, Any]:
        """All numbers. `task_durations` gives, for each type that has succeeded, how often and the
        average of its newest runs in milliseconds."""
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
