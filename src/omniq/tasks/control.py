"""What a task may raise to say what should become of it, besides failing."""

from __future__ import annotations

from datetime import timedelta

from omniq.durations import seconds_of

_DISCARDED = "discarded by the task"


class Signal(Exception):
    """A request of the running task to its worker."""


class Retry(Signal):
    """This attempt failed; run the task again after `delay` seconds, or after its usual backoff.

    It counts as a failure: once the retries are used up, the task fails for good.
    """

    # On the class as well: a subclass may have an __init__ of its own that forgets this one.
    delay: float | None = None

    def __init__(self, reason: str = "", *, delay: float | timedelta | None = None) -> None:
        super().__init__(reason or "the task asked to be retried")
        self.delay = None if delay is None else seconds_of("delay", delay)


class Snooze(Signal):
    """Not now: run the task again after `delay` seconds. No attempt is spent."""

    delay: float = 0.0

    def __init__(self, delay: float | timedelta) -> None:
        self.delay = seconds_of("delay", delay)
        super().__init__(f"come back in {self.delay:g} s")


class Discard(Signal):
    """Not wanted any more: the task ends as CANCELLED, with that reason."""

    reason: str = _DISCARDED

    def __init__(self, reason: str = _DISCARDED) -> None:
        super().__init__(reason)
        self.reason = reason
