"""Exceptions that a task raises to retry, to run later, or to be discarded."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from omniq.tasks.durations import Duration, seconds_of

_DISCARDED = "discarded by the task"


class Signal(Exception):
    """A request of the running task to its worker."""


class Retry(Signal):
    """This attempt failed; run the task again after `delay` seconds, or after its usual back-off.

    It counts as a failure: when no retries are left, the task fails for good.
    """

    # On the class as well: a subclass may define an __init__ that does not call this one.
    delay: float | None = None

    def __init__(self, reason: str = "", *, delay: Duration | None = None) -> None:
        super().__init__(reason or "the task asked to be retried")
        self.delay = None if delay is None else seconds_of("delay", delay)


class Snooze(Signal):
    """Not now: run the task again after `delay` seconds. It uses no attempt. The log has the `reason`."""

    delay: float = 0.0
    reason: str = ""

    def __init__(self, delay: Duration, *, reason: str = "") -> None:
        self.delay = seconds_of("delay", delay)
        self.reason = reason
        super().__init__(reason or f"come back in {self.delay:g} s")


class Discard(Signal):
    """The task is no longer needed: it ends as CANCELLED, with that reason."""

    reason: str = _DISCARDED

    def __init__(self, reason: str = _DISCARDED) -> None:
        super().__init__(reason)
        self.reason = reason


class Suspend(Signal):
    """The task waits for the ends of other records. `ctx.wait` raises it."""

    def __init__(
        self, on: Sequence[str], *, enough: int | None = None, until: datetime | None = None
    ) -> None:
        super().__init__(f"waits for {len(on)} tasks")
        self.on = tuple(on)
        self.enough = enough
        self.until = until
