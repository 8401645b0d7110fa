"""What the parts of a pool report to the pool, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from omniq.errors import LeaseLost
from omniq.storage.types import Renewal


class PoolEvents(Protocol):
    """The pool, as its parts see it: the heartbeat, the claim loop, the running tasks, the threads.

    Each `on_` method returns immediately. Those that another thread calls pass the event on to the
    pool's event loop.
    """

    @property
    def is_ending(self) -> bool:
        """Whether the pool is being torn down: a run that is cancelled now has not failed."""

    @property
    def is_stopping(self) -> bool:
        """Whether the pool was stopped, or has ended by itself. From any thread."""

    @property
    def is_recycling(self) -> bool:
        """Whether too many threads hang in abandoned calls: the pool claims nothing meanwhile."""

    def call_on_loop(self, call: Callable[..., None], *args: Any) -> None:
        """Call it on the pool's event loop. From any thread."""

    def on_renewal(self, renewal: Renewal, asked_at: int) -> None:
        """The lease was renewed; `asked_at` is a tick of the register of claims. From the heartbeat's thread."""

    def on_lease_lost(self, lost: LeaseLost) -> None:
        """Another worker has fenced this one, or the store went back. From the heartbeat's thread."""

    def on_heartbeat_failure(self, error: Exception) -> None:
        """A renewal or the watchdog failed. Called by the heartbeat's thread."""

    def on_stop_request(self, *, restart: bool) -> None:
        """An operator has asked this worker to stop. From the heartbeat's thread."""

    def on_slots_request(self, slots: int) -> None:
        """An operator has changed the number of slots of this worker. From the heartbeat's thread."""

    def on_cancel(self, task_id: str) -> None:
        """A caller cancelled that task; this worker may run it. From any thread."""

    def on_finished(self) -> None:
        """A run has finished; its outcome waits to be recorded. Or a batch wants more tasks.

        On the pool's event loop.
        """

    def on_leaked_threads_change(self) -> None:
        """The number of threads that hang in abandoned calls has changed. On the event loop."""
