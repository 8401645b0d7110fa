"""Whether a failed task runs again, and after how long. Pure: the caller draws random numbers.

In this module `attempts` are the failures before the run that has just failed, so the first
retry of a task is decided with `attempts=0`.
"""

from __future__ import annotations

import math

import msgspec

from omniq.errors import InvalidTask

LONGEST_DELAY = 10 * 366 * 86_400.0
"""No delay is longer than ten years, so that every eta is a valid `datetime`."""

# Beyond this many doublings every delay has reached LONGEST_DELAY; the power must fit a float.
_MOST_DOUBLINGS = 1_000


def retry_delay(attempts: int, *, base: float, jitter: float = 0.0) -> float:
    """Seconds to wait before the next run, when `attempts` runs had failed before this one.

    `jitter` is a number in [0, 1) drawn by the caller, so that this stays pure; it adds up to a
    tenth of the delay.

    >>> [retry_delay(n, base=1.0) for n in (0, 1, 2)]
    [1.0, 2.0, 4.0]
    >>> retry_delay(2, base=1.0, jitter=0.5)
    4.2
    """
    return ExponentialBackoff(base=base).delay(attempts, jitter)


class ExponentialBackoff(msgspec.Struct, frozen=True, tag="exponential", omit_defaults=True):
    """Waits `base`, 2 `base`, 4 `base` … seconds, each longer by a random part of up to `jitter`.

    `jitter` is a fraction: with 0.1, a delay of 10 s becomes one of 10 to 11 s, so that tasks
    that failed together are not retried together. `cap` is the longest delay, jitter included.

    >>> ExponentialBackoff(base=2.0, cap=60).delay(3, 0.0)
    16.0
    >>> ExponentialBackoff(base=2.0, cap=60).delay(30, 0.0)
    60.0
    """

    base: float = 1.0
    jitter: float = 0.1
    cap: float | None = None

    def __post_init__(self) -> None:
        _check_seconds("base", self.base)
        _check_cap(self.cap)
        if not _is_number(self.jitter) or not 0 <= self.jitter <= 1:
            raise InvalidTask(f"jitter {self.jitter!r}: expected a fraction from 0 to 1")

    def delay(self, attempts: int, random: float) -> float:
        """Seconds to wait after the failure that followed `attempts` earlier ones.

        `random` is a number in [0, 1).
        """
        # Bounded before the jitter as well: infinity times a jitter of 0 would be NaN.
        delay = min(self.base * 2.0 ** min(attempts, _MOST_DOUBLINGS), LONGEST_DELAY)
        return _bounded(delay + delay * self.jitter * random, self.cap)


class LinearBackoff(msgspec.Struct, frozen=True, tag="linear", omit_defaults=True):
    """Waits `step`, 2 `step`, 3 `step` … seconds, and never more than `cap`.

    >>> [LinearBackoff(step=5.0, cap=12.0).delay(n, 0.0) for n in (0, 1, 2)]
    [5.0, 10.0, 12.0]
    """

    step: float
    cap: float | None = None

    def __post_init__(self) -> None:
        _check_seconds("step", self.step)
        _check_cap(self.cap)

    def delay(self, attempts: int, random: float) -> float:
        """Seconds to wait after the failure that followed `attempts` earlier ones.

        `random` is ignored: this backoff has no jitter. It is a parameter of every backoff.
        """
        # An int of more than 1,024 bits does not convert to a float.
        return _bounded(self.step * (min(attempts, 2**62) + 1), self.cap)


Backoff = ExponentialBackoff | LinearBackoff
"""Every kind of backoff. Plain data, because it is stored with its task."""


def may_retry(attempts: int, max_retries: int) -> bool:
    """Whether a task that failed `attempts` times before this failure runs once more.

    A task therefore runs at most `max_retries + 1` times.

    >>> [may_retry(attempts, max_retries=2) for attempts in (0, 1, 2)]
    [True, True, False]
    """
    return attempts < max_retries


def next_delay(backoff: Backoff, attempts: int, retry_after: float | None, random: float) -> float:
    """Seconds until the next run; `retry_after`, which the error may carry, is a lower bound.

    >>> next_delay(ExponentialBackoff(), 0, 30.0, 0.0)
    30.0
    >>> next_delay(ExponentialBackoff(), 6, 30.0, 0.0)
    64.0
    """
    delay = backoff.delay(attempts, random)
    # The error is raised by user code and may carry any number: NaN and negatives are ignored.
    if retry_after is not None and retry_after > delay:
        delay = min(float(retry_after), LONGEST_DELAY)
    return delay


def _bounded(delay: float, cap: float | None) -> float:
    return float(min(delay, LONGEST_DELAY if cap is None else min(cap, LONGEST_DELAY)))


def _check_seconds(field: str, value: float) -> None:
    if not _is_number(value) or not math.isfinite(value) or value < 0:
        raise InvalidTask(f"{field} {value!r}: expected a finite number of seconds, 0 or more")


def _check_cap(cap: float | None) -> None:
    if cap is not None:
        _check_seconds("cap", cap)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
