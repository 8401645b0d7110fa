"""What happens to tasks and workers, as frozen values that subscribers receive.

The core emits events; `log` writes them as log lines, `metrics` counts them, the dashboard streams
them. An event has ids, names and numbers, never the arguments or the result of a task; that of a failure
has the text of the exception as well, which `log` masks and may hide.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec
from loguru import logger

from omniq._deprecation import warn_renamed
from omniq.errors import OmniqError

if TYPE_CHECKING:
    from omniq.models import Task

# A library is silent by default: `omniq.log.enable()` switches its log lines on.
logger.disable("omniq")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened. `name` identifies it in logs, metrics and streams."""

    name: ClassVar[str]


class TaskEvent(Event, frozen=True, kw_only=True):
    """Something that happened to one task. `attempt` starts at 1; it is 0 before the first run.

    `token` identifies the claim that the event belongs to, if there is one. `task_type` is the type that
    the task was given, if any.
    """

    id: str
    func_path: str
    queue: str
    attempt: int = 0
    token: int | None = None
    task_type: str = ""


# Tasks


class TaskEnqueued(TaskEvent, frozen=True, kw_only=True):
    """Emitted when a program has enqueued the task on the storage object of the pool.

    `eta` of None: due immediately. `waiting`: how many tasks wait then, as far as the pool knows.
    """

    name: ClassVar[str] = "task.enqueued"
    eta: datetime | None = None
    waiting: int = 0


class QueueHighWater(Event, frozen=True, kw_only=True):
    """Emitted when a pool has counted more waiting tasks than ever since it was made."""

    name: ClassVar[str] = "queue.high_water"
    waiting: int


class TaskClaimed(TaskEvent, frozen=True, kw_only=True):
    """Emitted when a worker has claimed the task."""

    name: ClassVar[str] = "task.claimed"
    owner: str


class TaskStarted(TaskEvent, frozen=True, kw_only=True):
    """Emitted just before the function is called. `owner` is the worker."""

    name: ClassVar[str] = "task.started"
    owner: str = ""


class TaskSucceeded(TaskEvent, frozen=True, kw_only=True):
    """Emitted when the function has returned and its result is recorded.

    `seconds` is how long the function ran, `owner` the worker.
    """

    name: ClassVar[str] = "task.succeeded"
    owner: str = ""
    seconds: float


class AttemptFailed(TaskEvent, frozen=True, kw_only=True):
    """Emitted for every failed run, once that is recorded, before `TaskRetried` or `TaskFailure`.

    `error` is the type of the exception, `error_message` its text and `traceback` its whole traceback.
    The task runs again in `retry_in` seconds; with None it failed for good, for that `reason`.
    """

    name: ClassVar[str] = "attempt.failed"
    owner: str = ""
    seconds: float
    error: str
    error_message: str = ""
    traceback: str = ""
    retry_in: float | None = None
    reason: str = ""


class TaskRetried(TaskEvent, frozen=True, kw_only=True):
    """Emitted when a failed run is recorded and the task runs again at `retry_at`."""

    name: ClassVar[str] = "task.retried"
    error: str
    retry_at: datetime


class TaskFailure(TaskEvent, frozen=True, kw_only=True):
    """Emitted when the last failed run is recorded: the task runs no more, or not before its next time.

    `error` is the type of the exception and `error_message` its text. `owner` is the worker, and
    `seconds` how long the function ran.
    """

    name: ClassVar[str] = "task.failed"
    owner: str = ""
    seconds: float = 0.0
    error: str
    error_message: str = ""


class TaskDead(TaskEvent, frozen=True, kw_only=True):
    """Emitted when the task has become a dead letter, which stays until it is retried or deleted.

    `error`, `error_message`, `traceback` and `seconds` are those of its last run, and `owner` is the worker.
    They are empty if its workers died.
    """

    name: ClassVar[str] = "task.dead"
    reason: str
    owner: str = ""
    seconds: float | None = None
    error: str = ""
    error_message: str = ""
    traceback: str = ""


class TaskCancellation(TaskEvent, frozen=True, kw_only=True):
    """Emitted when a task has ended as CANCELLED: by a user, by its own `Discard`, or by expiry."""

    name: ClassVar[str] = "task.cancelled"
    reason: str = ""


class TaskReleased(TaskEvent, frozen=True, kw_only=True):
    """Emitted when a worker has returned the task: PENDING again, no attempt spent."""

    name: ClassVar[str] = "task.released"
    reason: str = ""


class TaskSnoozed(TaskEvent, frozen=True, kw_only=True):
    """Emitted when a task has raised `Snooze`: it runs again at `until`, no attempt spent."""

    name: ClassVar[str] = "task.snoozed"
    until: datetime
    reason: str = ""


class TaskSuspended(TaskEvent, frozen=True, kw_only=True):
    """Emitted when a task waits for children, events or other tasks: it holds no slot until then.

    `waits_for` has the ids of the first ten, `count` is the number of all; it runs again at `until` at the latest.
    """

    name: ClassVar[str] = "task.suspended"
    waits_for: tuple[str, ...] = ()
    count: int = 0
    until: datetime | None = None


class TaskChanged(TaskEvent, frozen=True, kw_only=True):
    """Emitted when a waiting task was given another priority, queue or eta. The fields are the new ones."""

    name: ClassVar[str] = "task.changed"
    priority: int
    eta: datetime | None = None


class TaskStuck(TaskEvent, frozen=True, kw_only=True):
    """Emitted once for each run that has exceeded its timeout and still runs.

    `owner` is the worker that runs it, `deliveries` is how often the task was claimed so far.
    """

    name: ClassVar[str] = "task.stuck"
    owner: str
    seconds: float
    deliveries: int


class StepSkipped(TaskEvent, frozen=True, kw_only=True):
    """Emitted when a step with `critical=False` has failed; `error` is the type of the error."""

    name: ClassVar[str] = "task.step_skipped"
    step: str
    error: str


class HookFailed(TaskEvent, frozen=True, kw_only=True):
    """Emitted when a task's `on_success`, `on_failure` or `on_dead` has raised or timed out.

    This has no other consequence. `error` is the type of the exception, `error_message` its text.
    """

    name: ClassVar[str] = "hook.failed"
    hook: str
    error: str
    error_message: str = ""
    traceback: str = ""


class DeadLetterRetried(Event, frozen=True, kw_only=True):
    """Emitted when a dead letter was enqueued again, under the same `id`."""

    name: ClassVar[str] = "dead.retried"
    id: str


class OrphanedStateDeleted(Event, frozen=True, kw_only=True):
    """Emitted when checkpoints were deleted whose tasks are gone. They were saved before `older_than`."""

    name: ClassVar[str] = "state.cleaned"
    count: int
    older_than: datetime


class StaleRefused(Event, frozen=True, kw_only=True):
    """Emitted when the storage has refused an outcome because another claim owns the task."""

    name: ClassVar[str] = "task.stale"
    id: str
    token: int


class TasksGivenBack(Event, frozen=True, kw_only=True):
    """Emitted when the tasks of a dead worker are claimable again; `owner` is the dead worker."""

    name: ClassVar[str] = "tasks.given_back"
    owner: str
    count: int


class TasksLeft(Event, frozen=True, kw_only=True):
    """Emitted when a storage that is not durable is closed while `count` tasks wait in it."""

    name: ClassVar[str] = "tasks.left"
    storage: str
    count: int


# Schedules


class ScheduleFired(Event, frozen=True, kw_only=True):
    """Emitted when the task `id` was made for a nominal time of a schedule, `late` seconds after it.

    With `overlap="skip"` the task was not enqueued if the previous run has not ended.
    """

    name: ClassVar[str] = "schedule.fired"
    schedule_id: str
    nominal: datetime
    id: str
    late: float


class ScheduleDeclared(Event, frozen=True, kw_only=True):
    """Emitted when a worker starts and a schedule of its code is new, or differs from what was stored.

    `change` is "added", "changed" or "deleted".
    """

    name: ClassVar[str] = "schedule.declared"
    schedule_id: str
    change: str


class ScheduleMissed(Event, frozen=True, kw_only=True):
    """Emitted when nominal times of a schedule get no task because no worker fired them in time.

    `since` is the first of them.
    """

    name: ClassVar[str] = "schedule.missed"
    schedule_id: str
    since: datetime


# Workers and their processes


class WorkerStarted(Event, frozen=True, kw_only=True):
    """Emitted when a worker starts to claim tasks.

    `records` says how records are protected: "open", "signed" or "encrypted"; `runs` which functions
    it runs, and from which files. `storage` is the address of the storage, without passwords, and
    `max_pending` its bound. `omniq worker` also names its functions and the schedules in the storage,
    and says how to `stop` it. `lifespan` and `middleware` are their paths.
    """

    name: ClassVar[str] = "worker.started"
    owner: str
    concurrency: int
    version: str = ""
    storage: str = ""
    records: str = "open"
    queues: str = ""
    max_pending: int | None = None
    runs: str = ""
    functions: str = ""
    schedules: str = ""
    lifespan: str = ""
    middleware: str = ""
    stop: str = ""


class WorkerAdvice(Event, frozen=True, kw_only=True):
    """Emitted when a worker starts with what is probably a mistake; `advice` says what to do."""

    name: ClassVar[str] = "worker.advice"
    advice: str


class WorkerStopping(Event, frozen=True, kw_only=True):
    """Emitted when a worker was asked to stop and claims no more tasks.

    `timeout` of None: it waits until every running task has ended.
    """

    name: ClassVar[str] = "worker.stopping"
    timeout: float | None
    owner: str = ""


class WorkerForced(Event, frozen=True, kw_only=True):
    """Emitted when a worker ends by force while `unfinished` tasks, of which it names some, run.

    `dead` of them may run only once, and are dead letters. The others run again: immediately if they could
    be `released`, otherwise when the lease of the worker has expired.
    """

    name: ClassVar[str] = "worker.forced"
    owner: str
    unfinished: int
    tasks: str
    dead: int = 0
    released: bool = True


class WorkerStopRequested(Event, frozen=True, kw_only=True):
    """Emitted when a worker has read that an operator asks it to stop. `restart`: another replaces it."""

    name: ClassVar[str] = "worker.stop_requested"
    owner: str
    restart: bool = False


class WorkerResized(Event, frozen=True, kw_only=True):
    """Emitted when an operator has changed how many tasks a worker runs at a time."""

    name: ClassVar[str] = "worker.resized"
    owner: str
    slots: int
    before: int


class WorkerStopped(Event, frozen=True, kw_only=True):
    """Emitted when a worker has ended; it returned `released` tasks unfinished.

    `timed_out`: tasks still ran at the end of the shutdown timeout.
    """

    name: ClassVar[str] = "worker.stopped"
    owner: str
    released: int = 0
    timed_out: bool = False


class ProcessStarted(Event, frozen=True, kw_only=True):
    """Emitted when a supervisor has started a worker process."""

    name: ClassVar[str] = "process.started"
    pid: int


class ProcessEnded(Event, frozen=True, kw_only=True):
    """Emitted when a worker process has ended unexpectedly; it is replaced in `restart_in` seconds."""

    name: ClassVar[str] = "process.ended"
    pid: int
    how: str
    restart_in: float


class WorkerRecycling(Event, frozen=True, kw_only=True):
    """Emitted when the process should be replaced. `omniq worker` does so, between two tasks.

    `reason`: "threads" if `leaked_threads` threads hang in timed-out calls; the worker claims nothing until some of
    these calls have returned. "tasks" or "memory" if it has reached `max_tasks_per_child` or
    `max_memory_per_child`.
    """

    name: ClassVar[str] = "worker.recycling"
    owner: str
    leaked_threads: int
    reason: str = "threads"


class LoopBlocked(Event, frozen=True, kw_only=True):
    """Emitted when the event loop is blocked; `stack` shows the line of code that blocks it.

    Without `id` and `func_path`, the blocking code is not a task's function itself.
    """

    name: ClassVar[str] = "loop.blocked"
    owner: str
    id: str = ""
    func_path: str = ""
    stack: str = ""


class WorkerStuck(Event, frozen=True, kw_only=True):
    """Emitted when the loop is blocked past the timeout of the blocking task: the lease will expire.

    Emitted on the heartbeat's thread, because the event loop does not run.
    """

    name: ClassVar[str] = "worker.stuck"
    owner: str
    id: str = ""
    func_path: str = ""


class ClockDiffers(Event, frozen=True, kw_only=True):
    """Emitted when the wall clock of another worker differs from this worker's by more than a lease.

    Delays, retries and schedules of one of the two are wrong. Every worker that sees it emits this once.
    `owner` is the other worker, whose clock is `seconds` ahead.
    """

    name: ClassVar[str] = "worker.clock_differs"
    owner: str
    host: str
    pid: int
    seconds: float


class WorkerStalled(Event, frozen=True, kw_only=True):
    """Emitted when another worker has a valid lease but makes no progress.

    Its loop is blocked, or its heartbeat is late. Every worker that sees it emits this once, and
    again only after the worker has recovered in between. `owner` is the stalled worker, whose last
    heartbeat is `elapsed` seconds old.
    """

    name: ClassVar[str] = "worker.stalled"
    owner: str
    host: str
    pid: int
    last_heartbeat: datetime
    running: int
    elapsed: float = 0.0


class FunctionMissing(Event, frozen=True, kw_only=True):
    """Emitted once when a worker has found that it does not have the function of a task.

    It claims no more tasks of that function until it is restarted; they wait for another worker.
    """

    name: ClassVar[str] = "function.missing"
    func_path: str
    reason: str


class WorkerDrained(Event, frozen=True, kw_only=True):
    """Emitted when `run_until_empty` has run all that it may run, and `left` tasks still wait.

    They are due later, held back by a limit, or of functions that this worker cannot run. `held`: how many
    other workers hold; only `omniq worker --burst` counts them.
    """

    name: ClassVar[str] = "worker.drained"
    owner: str
    left: int
    held: int = 0


class WorkerAwaitsLeases(Event, frozen=True, kw_only=True):
    """Emitted when `omniq worker --burst` waits until other workers have renewed their leases, or lost them.

    They hold `held` tasks. What a killed one held then runs again.
    """

    name: ClassVar[str] = "worker.awaits_leases"
    owner: str
    held: int
    workers: int


class PollEmpty(Event, frozen=True, kw_only=True):
    """Emitted when a worker with free slots tried to claim and no task was due."""

    name: ClassVar[str] = "poll.empty"
    owner: str


class LeaseRenewed(Event, frozen=True, kw_only=True):
    """Emitted when a worker has renewed its lease, every two seconds or more often."""

    name: ClassVar[str] = "lease.renewed"
    owner: str


class LeaseLoss(Event, frozen=True, kw_only=True):
    """Emitted when a worker's lease has expired: the tasks it held may run elsewhere."""

    name: ClassVar[str] = "lease.lost"
    owner: str


class WorkerProblem(Event, frozen=True, kw_only=True):
    """Emitted when something that a worker does besides its tasks has failed.

    `activity` is what failed, such as "recover" or "close lifespan". What a worker repeats is tried again
    later. `during_outage`: the storage did not answer, and `StorageFailing` has reported that.
    """

    name: ClassVar[str] = "worker.problem"
    activity: str
    error: str
    during_outage: bool = False

    @classmethod
    def of(cls, activity: str, error: Exception, *, during_outage: bool = False) -> WorkerProblem:
        """The failure of that activity."""
        return cls(activity=activity, error=error_text(error), during_outage=during_outage)


class StorageFailing(Event, frozen=True, kw_only=True):
    """Emitted when the storage of a worker stops to answer. The worker tries again until it answers.

    It is repeated once a minute, with the time `since` which the storage has not answered.
    """

    name: ClassVar[str] = "storage.failing"
    error: str
    since: datetime | None = None


class StorageBack(Event, frozen=True, kw_only=True):
    """Emitted when the storage answers again, `seconds` after `StorageFailing`."""

    name: ClassVar[str] = "storage.back"
    seconds: float


def error_text(error: Exception) -> str:
    """The text of an error for an event. One that omniq did not raise is shown with its type."""
    return str(error) if isinstance(error, OmniqError) else repr(error)


# Circuit breakers


class BreakerOpened(Event, frozen=True, kw_only=True):
    """Emitted when a circuit breaker stops all calls; `reason` is the type of the last error."""

    name: ClassVar[str] = "breaker.opened"
    breaker: str
    failures: int
    reason: str = ""


class BreakerHalfOpened(Event, frozen=True, kw_only=True):
    """Emitted when an open circuit breaker allows one call as a probe."""

    name: ClassVar[str] = "breaker.half_opened"
    breaker: str


class BreakerClosed(Event, frozen=True, kw_only=True):
    """Emitted when a circuit breaker allows all calls again."""

    name: ClassVar[str] = "breaker.closed"
    breaker: str


# Storages and operators


class StoreRestored(Event, frozen=True, kw_only=True):
    """Emitted when a worker has noticed that its store went back to an earlier state.

    The store was restored from a backup, or has lost its last writes. All workers lose their leases, and
    tokens continue in the next `epoch`. `repeated`: this has happened within one lease before, so that
    claims wait for one lease; probably two servers answer at one address.
    """

    name: ClassVar[str] = "store.restored"
    owner: str
    epoch: int
    repeated: bool = False


class RecordQuarantined(Event, frozen=True, kw_only=True):
    """A damaged record was moved aside. Defined for subscribers; omniq itself does not emit it yet."""

    name: ClassVar[str] = "record.quarantined"
    record: str
    reason: str


class OperatorActed(Event, frozen=True, kw_only=True):
    """Emitted when a user of the dashboard has changed something, or was refused.

    `action` is the path of the request, `subject` the object of the change, `outcome` the result,
    `by` the user's role and `client` the network address.
    """

    name: ClassVar[str] = "operator.acted"
    action: str
    subject: str
    outcome: str
    by: str
    client: str


_RENAMED = {
    "ChoreFailed": WorkerProblem,
    "LeaseLost": LeaseLoss,
    "TaskCancelled": TaskCancellation,
    "TaskFailed": TaskFailure,
}
"""Former names, most of them also names of errors. They work in 0.1 and are removed in 0.2."""


# Hidden from type checkers, which would accept any misspelt name because of it.
if not TYPE_CHECKING:

    def __getattr__(name):
        renamed = _RENAMED.get(name)
        if renamed is None:
            raise AttributeError(f"module 'omniq.events' has no attribute {name!r}")
        warn_renamed(f"omniq.events.{name}", renamed.__name__)
        return renamed


def facts(event: Event) -> dict[str, Any]:
    """The fields of an event by name, without those that are None or empty.

    >>> facts(TaskStarted(id="t1", func_path="mail.send", queue="default", attempt=2))
    {'id': 't1', 'func_path': 'mail.send', 'queue': 'default', 'attempt': 2}
    """
    return {
        key: value
        for key, value in msgspec.structs.asdict(event).items()
        if value not in (None, "")
    }


class TaskLines(Protocol):
    """Writes the two log lines that every task has, without events: a worker writes many of them."""

    def started(self, task: Task) -> None:
        """Write that a run of the task starts."""

    def succeeded(self, task: Task, seconds: float) -> None:
        """Write that a run has succeeded after that many seconds, and that this is recorded."""


class Dispatcher:
    """Passes each event to every subscriber, in the emitter's thread, in order of subscription.

    A subscriber that raises is reported once and never breaks the emitter; it stays subscribed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Replaced as a whole, never changed in place: `emit` iterates over it without the lock.
        self._subscribers: tuple[_Subscriber, ...] = ()
        self._kinds: frozenset[type[Event]] | None = frozenset()
        self.active = False
        """Whether there is a subscriber."""
        self.task_lines: TaskLines | None = None
        """What writes the log lines of each task in place of a subscriber, if anything does."""

    def wants(self, kind: type[Event]) -> bool:
        """Whether a subscriber wants events of this class; hot paths check before they build one."""
        kinds = self._kinds
        return kinds is None or kind in kinds

    def subscribe(
        self, listener: Callable[[Event], object], kinds: Collection[type[Event]] | None = None
    ) -> Callable[[], None]:
        """Call `listener` with every event, or with those of `kinds`; return the unsubscriber.

        Frequent events that no subscriber wants are not built.
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
        self.active = bool(subscribers)
        selections = [each.kinds for each in subscribers if each.kinds is not None]
        has_unfiltered = len(selections) < len(subscribers)
        self._kinds = None if has_unfiltered else frozenset().union(*selections)

    def has(self, listener: Callable[[Event], object]) -> bool:
        """Whether that listener is subscribed."""
        return any(subscriber.listener == listener for subscriber in self._subscribers)

    def emit(self, event: Event) -> None:
        """Call the subscribers. Never raises."""
        for subscriber in self._subscribers:
            subscriber.notify(event)


class _Subscriber:
    """A listener, the event classes it wants, and whether its failure has been reported."""

    def __init__(
        self, listener: Callable[[Event], object], kinds: frozenset[type[Event]] | None
    ) -> None:
        self.listener = listener
        self.kinds = kinds
        self._is_failure_reported = False

    def notify(self, event: Event) -> None:
        if self.kinds is not None and type(event) not in self.kinds:
            return
        try:
            self.listener(event)
        except Exception as error:
            # The application's code. One line is enough to find it; one line for each event would
            # hide all other lines.
            if not self._is_failure_reported:
                self._is_failure_reported = True
                logger.error(
                    "events.subscriber_failed listener={!r} event={} error={!r}",
                    self.listener,
                    event.name,
                    error,
                )
