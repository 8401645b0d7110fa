"""Looks for the moment at which a limit was broken, in what was written down about the runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def most_at_once(runs: Sequence[tuple[Any, Any]]) -> int:
    """How many of these runs, each from a start to an end, were under way at one moment at most.

    >>> most_at_once([(0, 2), (1, 3), (2, 4)])
    2
    """
    # At one and the same moment, who leaves makes room for who comes.
    changes = sorted([(start, 1) for start, _ in runs] + [(end, 0) for _, end in runs])
    most = inside = 0
    for _, is_start in changes:
        inside += 1 if is_start else -1
        most = max(most, inside)
    return most


def most_within(starts: Sequence[Any], span: Any) -> int:
    """How many of these starts, in order, fall into one span at most.

    >>> most_within([0, 1, 9, 10, 11], 10)
    3
    """
    most = first = 0
    for number, start in enumerate(starts):
        while starts[first] + span <= start:
            first += 1
        most = max(most, number - first + 1)
    return most
