"""Every error omniq raises, one tree under `OmniqError`.

OmniqError
├── InvalidValue           an argument was refused before anything was written
│   └── InvalidTask            … of a task, of a call, or of an option of a task
│       ├── OutputTooLarge         a chunk of the output of a task is too large
│       └── SerializationError     a value cannot be encoded, or bytes cannot be decoded
│           ├── NotSealed              … because an older omniq stored them, without a seal
│           └── KeyNeeded              … because they are sealed, and there is no key here
├── SettingsError          a setting is wrong; names the setting and where it came from
├── DuplicateTask          the task id is taken
├── QueueFull              the storage holds `max_pending` waiting tasks
├── TaskNotFound           there is no record of that task
├── TaskNotWaiting         the task is running or has ended, so it cannot be changed
├── ScheduleNotFound       there is no schedule with that id
├── FunctionNotFound       a function path does not lead to a function
│   └── ForbiddenFunction      it may not be run here
├── UnguardedModule        a module enqueues, or starts a worker, when it is imported
├── StorageError           a storage operation failed; the driver's error is the cause
│   ├── StorageClosed          used before it was opened, or after it was closed
│   ├── CallTimeout            a blocking call took longer than its deadline allows
│   ├── StorageRefused         the server refuses this client; a retry does not help
│   └── StorageCorrupt         stored data is damaged
├── ClaimError
│   ├── StaleClaim             another attempt owns the task now
│   └── LeaseLost              this owner was fenced; its tasks were returned to the queue
│       └── StoreWentBack      the store was restored, or lost its last writes: all owners are fenced
├── ResultError
│   ├── TaskFailed             the task ended as FAILED; carries the stored error
│   ├── TaskCancelled          the task ended as CANCELLED
│   └── ResultTimeout          no final result within the given time
├── CircuitOpen            the breaker is open; nothing was called
├── LifespanFailed         the lifespan of a worker failed, so the worker did not start
├── MiddlewareError        a middleware did not await `call_next()` exactly once
├── PoolStopped            the pool takes no more tasks
└── ShutdownTimeout        the pool could not stop in time
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omniq.models import TaskError


class OmniqError(Exception):
    """The root of every error that omniq raises."""


class InvalidValue(OmniqError, ValueError):
    """An argument was refused before anything was written: a limit, a filter, a timing, a size."""


class InvalidTask(InvalidValue):
    """A task, a call or an option of a task was refused before anything was written."""


class OutputTooLarge(InvalidTask):
    """A chunk of the output of a task is larger than one may be; nothing of it was stored."""

    def __init__(self, size: int, largest: int) -> None:
        super().__init__(
            f"output: one chunk takes {size:,} bytes, and {largest:,} is the maximum; make several of it, or store "
            "the data elsewhere and output where it is"
        )
        self.size = size
        self.largest = largest


class SerializationError(InvalidTask):
    """A value cannot be encoded, or bytes cannot be decoded. `path` says where in the value."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class NotSealed(SerializationError):
    """An older omniq stored it with a key, and without a seal of its kind. It waits for `schema upgrade`."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: an older omniq stored it, and it is not signed as a whole; to see what it has "
            "and to sign it, run 'omniq schema upgrade' with the key"
        )


class KeyNeeded(SerializationError):
    """It is signed or encrypted, and this process has no key: it can be neither verified nor changed here."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: it is signed or encrypted, and can only be read and changed with the key; set OMNIQ_SIGNING_KEY "
            "or OMNIQ_ENCRYPTION_KEY as the workers have it"
        )


class SettingsError(OmniqError, ValueError):
    """A setting is wrong; the message names the setting and where it came from."""


class DuplicateTask(OmniqError):
    """The id is taken: a task with that id is waiting, running, or still on record."""

    def __init__(self, task_id: str) -> None:
        super().__init__(
            f"task {task_id} exists already; choose another task_id, or leave it out to get a fresh one"
        )
        self.task_id = task_id


class QueueFull(OmniqError):
    """The storage holds `max_pending` waiting tasks; nothing was added."""

    def __init__(self, max_pending: int) -> None:
        super().__init__(
            f"worker pool queue full: {max_pending} tasks are waiting; try again when some have run"
        )
        self.max_pending = max_pending


class TaskNotFound(OmniqError):
    """There is no record of that task: it never existed, or its record has expired."""

    def __init__(self, task_id: str, hint: str = "") -> None:
        super().__init__(f"task {task_id}: no such task on record{hint}")
        self.task_id = task_id


class TaskNotWaiting(OmniqError):
    """Only a waiting task can be changed; a worker holds this one, or it has ended: see `status`."""

    def __init__(self, task_id: str, status: str) -> None:
        how = {"running": "is running", "retrying": "is held by a worker"}.get(status, "has ended")
        advice = "; retry its dead letter, or enqueue it again" if how == "has ended" else ""
        super().__init__(
            f"task {task_id} {how} ({status}), and only a waiting task can be changed{advice}"
        )
        self.task_id = task_id
        self.status = status


class ScheduleNotFound(OmniqError):
    """There is no schedule with that id."""

    def __init__(self, schedule_id: str) -> None:
        super().__init__(f"schedule {schedule_id}: there is none with that id")
        self.schedule_id = schedule_id


class FunctionNotFound(OmniqError):
    """A function path does not lead to a function.

    `elsewhere`: a worker with other modules, or with another version of them, may have the function.
    """

    def __init__(self, func_path: str, why: str, *, elsewhere: bool = False) -> None:
        super().__init__(f"function {func_path}: {why}")
        self.func_path = func_path
        self.why = why
        self.elsewhere = elsewhere


class ForbiddenFunction(FunctionNotFound):
    """This worker must not run the function, whether or not it exists."""


class UnguardedModule(OmniqError):
    """A module enqueued, or started a worker, while omniq imported it to run its tasks."""

    def __init__(self, module: str, what: str) -> None:
        super().__init__(
            f"module {module} {what} when it is imported, and each process that runs its tasks imports "
            "it; put that code under if __name__ == '__main__':"
        )
        self.module = module


class UnmarkedFunctionWarning(UserWarning):
    """A function was enqueued that workers in other processes will not run: see `@task`."""


class StorageError(OmniqError):
    """A storage operation failed. The error of the driver is its `__cause__`."""


class StorageClosed(StorageError):
    """The storage was used before it was opened, or after it was closed."""


class CallTimeout(StorageError, TimeoutError):
    """A blocking call took longer than `call_timeout` or its deadline allows, and was cancelled.

    A write is one atomic step: it takes effect as a whole or not at all. If `was_sent` is False, the
    storage received no request, and nothing was written. If it is True, the storage may have done what
    was asked, or may still do it: check before you repeat the call. An enqueue with a `task_id` can be
    repeated: if the first one was stored, the second raises `DuplicateTask`.
    """

    def __init__(self, timeout: float, *, was_sent: bool) -> None:
        if was_sent:
            text = (
                f"no answer within {timeout:g} s; the call may have taken effect, or may still do so, as a "
                "whole or not at all: check before you repeat it"
            )
        else:
            text = "the deadline had passed before the call; nothing was sent to the storage"
        super().__init__(text)
        self.timeout = timeout
        self.was_sent = was_sent


class StorageRefused(StorageError):
    """The server refuses this client: credentials, database, version or settings are wrong.

    Unlike with other storage errors, a retry does not help.
    """


class StorageCorrupt(StorageError):
    """Stored data is damaged."""


class ClaimError(OmniqError):
    """The caller does not own the task that it tried to change."""


class StaleClaim(ClaimError):
    """Another attempt owns the task now. Normal after a lease has expired: drop the outcome."""

    def __init__(self, task_id: str, token: int | None = None) -> None:
        claim = "this storage holds no claim on it" if token is None else f"claim {token} has ended"
        super().__init__(f"task {task_id}: {claim}; the outcome was not recorded")
        self.task_id = task_id
        self.token = token


class LeaseLost(ClaimError):
    """This owner was fenced: its lease expired and its tasks were returned to the queue."""

    def __init__(self, owner: str) -> None:
        super().__init__(f"worker {owner}: the lease has ended and its tasks were given back")
        self.owner = owner


class StoreWentBack(LeaseLost):
    """The store has gone back to an earlier state, so all owners were fenced.

    It was restored, or lost its last writes. `epoch` is its new epoch. `is_repeated`: it was raised within
    the last lease already, as it is when two servers answer at one address; claims wait for one lease.
    """

    def __init__(self, owner: str, epoch: int, *, is_repeated: bool) -> None:
        super().__init__(owner)
        self.args = (
            f"the store has gone back to an earlier state; worker {owner} raised its epoch to {epoch}",
        )
        self.epoch = epoch
        self.is_repeated = is_repeated


class ResultError(OmniqError):
    """A task has no value to return."""


class TaskFailed(ResultError):
    """The task ended as FAILED. `error` is the stored error."""

    def __init__(self, task_id: str, error: TaskError | None) -> None:
        detail = f"{error.error_type}: {error.message}" if error else "no error was stored"
        super().__init__(f"task {task_id} failed: {detail}")
        self.task_id = task_id
        self.error = error


class RemoteTraceback(Exception):
    """The traceback of a failed run, where it ran. It is the cause of a `TaskFailed`."""

    def __init__(self, traceback: str) -> None:
        super().__init__(traceback)

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class TaskCancelled(ResultError):
    """The task ended as CANCELLED."""

    def __init__(self, task_id: str, reason: str = "") -> None:
        super().__init__(f"task {task_id} was cancelled" + (f": {reason}" if reason else ""))
        self.task_id = task_id
        self.reason = reason


class ResultTimeout(ResultError, TimeoutError):
    """No final result within the given time. The task is not affected.

    `reason` says why it has none yet, as `omniq explain` does.
    """

    def __init__(self, task_id: str, timeout: float, reason: str = "") -> None:
        why = f": {reason}" if reason else "; it may still finish"
        super().__init__(f"task {task_id}: no result within {timeout:g} s{why}")
        self.task_id = task_id
        self.timeout = timeout
        self.reason = reason


class CircuitOpen(OmniqError):
    """The circuit breaker is open: the call was not made."""

    def __init__(self, name: str = "") -> None:
        super().__init__("circuit breaker is open" + (f": {name}" if name else ""))
        self.name = name


class LifespanFailed(OmniqError):
    """The lifespan of a worker raised, or took too long: the worker did not start, and claimed nothing.

    The exception of the lifespan is the cause.
    """


class MiddlewareError(OmniqError):
    """A middleware did not await `call_next()`, or called it twice: the run failed."""


class PoolStopped(OmniqError):
    """The pool has been stopped and takes no more tasks."""


class ShutdownTimeout(OmniqError, TimeoutError):
    """Tasks were still running when the time to stop ran out."""

    def __init__(self) -> None:
        super().__init__("worker pool shutdown timeout")
