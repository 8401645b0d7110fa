"""Writes down what a worker is told, by its own events and by the storage's word on its lease."""

from __future__ import annotations

from typing import Any

from chaos.history import Journal
from omniq import events
from omniq.clock import to_micros
from omniq.storage.base import BaseStorage
from omniq.storage.types import Identity
from omniq.worker import AsyncWorkerPool

_OUTCOMES: dict[type[Any], str] = {
    events.TaskSucceeded: "done",
    events.TaskRetried: "retried",
    events.TaskDead: "dead",
    events.TaskCancellation: "cancelled",
    events.TaskReleased: "released",
    events.TaskSnoozed: "snoozed",
}


class WatchedIdentity(Identity):
    """Writes down until when the store has promised to leave this owner's claims alone."""

    def __init__(self, journal: Journal, storage: BaseStorage) -> None:
        super().__init__()
        self._journal = journal
        self._clock = storage.clock

    def trust(self, owner: str, until: int) -> None:
        super().trust(owner, until)
        # The journal's clock first: time that passes in between makes the lease shorter, not longer.
        now = self._journal.now()
        left = (until - self._clock.boot_micros()) / 1e6
        self._journal.note("lease", owner=owner, until=now + left)


def watch_lease(storage: BaseStorage, journal: Journal) -> None:
    """Have the storage's leases written down. Before it is opened."""
    storage._identity = WatchedIdentity(journal, storage)


def watch_pool(pool: AsyncWorkerPool, journal: Journal) -> None:
    """Have everything written down that the pool tells of its tasks."""

    def listen(event: Any) -> None:
        match event:
            case events.TaskClaimed():
                journal.note("claim", event.id, event.token or 0, owner=event.owner)
            case events.StaleRefused():
                journal.note("stale", event.id, event.token)
            case events.TasksGivenBack():
                journal.note("recovered", owner=event.owner, value=event.count)
            case events.TaskDead(reason="crashed"):
                # Not this worker's claim: it was found with a dead one.
                journal.note("crashed", event.id)
            case events.ScheduleFired():
                nominal = to_micros(event.nominal) / 1e6
                journal.note("fired", event.id, value=event.schedule_id, until=nominal)
            case _ if type(event) in _OUTCOMES:
                journal.note(_OUTCOMES[type(event)], event.id, event.token or 0)

    pool.events.subscribe(listen)
