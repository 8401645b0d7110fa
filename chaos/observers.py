"""Observers that record the events of a worker and the leases that the storage grants it."""

from __future__ import annotations

from typing import Any

from chaos.history import Journal
from omniq import events
from omniq.clock import to_micros
from omniq.storage.base import BaseStorage
from omniq.worker import AsyncWorkerPool

_OUTCOMES: dict[type[Any], str] = {
    events.TaskSucceeded: "done",
    events.TaskRetried: "retried",
    events.TaskDead: "dead",
    events.TaskCancellation: "cancelled",
    events.TaskReleased: "released",
    events.TaskSnoozed: "snoozed",
}


def observe_lease(storage: BaseStorage, journal: Journal) -> None:
    """Record how long the storage guarantees its owner's claims. Call it before it is opened."""
    identity, clock = storage._identity, storage.clock
    trust = identity.trust

    def observed(owner: str, until: int) -> None:
        trust(owner, until)
        # The journal's clock first: time that passes in between makes the lease shorter, not longer.
        now = journal.now()
        left = (until - clock.boot_micros()) / 1e6
        journal.note("lease", owner=owner, until=now + left)

    identity.trust = observed  # type: ignore[method-assign]


def observe_pool(pool: AsyncWorkerPool, journal: Journal) -> None:
    """Record every event of the pool about its tasks."""

    def listen(event: Any) -> None:
        match event:
            case events.TaskClaimed():
                journal.note("claim", event.id, event.token or 0, owner=event.owner)
            case events.StaleRefused():
                journal.note("stale", event.id, event.token)
            case events.TasksGivenBack():
                journal.note("recovered", owner=event.owner, value=event.count)
            case events.TaskDead(reason="crashed"):
                # Not a claim of this worker: recovery found it with a dead worker.
                journal.note("crashed", event.id)
            case events.ScheduleFired():
                nominal = to_micros(event.nominal) / 1e6
                journal.note("fired", event.id, value=event.schedule_id, until=nominal)
            case _ if type(event) in _OUTCOMES:
                journal.note(_OUTCOMES[type(event)], event.id, event.token or 0)

    pool.events.subscribe(listen)
