"""What happens to tasks and workers, told as frozen values to whoever listens.

The core emits; `log` words events, `metrics` counts them, the dashboard streams them. Events carry
ids, names and numbers, never the arguments or the result of a task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any, ClassVar

import msgspec
from loguru import logger

from omniq.errors import OmniqError

# A library does not talk unasked: `omniq.log.enable()` switches its log lines on.
logger.disable("omniq")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened. `name` is what it is called in logs, metrics and streams."""

    name: ClassVar[str]


class TaskEvent(Event, frozen=True, kw_only=True):
    """Something that happened to one task. `attempt` starts at 1; 0 before the first run.

    `token` names the claim that it belongs to, where there is one.
    """

    id: str
    func_path: str
    queue: str
    attempt: int = 0
    token: int | None = None


class TaskEnqueued(TaskEvent, frozen=True, kw_only=True):
    """The storage holds the task. `eta` of None: due at once."""

    name: ClassVar[str] = "task.enqueued"
    eta: datetime | None = None


class TaskClaimed(TaskEvent, frozen=True, kw_only=True):
    """A worker has taken the task."""

    name: ClassVar[str] = "task.claimed"
    owner: str


class TaskStarted(TaskEvent, frozen=True, kw_only=True):
    """The function is about to be called."""

    name: ClassVar[str] = "task.started"


class TaskSucceeded(TaskEvent, frozen=True, kw_only=True):
    """The function returned and its result is recorded. `seconds` is how long it ran."""

    name: ClassVar[str] = "task.succeeded"
    seconds: float


class TaskRetried(TaskEvent, frozen=True, kw_only=True):
    """The run failed and the task will run again at `retry_at`."""

    name: ClassVar[str] = "task.retried"
    error: str
    retry_at: datetime


class TaskFailed(TaskEvent, frozen=True, kw_only=True):
    """The run failed and there will be no other. `error` is the type of the error."""

    name: ClassVar[str] = "task.failed"
    error: str


class TaskDead(TaskEvent, frozen=True, kw_only=True):
    """The task is a dead letter now, until somebody retries or deletes it."""

    name: ClassVar[str] = "task.dead"
    reason: str


class TaskCancelled(TaskEvent, frozen=True, kw_only=True):
    """The task ended without doing its work, because somebody or something said so."""

    name: ClassVar[str] = "task.cancelled"
    reason: str = ""


class TaskReleased(TaskEvent, frozen=True, kw_only=True):
    """A worker handed the task back unharmed: PENDING again, no attempt spent."""

    name: ClassVar[str] = "task.released"
    reason: str = ""


class TaskSnoozed(TaskEvent, frozen=True, kw_only=True):
    """The task asked to come back at `until`: no attempt spent."""

    name: ClassVar[str] = "task.snoozed"
    until: datetime


class StepSkipped(TaskEvent, frozen=True, kw_only=True):
    """A step failed that the task can do without; `error` is the type of the error."""

    name: ClassVar[str] = "task.step_skipped"
    step: str
    error: str


class StaleRefused(Event, frozen=True, kw_only=True):
    """An outcome came too late and was dropped: another claim owns the task."""

    name: ClassVar[str] = "task.stale"
    id: str
    token: int


class TasksGivenBack(Event, frozen=True, kw_only=True):
    """A worker is gone and what it held is claimable again."""

    name: ClassVar[str] = "tasks.given_back"
    owner: str
    count: int


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A worker claims tasks from now on."""

    name: ClassVar[str] = "worker.started"
    owner: str
    concurrency: int


class WorkerStopping(Event, frozen=True, kw_only=True):
    """A worker was told to stop: it claims no more. `timeout` of None: it waits for all that runs."""

    name: ClassVar[str] = "worker.stopping"
    timeout: float | None


class WorkerStopped(Event, frozen=True, kw_only=True):
    """A worker has ended; `released` tasks were handed back."""

    name: ClassVar[str] = "worker.stopped"
    owner: str
    released: int = 0


class ProcessStarted(Event, frozen=True, kw_only=True):
    """A supervisor has started a worker process."""

    name: ClassVar[str] = "process.started"
    pid: int


class ProcessEnded(Event, frozen=True, kw_only=True):
    """A worker process has ended unasked; another takes its place in `restart_in` seconds."""

    name: ClassVar[str] = "process.ended"
    pid: int
    how: str
    restart_in: float


class PollEmpty(Event, frozen=True, kw_only=True):
    """A worker with free slots asked for tasks and there were none."""

    name: ClassVar[str] = "poll.empty"
    owner: str


class TasksLeft(Event, frozen=True, kw_only=True):
    """A storage that keeps nothing was closed while tasks were waiting in it."""

    name: ClassVar[str] = "tasks.left"
    storage: str
    count: int


class ScheduleFired(Event, frozen=True, kw_only=True):
    """The task `id` stands for a nominal time of a schedule, `late` seconds after it.

    It was not enqueued where the run before it has not ended and `overlap="skip"` leaves it out.
    """

    name: ClassVar[str] = "schedule.fired"
    schedule_id: str
    nominal: datetime
    id: str
    late: float


class ScheduleMissed(Event, frozen=True, kw_only=True):
    """Nobody was there at nominal times of a schedule, the first at `since`: they have no task."""

    name: ClassVar[str] = "schedule.missed"
    schedule_id: str
    since: datetime


class WorkerRecycling(Event, frozen=True, kw_only=True):
    """So many threads hang in calls that were given up that the process should be replaced.

    The worker claims nothing until some of them have come back.
    """

    name: ClassVar[str] = "worker.recycling"
    owner: str
    leaked_threads: int


class LoopBlocked(Event, frozen=True, kw_only=True):
    """A task keeps the event loop from running anything else; `stack` is where it is.

    Without `id` and `func_path` the loop is in something that is not a task's own function.
    """

    name: ClassVar[str] = "loop.blocked"
    owner: str
    id: str = ""
    func_path: str = ""
    stack: str = ""


class WorkerStuck(Event, frozen=True, kw_only=True):
    """The event loop is blocked past the timeout of what blocks it: the lease is left to run out.

    Told in a thread of its own, since the loop hears nothing.
    """

    name: ClassVar[str] = "worker.stuck"
    owner: str
    id: str = ""
    func_path: str = ""


class WorkerStalled(Event, frozen=True, kw_only=True):
    """Another worker keeps its lease and does not get on: its loop is blocked, or its beat is late.

    Told by every worker that sees it, once until it gets on again. `owner` is the stalled one.
    """

    name: ClassVar[str] = "worker.stalled"
    owner: str
    host: str
    pid: int
    last_heartbeat: datetime
    running: int


class TaskStuck(TaskEvent, frozen=True, kw_only=True):
    """A task runs for longer than it may, and nobody has stopped it. Told once for each run.

    `deliveries` is how often it has been claimed so far, `owner` who has it now.
    """

    name: ClassVar[str] = "task.stuck"
    owner: str
    seconds: float
    deliveries: int


class BreakerOpened(Event, frozen=True, kw_only=True):
    """A circuit breaker lets nothing through; `reason` is the type of the last error."""

    name: ClassVar[str] = "breaker.opened"
    breaker: str
    failures: int
    reason: str = ""


class BreakerHalfOpened(Event, frozen=True, kw_only=True):
    """A circuit breaker has let one call through, to see whether it succeeds."""

    name: ClassVar[str] = "breaker.half_opened"
    breaker: str


class BreakerClosed(Event, frozen=True, kw_only=True):
    """A circuit breaker lets everything through again."""

    name: ClassVar[str] = "breaker.closed"
    breaker: str


class HookFailed(TaskEvent, frozen=True, kw_only=True):
    """A task's `on_failure` or `on_dead` raised, or took too long. Nothing else comes of it."""

    name: ClassVar[str] = "hook.failed"
    hook: str
    error: str


class LeaseRenewed(Event, frozen=True, kw_only=True):
    """A worker showed that it is alive."""

    name: ClassVar[str] = "lease.renewed"
    owner: str


class LeaseLost(Event, frozen=True, kw_only=True):
    """A worker could not renew in time; what it held may run elsewhere."""

    name: ClassVar[str] = "lease.lost"
    owner: str


class RecordQuarantined(Event, frozen=True, kw_only=True):
    """A stored record cannot be trusted and was put aside, where it blocks nobody."""

    name: ClassVar[str] = "record.quarantined"
    record: str
    reason: str


class OperatorActed(Event, frozen=True, kw_only=True):
    """Somebody has used the dashboard to change something, or was refused.

    `action` is the path of what was asked for, `subject` what it was about, `outcome` what came of
    it, `by` their role and `client` the address they came from.
    """

    name: ClassVar[str] = "operator.acted"
    action: str
    subject: str
    outcome: str
    by: str
    client: str


class ChoreFailed(Event, frozen=True, kw_only=True):
    """One turn of a worker's upkeep failed; it will be tried again."""

    name: ClassVar[str] = "chore.failed"
    chore: str
    error: str

    @classmethod
    def of(cls, chore: str, error: Exception) -> ChoreFailed:
        """The failure of that chore; an error that is not omniq's own is named by its type too."""
        return cls(chore=chore, error=str(error) if isinstance(error, OmniqError) else repr(error))


def facts(event: Event) -> dict[str, Any]:
    """The fields of an event that say something, by name: those that are None or empty are left out.

    >>> facts(TaskStarted(id="t1", func_path="mail.send", queue="default", attempt=2))
    {'id': 't1', 'func_path': 'mail.send', 'queue': 'default', 'attempt': 2}
    """
    return {
        key: value
        for key, value in msgspec.structs.asdict(event).items()
        if value not in (None, "")
    }


class Dispatcher:
    """Hands each event to every subscriber, in the thread of the emitter, in order of subscription.

    A subscriber that raises is reported once and never breaks the caller; it stays subscribed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Replaced as a whole, never changed in place: `emit` walks it without the lock.
        self._subscribers: tuple[_Subscriber, ...] = ()
        self._kinds: frozenset[type[Event]] | None = frozenset()

    @property
    def active(self) -> bool:
        """Whether anybody listens."""
        return bool(self._subscribers)

    def wants(self, kind: type[Event]) -> bool:
        """Whether anybody listens to such events; hot paths ask before they build one."""
        kinds = self._kinds
        return kinds is None or kind in kinds

    def subscribe(
        self, listener: Callable[[Event], object], kinds: Collection[type[Event]] | None = None
    ) -> Callable[[], None]:
        """Call `listener` with every event from now on, or every one of `kinds`, until the returned
        function is called. Events that nobody asked for are not even made.
        """
        subscriber = _Subscriber(listener, None if kinds is None else frozenset(kinds))
        with self._lock:
            self._replace((*self._subscribers, subscriber))

        def unsubscribe() -> None:
            with self._lock:
                self._replace([other for other in self._subscribers if other is not subscriber])

        return unsubscribe

    def _replace(self, subscribers: Collection[_Subscriber]) -> None:
        self._subscribers = tuple(subscribers)
        asked_for = [each.kinds for each in subscribers if each.kinds is not None]
        is_all = len(asked_for) < len(subscribers)
        self._kinds = None if is_all else frozenset().union(*asked_for)

    def has(self, listener: Callable[[Event], object]) -> bool:
        """Whether that listener is subscribed."""
        return any(subscriber.listener == listener for subscriber in self._subscribers)

    def emit(self, event: Event) -> None:
        """Tell everybody. Never raises."""
        for subscriber in self._subscribers:
            subscriber.tell(event)


class _Subscriber:
    """A listener, what it asked for, and whether its failure has been reported."""

    def __init__(
        self, listener: Callable[[Event], object], kinds: frozenset[type[Event]] | None
    ) -> None:
        self.listener = listener
        self.kinds = kinds
        self._reported = False

    def tell(self, event: Event) -> None:
        if self.kinds is not None and type(event) not in self.kinds:
            return
        try:
            self.listener(event)
        except Exception as error:
            # Somebody else's code at the edge. One line is enough to find it; one for each event
            # would bury everything else.
            if not self._reported:
                self._reported = True
                logger.error(
                    "events.subscriber_failed listener={!r} event={} error={!r}",
                    self.listener,
                    event.name,
                    error,
                )
