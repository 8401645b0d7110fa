"""Reports what fails in a worker: an outage of its storage once, every other failure under its activity."""

from __future__ import annotations

import threading
from datetime import datetime

from omniq.clock import Clock
from omniq.errors import StorageClosed, StorageCorrupt, StorageError, StorageRefused
from omniq.events import Dispatcher, StorageBack, StorageFailing, WorkerProblem, error_text

_REPORT_EVERY = 60.0
"""Seconds between two reports of one outage."""


class ProblemReports:
    """Emits the failures of one pool, from any thread.

    While the storage does not answer, all activities of a worker fail. The first failure starts an outage
    and is reported as `StorageFailing`, and again once a minute. All are `WorkerProblem` with `during_outage`, which
    the log writes at DEBUG.
    """

    def __init__(self, dispatcher: Dispatcher, clock: Clock) -> None:
        self._events = dispatcher
        self._clock = clock
        self._lock = threading.Lock()
        self._began: float | None = None
        self._since: datetime | None = None
        self._reported_at = 0.0
        self._failed: set[str] = set()
        self._failed_alone = ""

    def report(self, activity: str, error: Exception) -> None:
        """Report that an activity of the worker has failed, which is tried again later."""
        is_outage = starts = is_due = False
        with self._lock:
            if _may_be_outage(error) and (
                self._began is not None or activity != self._failed_alone
            ):
                is_outage, starts = True, self._began is None
                now = self._clock.monotonic()
                if starts:
                    self._began, self._since = now, self._clock.now()
                    self._failed.clear()
                is_due = starts or now - self._reported_at >= _REPORT_EVERY
                if is_due:
                    self._reported_at = now
                self._failed.add(activity)
            since = None if starts else self._since
        if is_due:
            self._events.emit(StorageFailing(error=error_text(error), since=since))
        self._events.emit(WorkerProblem.of(activity, error, during_outage=is_outage))

    def report_final(self, activity: str, error: Exception) -> None:
        """Report a failure that no later success makes good, also during an outage."""
        self._events.emit(WorkerProblem.of(activity, error))

    def answered(self) -> None:
        """The storage has renewed the lease and refuses no claim: an outage has ended."""
        with self._lock:
            if self._began is None:
                return
            seconds = self._clock.monotonic() - self._began
            self._began = None
            # One activity that fails while the storage answers all others is no outage the next time.
            self._failed_alone = next(iter(self._failed)) if len(self._failed) == 1 else ""
        self._events.emit(StorageBack(seconds=seconds))


def _may_be_outage(error: Exception) -> bool:
    return isinstance(error, StorageError) and not isinstance(
        error, StorageClosed | StorageCorrupt | StorageRefused
    )
