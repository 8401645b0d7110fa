"""Pauses between attempts to reach something that fails: doubled each time, up to a maximum."""

from __future__ import annotations


def backoff(failures: int, *, first: float, longest: float, jitter: float = 1.0) -> float:
    """Seconds to pause after that many failures in a row, `first` after none.

    `jitter` is a number in [0, 1) drawn by the caller: the pause lies between half of the doubled
    value and the whole of it, so that processes that failed together do not retry together.

    >>> [backoff(n, first=0.1, longest=1.0) for n in (0, 1, 2, 3, 4)]
    [0.1, 0.2, 0.4, 0.8, 1.0]
    >>> backoff(0, first=0.1, longest=1.0, jitter=0.0)
    0.05
    """
    # Bounded, since 2 ** failures would overflow a float after a long outage.
    return min(longest, first * 2.0 ** min(failures, 30)) * (0.5 + jitter / 2)
