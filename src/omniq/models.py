"""Tasks, results, dead letters and the other stored values. Plain, frozen data."""

from __future__ import annotations

import math
import re
import traceback as traceback_module
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import msgspec

from omniq.clock import SYSTEM_CLOCK
from omniq.cron import check_cron
from omniq.errors import InvalidTask, InvalidValue
from omniq.retry import Backoff
from omniq.text.to_json import REDACTED, JsonRecord, plain, redacted

MAX_TEXT = 8_192
"""Longest stored message of an error; a task may raise an exception with a gigabyte of text."""

MAX_TRACEBACK = 32_768

NO_TIMEOUT = 100 * 366 * 86_400.0
"""A `Task.timeout` that means no limit. Releases that do not know that read it as a hundred years."""

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_FUNC_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_MAX_INT = 2**63 - 1
_MIN_INTERVAL = 0.01
MAX_MISSED = 100_000
MAX_DELAYS = 1_000
_MAX_SHOWN = 8
_OWN_FOLDER = f"{Path(__file__).parent}/"
_MISFIT = re.compile(r"[\w.<>]+\(\) (?:takes|missing|got) ")
_MISFIT_HINT = (
    "the function does not take the arguments of this task; was it changed while the task waited? "
    "See omniq dead retry --args and --kwargs"
)


class TaskStatus(StrEnum):
    """The state of a task.

    PENDING ──claim──► RUNNING ──► SUCCESS
       ▲                 │ ├─────► FAILED ──dead.retry──► PENDING
       │                 │ ├─────► CANCELLED   (also from PENDING and RETRYING)
       ├─release, snooze─┘ │
       ├─next interval─────┤
    RETRYING ◄──failed, will run again──┘
    """

    PENDING = "pending"
    RUNNING = "running"
    RETRYING = "retrying"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the task has ended; only `dead.retry` runs such a task again."""
        return self in _FINAL


_FINAL = frozenset({TaskStatus.SUCCESS, TaskStatus.FAILED, TaskStatus.CANCELLED})

LEGAL_TRANSITIONS: dict[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.PENDING: frozenset({TaskStatus.RUNNING, TaskStatus.CANCELLED}),
    TaskStatus.RUNNING: frozenset(TaskStatus) - {TaskStatus.RUNNING},
    TaskStatus.RETRYING: frozenset(TaskStatus) - {TaskStatus.RETRYING},
    TaskStatus.SUCCESS: frozenset(),
    TaskStatus.FAILED: frozenset({TaskStatus.PENDING}),
    TaskStatus.CANCELLED: frozenset(),
}


class ErrorCategory(StrEnum):
    """Whether running the task again may help.

    UNCLASSIFIED: no rule says so, and the rules retry only errors that are known to be transient.
    """

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    PARTIAL = "partial"
    UNCLASSIFIED = "unclassified"


class TaskError(Exception):
    """An error that a task may raise, and the stored record of any error it raised.

    It is stored as text, never pickled, so that reading it runs no code.
    """

    category: ErrorCategory = ErrorCategory.TRANSIENT

    def __init__(
        self,
        message: str = "",
        *,
        error_type: str | None = None,
        traceback: str = "",
        timestamp: datetime | None = None,
        category: ErrorCategory | str | None = None,
        retry_after: float | None = None,
        failed_step: str | None = None,
        recovery_hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.error_type = error_type or type(self).__name__
        self.traceback = traceback
        self.timestamp = timestamp
        self.category = ErrorCategory(category) if category is not None else type(self).category
        self.retry_after = retry_after
        self.failed_step = failed_step
        self.recovery_hint = recovery_hint

    @classmethod
    def from_exception(
        cls, error: BaseException, *, timestamp: datetime | None = None
    ) -> TaskError:
        """The record of any exception, also of one whose methods raise.

        All its texts have a maximum length and can be stored.
        """
        facts: dict[str, Any] = {
            "message": _bounded(_text_of(error), MAX_TEXT),
            "error_type": type(error).__qualname__,
            "traceback": _bounded(_format_traceback(error), MAX_TRACEBACK),
            "timestamp": timestamp,
        }
        if isinstance(error, TaskError):
            facts |= _facts_of(error)
        elif _is_misfit(error):
            facts |= {"traceback": "", "recovery_hint": _MISFIT_HINT}
        return TaskError(**facts)

    def to_record(self) -> dict[str, Any]:
        """The keyword arguments that make an equal error."""
        return {
            "message": self.message,
            "error_type": self.error_type,
            "traceback": self.traceback,
            "timestamp": self.timestamp,
            "category": self.category,
            "retry_after": self.retry_after,
            "failed_step": self.failed_step,
            "recovery_hint": self.recovery_hint,
        }

    def __str__(self) -> str:
        if self.failed_step is None:
            return self.message
        return f"{self.failed_step}: {self.message} (category: {self.category})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskError) and self.to_record() == other.to_record()

    def __hash__(self) -> int:
        return hash((self.error_type, self.message, self.timestamp))


class TransientError(TaskError):
    """Running the task again later may help."""


class PermanentError(TaskError):
    """Running the task again cannot help: it fails for good immediately."""

    category = ErrorCategory.PERMANENT


class PartialError(TaskError):
    """Part of the work is done; running the task again does the rest."""

    category = ErrorCategory.PARTIAL


OnConflict = Literal["keep", "replace", "extend"]
"""What an enqueue does when another task holds its unique key."""


class Limit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many tasks with this key may run at the same time, or start within `per` seconds, on all workers.

    `cost` is the number of units that the task takes; then `max_running` and `rate` are numbers of units.
    """

    key: str
    max_running: int | None = None
    rate: int | None = None
    per: float = 1.0
    cost: int | None = None


class FairShare(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tasks of all keys of a queue take turns. A key with twice the `weight` gets twice as many.

    A task takes `cost` turns of its key.
    """

    key: str
    weight: float = 1.0
    cost: float = 1.0


class BreakerRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The circuit breaker of that name, shared by all workers, must admit the task."""

    name: str
    max_failures: int = 5
    reset_timeout: float = 30.0


class ChildrenFailed(PermanentError):
    """Tasks that a task waited for did not succeed. `failures` has the results of the first ten."""

    def __init__(
        self, message: str = "", *, failures: Sequence[TaskResult] = (), **facts: Any
    ) -> None:
        super().__init__(message, **facts)
        self.failures = list(failures)


class WaitTimeout(PermanentError):
    """What a task waited for had not ended at its deadline."""


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """An argument that is the result of a record: where it belongs, and the id of the record.

    The first item of `path` is the position or the name of the argument, the others lead into it. If it
    `is_paged`, the function gets a `Results` in its place, which reads the results in pages.
    """

    path: tuple[int | str, ...]
    id: str
    is_paged: bool = False


class TaskWorkflow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a task has besides if it is part of a workflow.

    `kind`: an `event` ends when it is given a value, a `group` with its last member; neither runs. `parent`
    is the record it belongs to. The task is not claimed before all of `after` have succeeded and all of
    `after_any` have ended. A group that `is_open` gets more members; with `stops`, the first member that
    fails cancels the others. `refs` are the arguments that are results of other records. `undo` is the function
    that is called with the result if the flow fails; a task that `survives` is not cancelled with its flow.
    With an `action` the worker does not call the function: it adds a call for each item of the first argument
    (`map`), or calls what undoes the nodes of the flow (`undo`). `value` is the simple type that an event's value
    must have, and `prompt` the question to the person who gives it.

    Tasks with the same `sequence` run one at a time, in the order of their enqueue. With `halts`, the next one does
    not run while this one is a dead letter.

    The storage sets the others: `follows` is the task of its sequence that it waits for ('' if that is not known yet); `needs` is the number of records that it still waits for, of which it can do
    without `holds`, and `on` those of a task that is suspended; `members` are the live records that belong
    to it, of `size` in all; `failed` of them did not succeed.
    """

    kind: Literal["task", "event", "group"] = "task"
    parent: str | None = None
    after: tuple[str, ...] = ()
    after_any: tuple[str, ...] = ()
    is_open: bool = False
    stops: bool = False
    refs: tuple[Ref, ...] = ()
    undo: str | None = None
    survives: bool = False
    action: Literal["", "map", "undo"] = ""
    value: str | None = None
    prompt: str = ""
    sequence: str | None = None
    halts: bool = False
    follows: str | None = None
    needs: int = 0
    holds: int = 0
    on: tuple[str, ...] = ()
    members: int = 0
    size: int = 0
    failed: int = 0
    has_returned: bool = False


class Task(JsonRecord, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored call of a function. `Task(func_path="m.f")` is due immediately.

    `eta=None` means due immediately; the storage fills in the time of enqueue. `failures`, which is
    stored as `attempts`, is the number of failed runs, and `crashes` that of workers that died while
    they ran it: `max_retries` limits the first, `max_crashes` the second. `interval`, `timeout` and
    `result_ttl` are seconds; a `timeout` or `result_ttl` of None means the default of the settings, and
    a `timeout` of `NO_TIMEOUT` no limit. The delays before retries are `retry_delays`, or come from
    `retry`. With `reschedule_on_failure` a repeating task goes on after a failure. `task_type` is for
    people; None: the function's path. The storage sets `token`, `owner`, `crashes`, `releases` and
    `started_at`. `secrets` are the positions and names of arguments that are never shown. `version` is
    the version of the function that the arguments are for; 0: whatever version the code has. With `ageing`,
    one step of priority is worth that many seconds of waiting.
    """

    id: str = msgspec.field(default_factory=SYSTEM_CLOCK.new_id)
    func_path: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    queue: str = "default"
    priority: int = 0
    eta: datetime | None = None
    interval: float | None = None
    cron: str | None = None
    tz: str | None = None
    max_retries: int = 3
    retry: Backoff | None = None
    timeout: float | None = None
    unique: str | None = None
    expires: datetime | None = None
    result_ttl: float | None = None
    limits: tuple[Limit, ...] = ()
    breakers: tuple[BreakerRule, ...] = ()
    metadata: dict[str, Any] = {}
    secrets: tuple[int | str, ...] = ()
    schedule_id: str | None = None
    max_crashes: int | None = None
    retry_delays: tuple[float, ...] = ()
    reschedule_on_failure: bool = False
    task_type: str | None = None
    workflow: TaskWorkflow | None = None
    version: int = 1
    on_conflict: OnConflict = "keep"
    max_wait: float | None = None
    unique_for: float | None = None
    fair: FairShare | None = None
    ageing: float | None = None
    created_at: datetime = msgspec.field(default_factory=SYSTEM_CLOCK.now)
    status: TaskStatus = TaskStatus.PENDING
    attempts: int = 0
    crashes: int = 0
    releases: int = 0
    token: int = 0
    owner: str | None = None
    started_at: datetime | None = None
    cancel_requested: bool = False
    occurrence: int = 0
    """Of a repeating task: the same number in all runs of one occurrence, and a larger one in the next."""
    is_verified: bool = True
    """False if the stored call could not be read or its signature is wrong: only the store says what
    it is, its arguments are missing, and it never runs."""

    @property
    def failures(self) -> int:
        """The number of runs that failed; `attempts` is its older name."""
        return self.attempts

    @property
    def runs_at_most_once(self) -> bool:
        """Whether it may not run again once a run has begun and its end is unknown."""
        return self.max_crashes is not None and self.max_crashes <= 1

    def _as_json(self, fields: dict[str, Any]) -> dict[str, Any]:
        """With `attempts` also under the name that says what it counts."""
        return fields | {"failures": self.attempts}

    def shown_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Return args, kwargs and metadata, with `[redacted]` for what is or may be a secret."""
        args = [
            REDACTED if position in self.secrets else redacted(value)
            for position, value in enumerate(self.args)
        ]
        kwargs = {
            name: REDACTED if name in self.secrets else value
            for name, value in redacted(self.kwargs).items()
        }
        return tuple(args), kwargs, redacted(self.metadata)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as values for JSON, without the secrets among the arguments."""
        args, kwargs, metadata = self.shown_arguments()
        shown = msgspec.structs.replace(self, args=args, kwargs=kwargs, metadata=metadata)
        fields: dict[str, Any] = plain(shown)
        return fields


class TaskResult(JsonRecord, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of a run. `attempts` counts runs, this one included."""

    task_id: str
    status: TaskStatus
    result: Any = None
    error: TaskError | None = None
    attempts: int = 0
    started_at: datetime | None = None
    finished_at: datetime | None = None
    reason: str | None = None
    warnings: tuple[str, ...] = ()


class Attempt(JsonRecord, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run that did not succeed: when it ran, on which worker, and why it ended."""

    number: int
    token: int
    owner: str | None
    started_at: datetime | None
    finished_at: datetime
    outcome: str
    error: TaskError | None = None


class DeadLetter(JsonRecord, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task that failed for good, stored until it is retried or deleted."""

    task_id: str
    # Stored under its first name: other releases of omniq read and write the same records.
    func_path: str = msgspec.field(name="task_type")
    failure_reason: str
    attempt_count: int
    first_failure: datetime
    last_failure: datetime
    error_details: str
    queue: str = "default"
    checkpoint: bytes | None = None
    own_type: str | None = None
    """The `task_type` that the task was given."""
    is_verified: bool = True
    """False if the storage has a key, and this dead letter has no seal that was made with it: it may be forged,
    that of a call that could not be verified, or older than these seals. Without the key, False if it has a seal."""

    @property
    def task_type(self) -> str:
        """What kind of work it is: the `task_type` of the task, or else the function's path."""
        return self.own_type or self.func_path

    def _as_json(self, fields: dict[str, Any]) -> dict[str, Any]:
        """With `id` and `func_path`, the names that tasks have; `task_type` always says something."""
        del fields["own_type"]
        return fields | {
            "task_type": self.task_type,
            "id": self.task_id,
            "func_path": self.func_path,
        }


class StoredLetter(DeadLetter, frozen=True, kw_only=True, omit_defaults=True):
    """A dead letter as a backend stores it, with the seal of its facts. Private to storages."""

    seal: bytes = b""


class Progress(JsonRecord, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress that a running task reports: `fraction` in [0, 1]."""

    task_id: str
    token: int
    fraction: float
    message: str = ""


class Runnable(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The functions that a worker can run: all in `modules`, and `names`, but none of `excluded`.

    `modules` are dotted names of modules or packages, with everything below them; None for all.

    >>> runnable = Runnable(modules=("shop",), excluded=frozenset({"shop.new"}))
    >>> [runnable.accepts(path) for path in ("shop.send", "shop.new", "shopping.send")]
    [True, False, False]
    """

    modules: tuple[str, ...] | None = ()
    names: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()

    def accepts(self, func_path: str) -> bool:
        """Whether the worker can run the function."""
        if func_path in self.excluded:
            return False
        if self.modules is None or func_path in self.names:
            return True
        # A path has few dots, and a worker may have many modules.
        end = func_path.find(".")
        while end >= 0:
            if func_path[:end] in self.modules:
                return True
            end = func_path.find(".", end + 1)
        return False

    def __str__(self) -> str:
        """What it accepts, for people.

        >>> print(Runnable(modules=("shop", "mail"), excluded=frozenset({"shop.new"})))
        mail, shop; not shop.new
        """
        given = ["all"] if self.modules is None else sorted({*self.modules, *self.names})
        text = _shortened(given) or "nothing"
        return f"{text}; not {_shortened(sorted(self.excluded))}" if self.excluded else text


def _shortened(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_SHOWN])
    return f"{shown} and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else shown


class WorkerInfo(JsonRecord, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker with a lease. `running` are the ids of the tasks it holds.

    `paused`: an operator has paused it, and it claims no tasks. `stopping`: it was stopped, claims no
    tasks and ends when its running tasks have ended. `runnable`: the functions that it can run; None for
    all. `succeeded`, `failed` and `retried` count its runs since it started. `late`: it is `stalled` because
    no heartbeat came, so that its process may be dead.
    """

    id: str
    host: str
    pid: int
    started_at: datetime
    last_heartbeat: datetime
    running: tuple[str, ...] = ()
    stalled: bool = False
    concurrency: int = 0
    queues: tuple[str, ...] = ()
    paused: bool = False
    stopping: bool = False
    runnable: Runnable | None = None
    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    late: bool = False

    def can_run(self, func_path: str) -> bool:
        """Whether it has the function, as far as it has reported that."""
        return self.runnable is None or self.runnable.accepts(func_path)


class EndedWorker(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """A worker that has ended, as it last was. `why` is empty if it was stopped; `tasks`: how many it still held."""

    worker: WorkerInfo
    ended_at: datetime
    why: str = ""
    tasks: int = 0


class AuditEntry(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """What an operator has changed, or tried to change: never with arguments. `note` is what the operator wrote."""

    at: datetime
    action: str
    subject: str
    outcome: str
    by: str
    client: str = ""
    note: str = ""


class Version(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """A version of the application's tasks and of omniq, and when a worker first started with it.

    `code` is the setting `app_version`, or else a digest of the modules that have the tasks.
    """

    code: str
    omniq: str
    started_at: datetime


class Pong(JsonRecord, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of a worker that was pinged, and what it may run.

    `seconds` is how long the answer took: up to two seconds of it is the pause between two heartbeats.
    `functions` are the functions that the worker has, by path, name and alias; `more` is how many of them
    are left out. `modules` are those that it was given; None for a worker without named modules.
    """

    worker_id: str
    seconds: float
    modules: tuple[str, ...] | None = None
    functions: tuple[str, ...] = ()
    more: int = 0


class QueueStats(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the tasks in a storage. `by_queue` counts tasks that have not ended.

    `oldest_due_age` is for how many seconds the longest-waiting due task has been due;
    `oldest_by_queue` is the same for each queue that has a due task.
    """

    by_status: dict[TaskStatus, int]
    by_queue: dict[str, int]
    oldest_due_age: float
    dead: int
    oldest_by_queue: dict[str, float] = {}


MissedPolicy = Literal["skip", "once", "all"]
"""What happens to nominal times that passed while no worker ran: no run, one run, or all of them."""

OverlapPolicy = Literal["allow", "skip", "queue", "cancel_old"]
"""What happens at a nominal time when the previous run has not ended."""


class Schedule(JsonRecord, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rule that enqueues a task at its nominal times, at most once for each.

    The nominal times come from `cron` (in the zone `tz`, or UTC) or `interval` (seconds, counted
    from `start`), or there is only one, `at`; none is before `start` or after `end`. `task` is the
    template of the enqueued tasks. `next_at` is the next nominal time to fire (None: there is no
    other), `last_at` the last one that fired. A task is due up to `jitter` seconds after its
    nominal time. `declared`: a worker's code declares it with `@task(cron=…)`, in `module`. `version`
    grows with every change.
    """

    id: str
    task: Task
    cron: str | None = None
    tz: str | None = None
    interval: float | None = None
    at: datetime | None = None
    start: datetime | None = None
    end: datetime | None = None
    next_at: datetime | None = None
    last_at: datetime | None = None
    paused: bool = False
    missed: MissedPolicy = "once"
    max_missed: int = 100
    overlap: OverlapPolicy = "allow"
    jitter: float = 0.0
    declared: bool = False
    module: str = ""
    version: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as values for JSON, without the secrets among the arguments."""
        return {**plain(self), "task": self.task.as_dict()}


def check_task(task: Task) -> None:
    """Refuse an invalid task before anything is written.

    Raises `InvalidTask`, naming the field and what it should be.
    """
    check_id(task.id)
    shared = task.func_path, task.queue, task.priority, task.max_retries, task.attempts
    try:
        _check_shared(*shared)
    except TypeError:
        # An unhashable value is never valid, but cannot be cached: check without the cache.
        _check_shared.__wrapped__(*shared)
    if task.created_at is None:
        raise InvalidTask("created_at: expected a datetime")
    check_instant("created_at", task.created_at)
    # Few tasks have these, and a batch has many tasks: skip the call where there is no value.
    if task.eta is not None:
        check_instant("eta", task.eta)
    if task.version != 1:
        check_int("version", task.version, low=0)
    if task.expires is not None:
        check_instant("expires", task.expires)
    if task.interval is not None:
        check_seconds("interval", task.interval, above_zero=True)
    if task.timeout is not None:
        check_seconds("timeout", task.timeout, above_zero=True)
    if task.retry_delays:
        check_delays("retry_delays", task.retry_delays)
    if task.task_type is not None:
        check_key("task_type", task.task_type)
    if task.result_ttl is not None:
        check_seconds("result_ttl", task.result_ttl)
    if task.max_crashes is not None:
        check_int("max_crashes", task.max_crashes, low=0)
    if task.unique is not None:
        check_key("unique", task.unique)
    if type(task.args) not in (tuple, list):
        raise InvalidTask("args must be a tuple")
    for texts in (task.kwargs, task.metadata):
        if type(texts) is not dict or (texts and not all(type(key) is str for key in texts)):
            raise InvalidTask("kwargs and metadata must be dictionaries with text as keys")
    if task.on_conflict != "keep" or task.max_wait is not None or task.unique_for is not None:
        _check_conflict(task)
    if task.limits or task.breakers:
        _check_gates(task)
    if task.fair is not None or task.ageing is not None:
        _check_order(task)
    if task.workflow is not None:
        _check_workflow(task, task.workflow)


def _check_conflict(task: Task) -> None:
    if task.on_conflict not in get_args(OnConflict):
        raise InvalidTask(
            f"on_conflict {_short(task.on_conflict)}: expected one of {', '.join(get_args(OnConflict))}"
        )
    if task.unique is None:
        name = (
            "unique_for" if task.on_conflict == "keep" and task.max_wait is None else "on_conflict"
        )
        raise InvalidTask(f"{name}: give unique as well, or there is no key to hold")
    check_seconds("max_wait", task.max_wait, above_zero=True)
    check_seconds("unique_for", task.unique_for, above_zero=True)
    if task.on_conflict == "keep":
        if task.max_wait is not None:
            raise InvalidTask("max_wait: give on_conflict='replace' or 'extend' as well")
    elif task.interval is not None or task.cron is not None:
        raise InvalidTask("on_conflict: a task that repeats keeps its unique key; use change_task")


def _check_order(task: Task) -> None:
    check_seconds("ageing", task.ageing, above_zero=True)
    fair = task.fair
    if fair is None:
        return
    if task.ageing is not None:
        raise InvalidTask("give either fair_key or ageing, not both: each decides the order")
    check_key("fair_key", fair.key)
    check_above_zero("fair_weight", fair.weight)
    check_above_zero("cost", fair.cost)


def check_above_zero(name: str, value: Any) -> None:
    """Refuse anything but a finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        if is_number and math.isfinite(value) and value > 0:
            return
    except OverflowError:
        # An int that no float can hold.
        pass
    raise InvalidTask(f"{name} {_short(value)}: expected a number above 0")


def _check_workflow(task: Task, workflow: TaskWorkflow) -> None:
    for source in (*workflow.after, *workflow.after_any):
        check_id(source)
    if workflow.parent is not None:
        check_id(workflow.parent)
        if not task.id.startswith(f"{workflow.parent}."):
            raise InvalidTask(
                f"task {task.id}: its parent is {workflow.parent}, so its id must begin with "
                f"{workflow.parent}."
            )
    if workflow.kind != "task" and (workflow.after or workflow.after_any or workflow.sequence):
        raise InvalidTask(f"{workflow.kind} {task.id}: only a task waits for others")
    if workflow.sequence is not None:
        check_key("sequence", workflow.sequence)


def check_schedule(schedule: Schedule) -> None:
    """Refuse an invalid schedule. Raises `InvalidValue`, for its task `InvalidTask`."""
    check_stored_schedule(schedule)
    if schedule.cron is not None:
        check_cron(schedule.cron, schedule.tz)


def check_stored_schedule(schedule: Schedule) -> None:
    """As `check_schedule`, for one that may be of a machine that knows other time zones."""
    check_name("schedule id", schedule.id, error=InvalidValue)
    timings = (schedule.cron, schedule.interval, schedule.at)
    if sum(timing is not None for timing in timings) > 1:
        raise InvalidValue(f"schedule {schedule.id}: give one of cron, interval and at")
    if schedule.tz is not None and schedule.cron is None:
        raise InvalidValue("tz: only a cron expression has a time zone")
    check_seconds("interval", schedule.interval, above_zero=True, error=InvalidValue)
    if schedule.interval is not None and schedule.interval < _MIN_INTERVAL:
        raise InvalidValue(f"interval: must be at least {_MIN_INTERVAL} seconds")
    for field in ("at", "start", "end", "next_at", "last_at"):
        check_instant(field, getattr(schedule, field), error=InvalidValue)
    if schedule.start and schedule.end and schedule.end < schedule.start:
        raise InvalidValue(f"schedule {schedule.id}: its end is before its start")
    _check_policies(schedule)


def _check_policies(schedule: Schedule) -> None:
    if schedule.missed not in get_args(MissedPolicy):
        raise InvalidValue(f"missed {schedule.missed!r}: expected one of {get_args(MissedPolicy)}")
    if schedule.overlap not in get_args(OverlapPolicy):
        raise InvalidValue(
            f"overlap {schedule.overlap!r}: expected one of {get_args(OverlapPolicy)}"
        )
    check_int("max_missed", schedule.max_missed, low=1, error=InvalidValue)
    if schedule.max_missed > MAX_MISSED:
        raise InvalidValue(f"max_missed {schedule.max_missed}: at most {MAX_MISSED}")
    check_seconds("jitter", schedule.jitter, error=InvalidValue)
    if schedule.task.cron is not None or schedule.task.interval is not None:
        raise InvalidTask(f"schedule {schedule.id}: its task must not repeat by itself")


# Cached because most tasks have the same few combinations of these values. `typed`, because
# 1 and True are equal, and only one of them is valid.
@lru_cache(maxsize=256, typed=True)
def _check_shared(
    func_path: object, queue: object, priority: object, max_retries: object, attempts: object
) -> None:
    check_func_path(func_path)
    check_name("queue", queue)
    check_int("priority", priority, low=-_MAX_INT - 1)
    check_int("max_retries", max_retries, low=0)
    check_int("attempts", attempts, low=0)


def _check_gates(task: Task) -> None:
    for limit in task.limits:
        _check_limit(limit)
    kinds = [(limit.key, limit.rate is None) for limit in task.limits]
    if len(set(kinds)) < len(kinds):
        raise InvalidTask("limits: give each key one max_running and one rate at most")
    for breaker in task.breakers:
        check_key("breaker name", breaker.name)
        check_int("max_failures", breaker.max_failures, low=1)
        check_seconds("reset_timeout", breaker.reset_timeout)


def check_id(task_id: object) -> None:
    """Refuse a value that is not a valid task id: ids become file names and keys."""
    if type(task_id) is not str or not _ID.fullmatch(task_id):
        raise InvalidTask(
            f"task id {_short(task_id)}: use 1 to 128 of the characters A-Z a-z 0-9 . _ - "
            "and do not begin with a dot"
        )


def check_name(field: str, name: object, *, error: type[InvalidValue] = InvalidTask) -> None:
    """Refuse a value that is not a valid name of a queue or a schedule."""
    if type(name) is not str or not _ID.fullmatch(name):
        raise error(
            f"{field} {_short(name)}: use 1 to 128 of the characters A-Z a-z 0-9 . _ - "
            "and do not begin with a dot"
        )


def check_names(field: str, names: object) -> None:
    """Refuse a text where several names are expected: it would be taken letter by letter."""
    if isinstance(names, str):
        raise InvalidValue(f"{field}={names!r}: expected a list, such as [{names!r}]")


def check_func_path(path: object) -> None:
    """Refuse a value that is not a dotted path to a function."""
    if type(path) is not str or len(path) > 512 or not _FUNC_PATH.fullmatch(path):
        raise InvalidTask(
            f"func_path {_short(path)}: expected a dotted path such as 'pkg.mod.func'"
        )


def check_key(field: str, key: object) -> None:
    """Refuse a value that is not a valid key: not text, empty, too long, or not valid Unicode."""
    if type(key) is not str or not 1 <= len(key) <= 512:
        raise InvalidTask(f"{field} {_short(key)}: expected text of 1 to 512 characters")
    try:
        key.encode()
    except UnicodeEncodeError:
        raise InvalidTask(f"{field} {_short(key)}: not valid Unicode") from None
    if "\0" in key:
        raise InvalidTask(f"{field} {_short(key)}: must not contain a NUL character")


def check_int(
    field: str, value: object, *, low: int, error: type[InvalidValue] = InvalidTask
) -> None:
    """Refuse a value that is not an integer between `low` and 2**63 - 1."""
    if type(value) is not int:
        raise error(f"{field} {_short(value)}: expected a whole number")
    if not low <= value <= _MAX_INT:
        raise error(f"{field} {_short(value)}: must be at least {low} and below 2**63")


def check_instant(field: str, value: object, *, error: type[InvalidValue] = InvalidTask) -> None:
    """Refuse datetimes without a time zone."""
    # Most datetimes are in UTC: no need to compute an offset.
    if value is None or (type(value) is datetime and value.tzinfo is UTC):
        return
    if not isinstance(value, datetime):
        raise error(f"{field} {_short(value)}: expected a datetime")
    if value.utcoffset() is None:
        raise error(
            f"{field} {value.isoformat()}: has no time zone; use datetime.now(UTC) or add tzinfo"
        )


def check_seconds(
    field: str,
    value: object,
    *,
    above_zero: bool = False,
    error: type[InvalidValue] = InvalidTask,
) -> None:
    """Refuse durations that are negative, NaN or infinite, and 0 if `above_zero`."""
    if value is None:
        return
    if type(value) not in (int, float) or not isinstance(value, int | float):
        raise error(f"{field} {_short(value)}: expected a number of seconds")
    if not 0 <= value < math.inf or (above_zero and value == 0):
        bound = "above 0" if above_zero else "0 or more"
        raise error(f"{field} {_short(value)}: must be a finite number of seconds, {bound}")
    if value > _MAX_SECONDS:
        raise error(
            f"{field} {_short(value)}: must be at most {_MAX_SECONDS:g} seconds (100 years)"
        )


_MAX_SECONDS = int(NO_TIMEOUT)


def check_delays(
    field: str, delays: Sequence[object], *, error: type[InvalidValue] = InvalidTask
) -> None:
    """Refuse a list of delays that is empty or too long, or has a wrong duration in seconds."""
    if not delays:
        raise error(f"{field}: the list is empty; for no retries, give max_retries=0")
    if len(delays) > MAX_DELAYS:
        raise error(f"{field}: a list of {len(delays)} delays; the maximum is {MAX_DELAYS}")
    for delay in delays:
        if delay is None:
            raise error(f"{field}: None in the list; expected a number of seconds")
        check_seconds(field, delay, error=error)


def type_of(task: Task) -> str:
    """What kind of work the task is, for people: its `task_type`, or else the function's path."""
    return task.task_type or task.func_path


def timeout_of(task: Task, default: float | None) -> float | None:
    """The seconds that a run of the task may take; None: no limit. `default` is the setting."""
    timeout = default if task.timeout is None else task.timeout
    return None if timeout is None or timeout >= NO_TIMEOUT else timeout


def _check_limit(limit: Limit) -> None:
    check_key("limit key", limit.key)
    if (limit.max_running is None) == (limit.rate is None):
        raise InvalidTask(f"limit {limit.key!r}: give either max_running or rate")
    if limit.max_running is not None:
        check_int("max_running", limit.max_running, low=1)
    if limit.rate is not None:
        check_int("rate", limit.rate, low=1)
        check_seconds("per", limit.per, above_zero=True)
    if limit.cost is not None:
        check_int("cost", limit.cost, low=1)


def _short(value: object) -> str:
    """A short description of a value that may be huge or hostile."""
    try:
        text = repr(value) if isinstance(value, str | int | float) else type(value).__name__
    except Exception:
        # Python refuses to convert an int of more than 4,300 digits.
        text = type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def _facts_of(error: TaskError) -> dict[str, Any]:
    """The attributes of a `TaskError` that can be stored.

    A subclass may not call our `__init__`, and user code may have set any attribute.
    """
    facts: dict[str, Any] = {}
    for name in ("message", "error_type", "traceback", "failed_step", "recovery_hint"):
        text = getattr(error, name, None)
        if text and isinstance(text, str):
            facts[name] = _bounded(text, MAX_TRACEBACK if name == "traceback" else MAX_TEXT)
    category = getattr(error, "category", None)
    if isinstance(category, ErrorCategory):
        facts["category"] = category
    happened = getattr(error, "timestamp", None)
    if isinstance(happened, datetime) and happened.utcoffset() is not None:
        facts["timestamp"] = happened
    seconds = getattr(error, "retry_after", None)
    if isinstance(seconds, int | float) and 0 <= seconds < math.inf:
        facts["retry_after"] = min(float(seconds), float(_MAX_SECONDS))
    return facts


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        # The `__str__` of the user's class failed.
        return "(the exception's text cannot be shown)"


def _format_traceback(error: BaseException) -> str:
    try:
        frames = _first_user_frame(error.__traceback__)
        if frames is None:
            if isinstance(error, TaskError):
                # omniq itself found it, such as arguments that do not fit: its frames say nothing.
                return ""
            frames = error.__traceback__
        return "".join(traceback_module.format_exception(type(error), error, frames))
    except BaseException:
        # format_exception calls the user's __str__, and may run out of stack.
        return ""


def _is_misfit(error: BaseException) -> bool:
    """Whether the function was not even called, because it does not take the arguments of the task."""
    return (
        type(error) is TypeError
        and _first_user_frame(error.__traceback__) is None
        and _MISFIT.match(_text_of(error)) is not None
    )


def _first_user_frame(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of omniq that called the task; None if it has no others."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        frames = frames.tb_next
    return frames


def _bounded(text: str, limit: int) -> str:
    """Cut the middle out of a long text, and escape what UTF-8 cannot encode."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
