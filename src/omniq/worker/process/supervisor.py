"""`Worker`: what `omniq worker` runs. Processes, signals, exit codes.

The first SIGTERM or SIGINT: stop claiming, wait for running tasks up to the shutdown timeout, release
the rest without using an attempt, exit 0. The second one, or SIGQUIT: release what can be released
within half a second, exit 128 + the signal's number. SIGHUP counts as SIGTERM where there is a
terminal that can be closed; it is ignored elsewhere, and under nohup.
"""

from __future__ import annotations

import importlib
import os
import signal as signals
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, Self

import msgspec

from omniq import log
from omniq.errors import InvalidValue, OmniqError, SettingsError, ShutdownTimeout
from omniq.events import ChoreFailed, Dispatcher, WorkerStopping
from omniq.models import check_int, check_name, check_names, check_seconds
from omniq.settings import Settings
from omniq.storage import BaseStorage, open_storage
from omniq.storage.urls import storage_url
from omniq.worker.process.inbox import Inbox
from omniq.worker.process.pool_process import (
    Ended,
    Notice,
    PoolProcess,
    PoolRunner,
    Ready,
    Recycle,
    WorkerConfig,
)
from omniq.worker.process.start_report import address
from omniq.worker.process.task_modules import modules_with_tasks
from omniq.worker.process.worker_children import WorkerChildConfig, WorkerChildren

MIN_LEASE = 0.5
"""Seconds. A shorter lease expires on a busy machine, however often it is renewed."""

_LAST_STEPS = 0.5
_NEVER = float("inf")


class _StopRequest(msgspec.Struct, frozen=True):
    timeout: float | None
    force: bool = False
    signal: int = 0


class _StoppedWhileStarting(BaseException):
    """A signal arrived while the user's modules were being imported: nothing has been claimed."""


class Worker:
    """Runs the functions of some modules as tasks, in one or more processes, until it is stopped.

    `storage` is a URL or a storage object; None is the default storage. The settings give the values
    that are not given. With `processes` above 1 this process runs no task: it keeps that many others
    running, each with `max_concurrency` slots and a new worker id. `listeners` are paths of functions
    that return a listener for the events of a pool; every process calls them.
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
        self.config = _checked(
            WorkerConfig(
                modules=tuple(_name_of(module) for module in modules),
                concurrency=_or(max_concurrency, settings.concurrency),
                poll_interval=_or(poll_interval, settings.poll_interval),
                base_retry_delay=settings.base_retry_delay,
                # The URL may contain a lease.
                lease=_or(lease, self.storage.settings.lease),
                shutdown_timeout=_or(shutdown_timeout, settings.shutdown_timeout),
                queues=None if queues is None else tuple(queues),
                listeners=tuple(listeners),
            )
        )
        """The configuration of each process."""
        self._check_processes()
        self._inbox: Inbox[Notice | _StopRequest] = Inbox()
        self._clock = self.storage.clock
        self._events = Dispatcher()
        log.attach(self._events)
        self._owns_process = False
        self._is_starting = False
        self._signals_received = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.deaths: dict[int, str] = {}
        """How other workers of this machine died, by their process ids."""
        self.is_ready = False
        """Whether the worker claims tasks: started, and not stopped."""
        self.needs_restart = False
        """Whether `run` returned so that a new process takes over: something hangs in this one."""
        self.was_cut_off = False
        """Whether tasks still ran at the end of the shutdown timeout. Their threads may still run."""

    # Running

    def run(self, on_ready: Callable[[], object] = lambda: None) -> int:
        """Run until a signal stops the worker; returns the exit code. Call it from the main thread.

        It calls `on_ready` once, when it claims tasks. Raises `OmniqError` when it cannot start,
        before it claims anything.
        """
        self._owns_process = True
        with self._inbox.woken_by_signals(), self._handling_signals():
            try:
                runner = self._make_runner()
            except _StoppedWhileStarting:
                return 0
            return self._supervise(runner, on_ready)

    def start(self) -> None:
        """Run in the background; returns once it claims tasks. It does not handle signals."""
        if self._thread is not None:
            raise SettingsError("this worker has been started already; make a new one")
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
        self._inbox.put(_StopRequest(timeout, force))

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
        if self._has_storage_object:
            raise SettingsError("processes above 1 need the URL of a storage, not a storage object")
        if self.storage.capabilities.reach == "process":
            raise SettingsError(
                f"a {self.storage.capabilities.name} storage lives in one process; "
                "use one process, or a storage that several can share, such as sqlite:///tasks.db"
            )

    def _make_runner(self) -> PoolRunner:
        if self.processes > 1:
            config = WorkerChildConfig(
                worker=self.config,
                url=self._url,
                settings=_as_data(self._settings),
                path=sys.path,
                log=log.child_config(),
            )
            return WorkerChildren(self.processes, config, self._inbox.put, self._clock)
        self._is_starting = True
        try:
            for module in self.config.modules:
                _import(module)
            self._import_below()
        finally:
            self._is_starting = False
        # Now the application has set up `logging`, or has not.
        log.take_stdlib()
        return PoolProcess(self.storage, self.config, self._inbox.put, self.deaths, self._address())

    def _address(self) -> str:
        if self._has_storage_object:
            return self.storage.capabilities.name
        return address(storage_url(self._settings, self._url))

    def _import_below(self) -> None:
        """Import the modules with tasks below the packages: nothing is imported later for a task."""
        for name in self.config.modules:
            for found in modules_with_tasks(sys.modules[name]):
                try:
                    _import(found)
                except SettingsError as error:
                    # The others may run meanwhile; this one was not named.
                    self._events.emit(ChoreFailed.of("import", error))

    # Supervising

    def _supervise(self, runner: PoolRunner, on_ready: Callable[[], object]) -> int:
        """Pass on requests until the runner has ended; returns the exit code."""
        runner.start()
        has_started, deadline = False, _NEVER
        while True:
            match self._next_notice(deadline):
                case Ready():
                    has_started = self.is_ready = True
                    on_ready()
                case Ended(error, code):
                    self.was_cut_off = not runner.join(_LAST_STEPS)
                    if error is not None:
                        raise error
                    return code
                case Recycle(stuck=True, task_id=task_id) if self._owns_process:
                    self.needs_restart = deadline == _NEVER
                    return self._release_and_end(runner, stuck_task=task_id)
                case Recycle() if self._owns_process:
                    self.needs_restart = deadline == _NEVER
                    deadline = self._stop(runner, deadline, self.config.shutdown_timeout)
                case Recycle():
                    # The process belongs to the caller. The pool waits until its threads have returned.
                    pass
                case _StopRequest(force=True, signal=signal):
                    return self._release_and_end(runner, signal)
                case _StopRequest(timeout=timeout):
                    # A worker that has not started has nothing to finish.
                    deadline = self._stop(runner, deadline, timeout if has_started else 0.0)
                case None:
                    return self._release_and_end(runner)

    def _next_notice(self, deadline: float) -> Notice | _StopRequest | None:
        """The next notice; None when the deadline has passed."""
        while True:
            remaining = deadline - self._clock.monotonic()
            notice = self._inbox.get(None if deadline == _NEVER else max(0.0, remaining))
            if notice is not None or remaining <= 0:
                return notice

    def _stop(self, runner: PoolRunner, deadline: float, timeout: float | None) -> float:
        """Stop the runner; returns the earlier of the old deadline and the new one."""
        self.is_ready = False
        runner.stop(timeout)
        if deadline == _NEVER:
            # Not once more for a thread that is found to run on while the worker stops.
            self._events.emit(WorkerStopping(timeout=timeout))
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

    # Signals

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        before = {number: signals.getsignal(number) for number in _stop_signals()}
        for number in before:
            signals.signal(number, self._on_signal)
        if signals.SIGHUP not in before:
            before[signals.SIGHUP] = signals.signal(signals.SIGHUP, signals.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in before.items():
                signals.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_starting:
            raise _StoppedWhileStarting
        self._signals_received += 1
        force = self._signals_received > 1 or number == signals.SIGQUIT
        self._inbox.put(_StopRequest(self.config.shutdown_timeout, force, number))


def _stop_signals() -> list[signals.Signals]:
    numbers = [signals.SIGTERM, signals.SIGINT, signals.SIGQUIT]
    if os.isatty(0) and signals.getsignal(signals.SIGHUP) != signals.SIG_IGN:
        numbers.append(signals.SIGHUP)
    return numbers


def _checked(config: WorkerConfig) -> WorkerConfig:
    """Return the configuration; raises if it is not valid."""
    if not config.modules:
        raise SettingsError("a worker needs the modules whose functions it may run")
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


def _name_of(module: str | ModuleType) -> str:
    return module if isinstance(module, str) else module.__name__


def _as_data(settings: Settings) -> dict[str, Any]:
    values = {field.name: getattr(settings, field.name) for field in fields(settings) if field.init}
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in values.items()
    }


def _import(name: str) -> None:
    """Import a module of the user; raises `SettingsError` with the reason in one line."""
    if name.startswith("."):
        # A path such as ./tasks.py; Python would take it for a relative import.
        raise _no_module(name)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _cannot_import(name, error) from error
        raise _no_module(name) from error
    except (Exception, SystemExit) as error:
        # The top of a user's module is the user's code: it may raise anything.
        raise _cannot_import(name, error) from error


def _no_module(name: str) -> OmniqError:
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").strip("./").replace("/", ".")
        hint = f"give the name of a module, such as {module}"
    else:
        here = [path.stem for path in Path().glob("*.py")]
        near = get_close_matches(name, here, n=1)
        place = f"start the worker in the folder of your code; this is {Path.cwd()}"
        hint = f"did you mean {near[0]}?" if near else place
    return SettingsError(f"there is no module {name}; {hint}")


def _cannot_import(name: str, error: BaseException) -> OmniqError:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        where = f" ({error.filename}, line {error.lineno})"
        return SettingsError(f"module {name} cannot be imported: {error.msg}{where}")
    return SettingsError(f"module {name} cannot be imported: {error!r}{where}")
