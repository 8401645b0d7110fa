"""Whether a failed task runs again, and after how long. Pure: the caller draws random numbers.

In this module `attempts` are the failures before the run that has just failed, so the first
retry of a task is decided with `attempts=0`.
"""

from __future__ import annotations

import math
import re

import msgspec

from omniq.errors import InvalidTask

LONGEST_DELAY = 10 * 366 * 86_400.0
"""No delay is longer than ten years, so that every eta is a valid `datetime`."""

UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
"""The units of durations that are written as text, such as 30s or 7d."""

_CALL = re.compile(r"(exponential|linear)\s*\(([^()]*)\)")
_SPAN = re.compile(rf"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*({'|'.join(UNIT_SECONDS)})?")

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


class ListedDelays(msgspec.Struct, frozen=True):
    """Waits as long as a list says; after its last delay, that one again.

    A task stores only the list: releases that do not know it could not decode another backoff.

    >>> [ListedDelays((10.0, 60.0)).delay(n, 0.0) for n in (0, 1, 2)]
    [10.0, 60.0, 60.0]
    """

    delays: tuple[float, ...]

    def delay(self, attempts: int, random: float) -> float:
        """Seconds to wait after the failure that followed `attempts` earlier ones, without jitter."""
        delay = self.delays[min(attempts, len(self.delays) - 1)]
        # Another program may have stored any number: NaN and negatives are ignored.
        return _bounded(delay, None) if delay >= 0 else 0.0


def policy_from_text(text: str) -> Backoff | tuple[float, ...]:
    """The backoff or the delays that a setting or a command line names. Raises `ValueError`.

    >>> policy_from_text("linear(step=5, cap=1m)")
    LinearBackoff(step=5.0, cap=60.0)
    >>> policy_from_text("10s, 30s, 5m")
    (10.0, 30.0, 300.0)
    """
    found = _CALL.fullmatch(text.strip())
    if found is None:
        return tuple(map(_seconds, text.split(",")))
    values = {}
    for part in filter(None, map(str.strip, found[2].split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r}: expected name=value")
        values[name.strip()] = _seconds(value)
    kind = ExponentialBackoff if found[1] == "exponential" else LinearBackoff
    try:
        return kind(**values)
    except (TypeError, InvalidTask) as error:
        raise ValueError(str(error)) from error


def policy_text(policy: Backoff | tuple[float, ...]) -> str:
    """The text that `policy_from_text` reads.

    >>> policy_text((10.0, 0.5)), policy_text(LinearBackoff(step=5.0, cap=60.0))
    ('10, 0.5', 'linear(step=5, cap=60)')
    """
    if isinstance(policy, tuple):
        return ", ".join(map(_number_text, policy))
    kind = "exponential" if isinstance(policy, ExponentialBackoff) else "linear"
    values = msgspec.structs.asdict(policy).items()
    shown = (f"{name}={_number_text(value)}" for name, value in values if value is not None)
    return f"{kind}({', '.join(shown)})"


def _number_text(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(number)


def _seconds(text: str) -> float:
    """A number of seconds, or a number with a unit."""
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text.strip()!r}: expected a duration such as 10, 30s or 5m")
    return float(found[1]) * UNIT_SECONDS[found[2] or "s"]


def may_retry(attempts: int, max_retries: int) -> bool:
    """Whether a task that failed `attempts` times before this failure runs once more.

    A task therefore runs at most `max_retries + 1` times.

    >>> [may_retry(attempts, max_retries=2) for attempts in (0, 1, 2)]
    [True, True, False]
    """
    return attempts < max_retries


def next_delay(
    backoff: Backoff | ListedDelays, attempts: int, retry_after: float | None, random: float
) -> float:
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
