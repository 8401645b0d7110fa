"""The orders in which the tables of queues, workers and groups of dead letters can be shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Sorts = Mapping[str, tuple[str, Callable[[Any], Any]]]
"""The name of each order in the URL, the text of its link, and its key. The first one is the default."""

QUEUE_SORTS: Sorts = {
    "oldest": (
        "longest wait",
        lambda pair: (-pair[0].oldest_due_age, -pair[0].waiting, pair[0].name),
    ),
    "waiting": ("most waiting", lambda pair: (-pair[0].waiting, pair[0].name)),
    "running": ("most running", lambda pair: (-pair[0].running, pair[0].name)),
    "failed": ("most failed", lambda pair: (-(pair[1].errors if pair[1] else 0), pair[0].name)),
    "name": ("name", lambda pair: pair[0].name),
}
WORKER_SORTS: Sorts = {
    "host": ("host", lambda view: (view.worker.host, view.worker.pid)),
    "busy": ("most running", lambda view: (-len(view.worker.running), view.worker.host)),
    "failed": (
        "most failed",
        lambda view: (-view.worker.failed - view.worker.retried, view.worker.host),
    ),
    "newest": ("newest", lambda view: -view.worker.started_at.timestamp()),
}
DEAD_SORTS: Sorts = {
    "newest": ("last failure", lambda group: -group.last_failure.timestamp()),
    "count": ("most", lambda group: -group.count),
    "first": ("newest error", lambda group: -group.first_failure.timestamp()),
}


def chosen_sort(sorts: Sorts, name: str) -> tuple[str, Callable[[Any], Any]]:
    """The order with this name, or the default."""
    chosen = name if name in sorts else next(iter(sorts))
    return chosen, sorts[chosen][1]


def names_of(sorts: Sorts) -> list[tuple[str, str]]:
    """The names and texts of the links."""
    return [(name, text) for name, (text, _) in sorts.items()]
