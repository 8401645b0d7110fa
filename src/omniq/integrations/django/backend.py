"""A backend for Django's tasks that stores them in an omniq storage.

Options of the backend: `url` is the URL of the storage. With `database`, the name of one of Django's
databases, a task that is enqueued inside `transaction.atomic()` is part of that transaction; the
tasks must be stored in that database.

`@omniq.task(max_retries=5, timeout=30, …)` below Django's `@task` sets options that Django lacks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from functools import cache
from importlib import import_module
from typing import Any, Unpack, cast

import django
from django.apps import apps
from django.db import connections
from django.utils import timezone
from django.utils.module_loading import module_has_submodule

from omniq.integrations.django.task_call import runnable
from omniq.models import Attempt, Task, TaskStatus
from omniq.queue.async_queue import EnqueueOptions
from omniq.queue.blocking_queue import Enqueuer, TaskQueue
from omniq.tasks.functions import options_of

FRAMEWORK = "django.tasks" if django.VERSION >= (6,) else "django_tasks"

base: Any = import_module(f"{FRAMEWORK}.base")
signals: Any = import_module(f"{FRAMEWORK}.signals")
_backends: Any = import_module(f"{FRAMEWORK}.backends.base")
_exceptions: Any = import_module(f"{FRAMEWORK}.exceptions")

_STATUS = {
    TaskStatus.PENDING: base.TaskResultStatus.READY,
    TaskStatus.RETRYING: base.TaskResultStatus.READY,
    TaskStatus.RUNNING: base.TaskResultStatus.RUNNING,
    TaskStatus.SUCCESS: base.TaskResultStatus.SUCCESSFUL,
    TaskStatus.FAILED: base.TaskResultStatus.FAILED,
    TaskStatus.CANCELLED: base.TaskResultStatus.FAILED,
}

_stored: ContextVar[list[Task] | None] = ContextVar("omniq_django_stored", default=None)
"""The tasks of the enqueue that is running: their `enqueued_at` must be the one that is stored."""

_lock = threading.Lock()
_queues: dict[tuple[int, str | None], TaskQueue] = {}


class OmniqTask(base.Task):
    """A Django task whose function an omniq worker resolves by its path."""

    def __omniq_function__(self) -> Any:
        return runnable(self, base, signals)


class OmniqBackend(_backends.BaseTaskBackend):
    """Stores tasks in an omniq storage; omniq workers run them."""

    task_class = OmniqTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    @property
    def queue(self) -> TaskQueue:
        """The queue of this process, shared by all threads: Django makes a backend per thread."""
        url = self.options.get("url")
        # A forked process opens a new queue.
        key = os.getpid(), url
        with _lock:
            if key not in _queues:
                queue = TaskQueue(url)
                queue.wrap_enqueue(_remember)
                queue.open()
                _queues[key] = queue
            return _queues[key]

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Store the call. When this returns, it is durable, or part of the open transaction."""
        self.validate_task(task)
        result = self._result(task, "", args, kwargs, status=base.TaskResultStatus.READY)
        stored: list[Task] = []
        token = _stored.set(stored)
        try:
            handle = self._enqueuer(task).enqueue(task.module_path, *result.args, **result.kwargs)
        finally:
            _stored.reset(token)
        # A `unique` task that was stored before has another id than the new one.
        times = [each.created_at for each in stored if each.id == handle.id]
        object.__setattr__(result, "id", handle.id)
        object.__setattr__(result, "enqueued_at", times[0] if times else timezone.now())
        signals.task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """The task in its present state."""
        record = self.queue.get_task(result_id)
        task = None if record is None else _task_at(record.func_path)
        if record is None or task is None:
            raise _exceptions.TaskResultDoesNotExist(result_id)
        ended = self.queue.get_result(result_id)
        history = self.queue.history(result_id)
        result = self._result(
            task.using(priority=record.priority, queue_name=record.queue, backend=self.alias),
            record.id,
            record.args,
            record.kwargs,
            status=_STATUS[record.status],
            enqueued_at=record.created_at,
            started_at=history[0].started_at if history else record.started_at,
            last_attempted_at=record.started_at,
            finished_at=None if ended is None else ended.finished_at,
            errors=[_error(attempt) for attempt in history if attempt.error is not None],
            worker_ids=_workers(record, history),
        )
        if ended is not None and ended.status is TaskStatus.SUCCESS:
            object.__setattr__(result, "_return_value", ended.result)
        return result

    def _enqueuer(self, task: Any) -> Enqueuer:
        given = {
            name: value
            for name, value in options_of(task.func).given().items()
            if name in EnqueueOptions.__annotations__
        }
        options = cast(
            EnqueueOptions, given | {"queue": task.queue_name, "priority": task.priority}
        )
        if task.run_after is not None:
            options["eta"] = _aware(task.run_after)
        return self._options(**options)

    def _options(self, **options: Unpack[EnqueueOptions]) -> Enqueuer:
        database = self.options.get("database")
        if database is not None and connections[database].in_atomic_block:
            options["connection"] = connections[database].connection
        return self.queue.options(**options)

    def _result(self, task: Any, task_id: str, args: Any, kwargs: Any, **known: Any) -> Any:
        unknown: dict[str, Any] = {
            "enqueued_at": None,
            "started_at": None,
            "last_attempted_at": None,
            "finished_at": None,
            "errors": [],
            "worker_ids": [],
        }
        return base.TaskResult(
            task=task,
            id=task_id,
            args=list(args),
            kwargs=dict(kwargs),
            backend=self.alias,
            **{**unknown, **known},
        )


@contextmanager
def _remember(tasks: list[Task]) -> Iterator[list[Task]]:
    if (stored := _stored.get()) is not None:
        stored += tasks
    yield tasks


def _task_at(path: str) -> Any:
    """The Django task at that path; None if there is none.

    The path is stored text: it is looked up in what the project has imported, and imports nothing.
    """
    found = _loaded_task(path)
    if found is None:
        _import_task_modules()
        found = _loaded_task(path)
    return found


def _loaded_task(path: str) -> Any:
    module, _, name = path.rpartition(".")
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return found if isinstance(found, base.Task) else None


@cache
def _import_task_modules() -> None:
    """Import the modules in which Django projects have their tasks, once: nothing else names them."""
    for name in task_modules():
        # Another application's module may be broken; then its tasks are not found.
        with suppress(ImportError):
            import_module(name)


def task_modules() -> list[str]:
    """The `tasks` modules of the installed applications."""
    return [
        f"{config.name}.tasks"
        for config in apps.get_app_configs()
        if config.module is not None and module_has_submodule(config.module, "tasks")
    ]


def _aware(instant: datetime) -> datetime:
    return instant if timezone.is_aware(instant) else timezone.make_aware(instant)


def _error(attempt: Attempt) -> Any:
    assert attempt.error is not None
    path = _exception_path(attempt.error.error_type)
    return base.TaskError(exception_class_path=path, traceback=attempt.error.traceback or "")


def _exception_path(name: str) -> str:
    """The path of an exception for Django, which imports it: stored text must name one that is loaded."""
    module, _, attribute = (name if "." in name else f"builtins.{name}").rpartition(".")
    found = vars(sys.modules[module]).get(attribute) if module in sys.modules else None
    if isinstance(found, type) and issubclass(found, BaseException):
        return f"{module}.{attribute}"
    return name if "." not in name else "builtins.Exception"


def _workers(task: Task, history: list[Attempt]) -> list[str]:
    """The worker of each run: Django counts attempts by the length of this list."""
    past = [attempt.owner or "" for attempt in history]
    # The history has the runs that failed.
    adds_one = task.status in (TaskStatus.RUNNING, TaskStatus.SUCCESS)
    return [*past, task.owner or ""] if adds_one else past
