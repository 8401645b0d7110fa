"""Computes from recorded runs the most that ran at once and the most that started in a period."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def most_at_once(runs: Sequence[tuple[Any, Any]]) -> int:
    """Return the highest number of these runs, each a start and an end, at one time.

    >>> most_at_once([(0, 2), (1, 3), (2, 4)])
    2
    """
    # If a run ends when another starts, the end comes first.
    changes = sorted([(start, 1) for start, _ in runs] + [(end, 0) for _, end in runs])
    most = inside = 0
    for _, is_start in changes:
        inside += 1 if is_start else -1
        most = max(most, inside)
    return most


def most_within(starts: Sequence[Any], span: Any) -> int:
    """Return the highest number of these starts, in order, within one span.

    >>> most_within([0, 1, 9, 10, 11], 10)
    3
    """
    most = first = 0
    for number, start in enumerate(starts):
        while starts[first] + span <= start:
            first += 1
        most = max(most, number - first + 1)
    return most
