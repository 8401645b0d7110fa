"""`Worker`: what `omniq worker` runs. Processes, requests to stop and to restart, exit codes.

What signals ask of it is in `shutdown`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any, Self

import msgspec

from omniq import log
from omniq.errors import (
    InvalidValue,
    OmniqError,
    SettingsError,
    ShutdownTimeout,
    StorageError,
)
from omniq.events import Dispatcher, WorkerStopping
from omniq.models import check_int, check_name, check_names, check_seconds
from omniq.settings import Settings
from omniq.storage import BaseStorage, open_storage
from omniq.storage.urls import KIND_SETTINGS, storage_url
from omniq.tasks.import_guard import refuse_during_import
from omniq.worker.lifespan import Lifespan, importable_path
from omniq.worker.middleware import Middleware, name_of
from omniq.worker.process import console
from omniq.worker.process.file_watch import FileWatch, places_of
from omniq.worker.process.inbox import Inbox
from omniq.worker.process.module_import import import_with_tasks
from omniq.worker.process.pool_process import (
    Ended,
    Notice,
    PoolProcess,
    PoolRunner,
    Ready,
    Recycle,
    StopAsked,
    WorkerConfig,
)
from omniq.worker.process.shutdown import StoppedWhileStarting, StopRequest, StopSignals
from omniq.worker.process.start_report import address
from omniq.worker.process.worker_children import WorkerChildConfig, WorkerChildren

MIN_LEASE = 0.5
"""Seconds. A shorter lease expires on a busy machine, however often it is renewed."""

_LAST_STEPS = 0.5
_NEVER = float("inf")


class _FilesChanged(msgspec.Struct, frozen=True):
    names: list[str]


class Worker:
    """Runs the functions of some modules as tasks, in one or more processes, until it is stopped.

    `storage` is a URL or a storage object; None is the default storage. The settings give the values
    that are not given. With `processes` above 1 this process runs no task: it keeps that many others
    running, each with `max_concurrency` slots and a new worker id. `listeners` are paths of functions
    that return a listener for the events of a pool; every process calls them. Every process
    enters the `lifespan`, and calls `middleware` around each run: with `processes` above 1 they must be
    dotted paths, or defined at the top of a module. With `burst` it ends when nothing is left that it may
    run now. With `reload`, `run` returns when a Python file of the modules or of the current folder has
    changed, and `needs_restart` is true.
    """

    def __init__(
        self,
        storage: str | BaseStorage | None = None,
        modules: Sequence[str | ModuleType] = (),
        max_concurrency: int | None = None,
        processes: int = 1,
        *,
        queues: Sequence[str] | None = None,
        poll_interval: float | None = None,
        lease: float | None = None,
        shutdown_timeout: float | None = None,
        settings: Settings | None = None,
        listeners: Sequence[str] = (),
        lifespan: Lifespan | str | None = None,
        middleware: Sequence[Middleware | str] | None = None,
        burst: bool = False,
        reload: bool = False,
    ) -> None:
        check_int("processes", processes, low=1, error=InvalidValue)
        for name, value in (("modules", modules), ("queues", queues), ("listeners", listeners)):
            check_names(name, value)
        if isinstance(storage, BaseStorage):
            self._url, self.storage = None, storage
        else:
            settings = settings or Settings.load()
            self._url, self.storage = storage, open_storage(storage, settings=settings)
        self._has_storage_object = isinstance(storage, BaseStorage)
        self._settings = settings = settings or self.storage.settings
        self.processes = processes
        self._lifespan = _or(lifespan, settings.lifespan)
        check_names("middleware", middleware)
        self._middleware = tuple(_or(middleware, settings.middleware))
        self.config = _checked(
            WorkerConfig(
                modules=tuple(_name_of(module) for module in modules) or settings.modules,
                concurrency=_or(max_concurrency, settings.concurrency),
                poll_interval=_or(poll_interval, settings.poll_interval),
                base_retry_delay=settings.base_retry_delay,
                # The URL may contain a lease.
                lease=_or(lease, self.storage.settings.lease),
                shutdown_timeout=_or(shutdown_timeout, settings.shutdown_timeout),
                queues=None if queues is None else tuple(queues),
                listeners=tuple(listeners),
                lifespan=None if self._lifespan is None else _path_of(self._lifespan),
                middleware=tuple(map(_path_of, self._middleware)),
                burst=burst,
            )
        )
        """The configuration of each process."""
        self._reload = reload
        self._check_processes()
        self._check_reload()
        self._inbox: Inbox[Notice | StopRequest | _FilesChanged] = Inbox()
        self._clock = self.storage.clock
        self._events = Dispatcher()
        log.attach(self._events)
        self._owns_process = False
        self._is_starting = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.deaths: dict[int, str] = {}
        """How other workers of this machine died, by their process ids."""
        self.before_claims: Callable[[], object] = lambda: None
        """Called in the pool's thread before the first claim: a task may end this process at any time after it."""
        self.is_ready = False
        """Whether the worker claims tasks: started, and not stopped."""
        self.needs_restart = False
        """Whether `run` returned so that a new process takes over: something hangs in this one, or its code
        has changed."""
        self.is_restart_planned = False
        """Whether it needs a restart only because it has reached a limit of the settings."""
        self.was_asked_to_stop = False
        """Whether it ends because an operator asked for that through the storage."""
        self.was_cut_off = False
        """Whether tasks still ran at the end of the shutdown timeout. Their threads may still run."""

    # Running

    def run(self, on_ready: Callable[[], object] = lambda: None) -> int:
        """Run until a signal stops the worker; returns the exit code. Call it from the main thread.

        It calls `on_ready` once, when it claims tasks. Raises `OmniqError` when it cannot start,
        before it claims anything.
        """
        self._owns_process = True
        stop_signals = StopSignals(
            self._inbox.put, self.config.shutdown_timeout, self._clock, lambda: self._is_starting
        )
        with self._inbox.woken_by_signals(), stop_signals.handled(), self._watching_files():
            try:
                runner = self._make_runner()
            except StoppedWhileStarting:
                return 0
            except SettingsError as error:
                if not self._reload:
                    raise
                return self._wait_for_change(error)
            return self._supervise(runner, on_ready)

    def start(self) -> None:
        """Run in the background; returns once it claims tasks. It does not handle signals."""
        if self._thread is not None:
            raise SettingsError("this worker has been started already; make a new one")
        if self._reload:
            raise SettingsError("reload replaces the process: call run(), in the main thread")
        runner = self._make_runner()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._supervise_in_background, args=(runner, ready), name="omniq-supervisor"
        )
        self._thread.daemon = True
        self._thread.start()
        ready.wait()
        if self._error is not None:
            raise self._error

    def stop(self, timeout: float | None = None) -> None:
        """Stop claiming, wait for the running tasks, and end. For a worker that was started.

        After `timeout` seconds it releases what still runs, and raises `ShutdownTimeout`.
        """
        check_seconds("timeout", timeout, error=InvalidValue)
        if self._thread is None:
            return
        self.request_stop(timeout)
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self.was_cut_off:
            raise ShutdownTimeout

    def request_stop(self, timeout: float | None, *, force: bool = False) -> None:
        """Ask the worker to stop, from any thread; returns immediately. A later call can shorten it."""
        self._inbox.put(StopRequest(timeout, force))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # Where the pools run

    def _check_processes(self) -> None:
        if self.processes == 1:
            return
        given = [each for each in (self._lifespan, *self._middleware) if each is not None]
        if not all(isinstance(each, str) or importable_path(each) for each in given):
            raise SettingsError(
                "processes above 1 import the lifespan and the middleware: define them at the top of a "
                "module, or give their dotted paths"
            )
        if self._has_storage_object:
            raise SettingsError("processes above 1 need the URL of a storage, not a storage object")
        if self.storage.capabilities.reach == "process":
            raise SettingsError(
                f"a {self.storage.capabilities.name} storage lives in one process; "
                "use one process, or a storage that several can share, such as sqlite:///tasks.db"
            )

    def _check_reload(self) -> None:
        if self._reload and self.config.burst:
            raise SettingsError("give either burst or reload, not both")
        if self._reload and self.storage.capabilities.reach == "process":
            raise SettingsError(
                f"reload: the tasks of a {self.storage.capabilities.name} storage would be lost at each "
                "change; use a storage that outlives the process, such as sqlite:///tasks.db"
            )

    def _make_runner(self) -> PoolRunner:
        refuse_during_import("starts a worker")
        if self.processes > 1:
            config = WorkerChildConfig(
                worker=self.config,
                url=self._url,
                settings={
                    **self._settings.as_data(),
                    # Without those that the environment has for a storage of another kind.
                    **{name: getattr(self.storage.settings, name) for name in KIND_SETTINGS},
                },
                path=sys.path,
                log=log.child_config(),
            )
            return WorkerChildren(self.processes, config, self._inbox.put, self._clock)
        self._is_starting = True
        try:
            for module in self.config.modules:
                import_with_tasks(module)
        finally:
            self._is_starting = False
        # Now the application has set up `logging`, or has not.
        log.take_stdlib()
        return PoolProcess(
            self.storage,
            self.config,
            self._inbox.put,
            self.deaths,
            self._address(),
            lifespan=self._lifespan,
            middleware=self._middleware,
            before_claims=self.before_claims,
            is_replaced=self._owns_process,
        )

    def _address(self) -> str:
        if self._has_storage_object:
            return self.storage.capabilities.name
        return address(storage_url(self._settings, self._url))

    # Supervising

    def _supervise(self, runner: PoolRunner, on_ready: Callable[[], object]) -> int:
        """Pass on requests until the runner has ended; returns the exit code."""
        runner.start()
        has_started, is_stopping, deadline = False, False, _NEVER
        timeout: float | None = None
        while True:
            match self._next_notice(deadline):
                case Ready():
                    has_started = True
                    if deadline != _NEVER:
                        # It was asked to stop while it started, and may have claimed tasks meanwhile.
                        deadline = self._deadline(runner, _NEVER, timeout)
                    else:
                        self.is_ready = True
                        on_ready()
                case Ended(error, code):
                    self.was_cut_off = not runner.join(_LAST_STEPS)
                    is_new = not (has_started or is_stopping or self.needs_restart)
                    if is_new and self._reload and (code or _is_in_code(error)):
                        return self._wait_for_change(error)
                    if error is not None:
                        raise error
                    return code
                case Recycle(stuck=True, task_id=task_id) if self._owns_process:
                    self.needs_restart = not is_stopping
                    return self._release_and_end(runner, stuck_task=task_id)
                case Recycle(is_planned=is_planned) if self._owns_process:
                    self.needs_restart = not is_stopping
                    self.is_restart_planned = is_planned
                    deadline = self._stop(runner, deadline, self.config.shutdown_timeout)
                case _FilesChanged(names) if not is_stopping:
                    self._report_change(names)
                    self.needs_restart = True
                    timeout = self.config.shutdown_timeout
                    deadline = self._stop(runner, deadline, timeout, has_started=has_started)
                case _FilesChanged():
                    pass
                case Recycle():
                    # The process belongs to the caller. The pool waits until its threads have returned.
                    pass
                case StopRequest(force=True, signal=signal):
                    self.needs_restart = False
                    return self._release_and_end(runner, signal)
                case StopAsked(restart):
                    self.needs_restart = restart and self._owns_process and not is_stopping
                    is_stopping = self.was_asked_to_stop = not self.needs_restart
                    deadline = self._stop(runner, deadline, self.config.shutdown_timeout)
                case StopRequest(timeout=timeout):
                    is_stopping, self.needs_restart = True, False
                    deadline = self._stop(runner, deadline, timeout, has_started=has_started)
                case None:
                    return self._release_and_end(runner)

    # Changed files

    @contextmanager
    def _watching_files(self) -> Iterator[None]:
        if not self._reload:
            yield
            return
        # Python compares times in whole seconds: after two quick changes it would run the older code.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        watch = FileWatch(
            places_of(self.config.modules),
            lambda names: self._inbox.put(_FilesChanged(names)),
            self._clock,
        )
        watch.start()
        try:
            yield
        finally:
            watch.stop()

    def _report_change(self, names: list[str]) -> None:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        console.note(f"{os.path.relpath(names[0])}{more} changed: the worker restarts")

    def _wait_for_change(self, error: BaseException | None) -> int:
        """Wait until the code may be right again, or a signal comes. A child has written its error itself."""
        if isinstance(error, OmniqError):
            console.report_error(error)
        console.note("the worker starts again when a file has changed; Ctrl-C ends it")
        while True:
            match self._inbox.get(None):
                case _FilesChanged(names):
                    self._report_change(names)
                    self.needs_restart = True
                    return 0
                case StopRequest():
                    return 0

    def _next_notice(self, deadline: float) -> Notice | StopRequest | _FilesChanged | None:
        """The next notice; None when the deadline has passed."""
        while True:
            remaining = deadline - self._clock.monotonic()
            notice = self._inbox.get(None if deadline == _NEVER else max(0.0, remaining))
            if notice is not None or remaining <= 0:
                return notice

    def _stop(
        self,
        runner: PoolRunner,
        deadline: float,
        timeout: float | None,
        *,
        has_started: bool = True,
    ) -> float:
        """Stop the runner; returns the earlier of the old deadline and the new one.

        One that has not started has nothing to finish.
        """
        self.is_ready = False
        runner.stop(timeout)
        if deadline == _NEVER:
            # Not once more for a thread that is found to run on while the worker stops.
            self._events.emit(WorkerStopping(timeout=timeout))
        return self._deadline(runner, deadline, timeout if has_started else 0.0)

    def _deadline(self, runner: PoolRunner, deadline: float, timeout: float | None) -> float:
        if timeout is None:
            return deadline
        return min(deadline, self._clock.monotonic() + timeout + runner.grace)

    def _release_and_end(self, runner: PoolRunner, signal: int = 0, stuck_task: str = "") -> int:
        self.was_cut_off = True
        are_released = runner.release_and_end(stuck_task)
        if signal:
            return 128 + signal
        return 0 if are_released else 1

    def _supervise_in_background(self, runner: PoolRunner, ready: threading.Event) -> None:
        try:
            code = self._supervise(runner, ready.set)
            if code and not ready.is_set():
                raise SettingsError(f"no worker process could be started (exit code {code})")
        except BaseException as error:
            # The edge of the thread: `start` or `stop` raises it in the caller's thread.
            self._error = error
        finally:
            ready.set()


def _is_in_code(error: BaseException | None) -> bool:
    """Whether the error may go when the code is changed."""
    return isinstance(error, OmniqError) and not isinstance(error, StorageError)


def _checked(config: WorkerConfig) -> WorkerConfig:
    """Return the configuration; raises if it is not valid."""
    if not config.modules:
        raise SettingsError(
            "name the modules whose functions the worker may run: omniq worker app.tasks; or set them in "
            'pyproject.toml: [tool.omniq] modules = ["app.tasks"], or OMNIQ_MODULES=app.tasks'
        )
    check_int("max_concurrency", config.concurrency, low=1, error=InvalidValue)
    check_seconds("poll_interval", config.poll_interval, above_zero=True, error=InvalidValue)
    check_seconds("shutdown_timeout", config.shutdown_timeout, error=InvalidValue)
    check_seconds("lease", config.lease, above_zero=True, error=InvalidValue)
    if config.lease < MIN_LEASE:
        raise SettingsError(
            f"lease={config.lease:g}: a lease below {MIN_LEASE} s cannot be held; the heartbeat "
            f"renews it every third of that. Other workers wait that long for a dead one: use 5 or more"
        )
    for name in config.queues or ():
        check_name("queue", name, error=InvalidValue)
    return config


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given


def _path_of(given: Lifespan | Middleware | str) -> str:
    return given if isinstance(given, str) else importable_path(given) or name_of(given)


def _name_of(module: str | ModuleType) -> str:
    return module if isinstance(module, str) else module.__name__
