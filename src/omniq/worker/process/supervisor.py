"""`Worker`: what `omniq worker` runs. Processes, signals, exit codes.

The first SIGTERM or SIGINT: claim no more, wait for what runs up to the shutdown timeout, give the
rest back uncharged, exit 0. The second one, or SIGQUIT: give back what can be given back within
half a second, exit 128 + the signal's number. SIGHUP is a SIGTERM where there is a terminal to be
closed, and ignored elsewhere, and under nohup.
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
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, Self

import msgspec

from omniq import log
from omniq.errors import InvalidValue, OmniqError, SettingsError, ShutdownTimeout
from omniq.events import Dispatcher, WorkerStopping
from omniq.models import check_int, check_name, check_seconds
from omniq.settings import Settings
from omniq.storage import BaseStorage, open_storage
from omniq.worker.process.inbox import Inbox
from omniq.worker.process.pool_process import Crew, Ended, Notice, Plan, Ready, Recycle, Serving
from omniq.worker.process.worker_children import Briefing, Children

MIN_LEASE = 0.5
"""Seconds. A shorter lease ends while a busy machine is still busy, however often it is renewed."""

_LAST_STEPS = 0.5
_NEVER = float("inf")


class _StopAsked(msgspec.Struct, frozen=True):
    timeout: float | None
    force: bool = False
    signal: int = 0


class _StoppedWhileStarting(BaseException):
    """A signal came while the user's modules were being imported: nothing has been claimed."""


class Worker:
    """Runs the functions of some modules as tasks, in one or more processes, until told to stop.

    `storage` is a URL or a storage object; None is the default storage. What is not given is as
    the settings say. With `processes` above 1 this process runs no task: it keeps that many others
    running, each with `max_concurrency` slots and a fresh worker id. `listeners` are paths of functions
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
        if isinstance(storage, BaseStorage):
            self._url, self.storage = None, storage
        else:
            settings = settings or Settings.load()
            self._url, self.storage = storage, open_storage(storage, settings=settings)
        self._given_storage = isinstance(storage, BaseStorage)
        self._settings = settings = settings or self.storage.settings
        self.processes = processes
        self.plan = _checked(
            Plan(
                modules=tuple(_name_of(module) for module in modules),
                concurrency=_or(max_concurrency, settings.concurrency),
                poll_interval=_or(poll_interval, settings.poll_interval),
                base_retry_delay=settings.base_retry_delay,
                # The URL may carry a lease of its own.
                lease=_or(lease, self.storage.settings.lease),
                shutdown_timeout=_or(shutdown_timeout, settings.shutdown_timeout),
                queues=None if queues is None else tuple(queues),
                listeners=tuple(listeners),
            )
        )
        """What each process is to do."""
        self._check_processes()
        self._inbox: Inbox[Notice | _StopAsked] = Inbox()
        self._clock = self.storage.clock
        self._events = Dispatcher()
        log.attach(self._events)
        self._owns_process = False
        self._is_starting = False
        self._signals_heard = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.is_ready = False
        """Whether tasks are claimed: started, and not told to stop."""
        self.wants_restart = False
        """Whether `run` returned so that a fresh process takes over: something hangs in this one."""
        self.was_cut_off = False
        """Whether tasks still ran when the time to stop was over. Threads may be left that run them."""

    # Running

    def run(self, on_ready: Callable[[], object] = lambda: None) -> int:
        """Work until a signal says stop; the exit code. Call it from the main thread.

        `on_ready` is called once, when tasks are claimed. Raises `OmniqError` when it cannot start,
        before anything is claimed.
        """
        self._owns_process = True
        with self._inbox.woken_by_signals(), self._hearing_signals():
            try:
                crew = self._crew()
            except _StoppedWhileStarting:
                return 0
            return self._conduct(crew, on_ready)

    def start(self) -> None:
        """Work in the background; returns once tasks are claimed. Signals stay the caller's."""
        if self._thread is not None:
            raise SettingsError("this worker has been started already; make a new one")
        crew = self._crew()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._conduct_in_background, args=(crew, ready), name="omniq-conductor"
        )
        self._thread.daemon = True
        self._thread.start()
        ready.wait()
        if self._error is not None:
            raise self._error

    def stop(self, timeout: float | None = None) -> None:
        """Claim no more, wait for what runs, and end. For a worker that was started.

        After `timeout` seconds what still runs is given back, and `ShutdownTimeout` is raised.
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
        """Ask the worker to stop, from any thread; returns at once. A later call can only hurry it."""
        self._inbox.put(_StopAsked(timeout, force))

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

    # Who works

    def _check_processes(self) -> None:
        if self.processes == 1:
            return
        if self._given_storage:
            raise SettingsError("processes above 1 need the URL of a storage, not a storage object")
        if self.storage.capabilities.reach == "process":
            raise SettingsError(
                f"a {self.storage.capabilities.name} storage lives in one process; "
                "use one process, or a storage that several can share, such as sqlite:///tasks.db"
            )

    def _crew(self) -> Crew:
        if self.processes > 1:
            briefing = Briefing(
                plan=self.plan,
                url=self._url,
                settings=_as_data(self._settings),
                path=sys.path,
                log_level=log.enabled_level(),
            )
            return Children(self.processes, briefing, self._inbox.put, self._clock)
        self._is_starting = True
        try:
            for module in self.plan.modules:
                _import(module)
        finally:
            self._is_starting = False
        return Serving(self.storage, self.plan, self._inbox.put)

    # Conducting

    def _conduct(self, crew: Crew, on_ready: Callable[[], object]) -> int:
        """Pass on what is asked, until the crew has ended; the exit code."""
        crew.start()
        has_begun, deadline = False, _NEVER
        while True:
            match self._next_notice(deadline):
                case Ready():
                    has_begun = self.is_ready = True
                    on_ready()
                case Ended(error, code):
                    self.was_cut_off = not crew.join(_LAST_STEPS)
                    if error is not None:
                        raise error
                    return code
                case Recycle(stuck=True, task_id=task_id) if self._owns_process:
                    self.wants_restart = deadline == _NEVER
                    return self._cut_off(crew, guilty=task_id)
                case Recycle() if self._owns_process:
                    self.wants_restart = deadline == _NEVER
                    deadline = self._stop(crew, deadline, self.plan.shutdown_timeout)
                case Recycle():
                    # Not our process to replace. The pool waits for its threads to come back.
                    pass
                case _StopAsked(force=True, signal=signal):
                    return self._cut_off(crew, signal)
                case _StopAsked(timeout=timeout):
                    # What does not run yet has nothing to finish.
                    deadline = self._stop(crew, deadline, timeout if has_begun else 0.0)
                case None:
                    return self._cut_off(crew)

    def _next_notice(self, deadline: float) -> Notice | _StopAsked | None:
        """What comes next; None when the deadline has come."""
        while True:
            remaining = deadline - self._clock.monotonic()
            notice = self._inbox.get(None if deadline == _NEVER else max(0.0, remaining))
            if notice is not None or remaining <= 0:
                return notice

    def _stop(self, crew: Crew, deadline: float, timeout: float | None) -> float:
        """Have the crew stop; the earlier of the old deadline and the new one."""
        self.is_ready = False
        crew.stop(timeout)
        self._events.emit(WorkerStopping(timeout=timeout))
        if timeout is None:
            return deadline
        return min(deadline, self._clock.monotonic() + timeout + crew.grace)

    def _cut_off(self, crew: Crew, signal: int = 0, guilty: str = "") -> int:
        self.was_cut_off = True
        given_back = crew.cut_off(guilty)
        if signal:
            return 128 + signal
        return 0 if given_back else 1

    def _conduct_in_background(self, crew: Crew, ready: threading.Event) -> None:
        try:
            code = self._conduct(crew, ready.set)
            if code and not ready.is_set():
                raise SettingsError(f"no worker process could be started (exit code {code})")
        except BaseException as error:
            # The edge of the thread: `start` or `stop` raises it where somebody can see it.
            self._error = error
        finally:
            ready.set()

    # Signals

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
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
        self._signals_heard += 1
        force = self._signals_heard > 1 or number == signals.SIGQUIT
        self._inbox.put(_StopAsked(self.plan.shutdown_timeout, force, number))


def _stop_signals() -> list[signals.Signals]:
    asked = [signals.SIGTERM, signals.SIGINT, signals.SIGQUIT]
    if os.isatty(0) and signals.getsignal(signals.SIGHUP) != signals.SIG_IGN:
        asked.append(signals.SIGHUP)
    return asked


def _checked(plan: Plan) -> Plan:
    """The plan, or the reason why it cannot work."""
    if not plan.modules:
        raise SettingsError("a worker needs the modules whose functions it may run")
    check_int("max_concurrency", plan.concurrency, low=1, error=InvalidValue)
    check_seconds("poll_interval", plan.poll_interval, above_zero=True, error=InvalidValue)
    check_seconds("shutdown_timeout", plan.shutdown_timeout, error=InvalidValue)
    check_seconds("lease", plan.lease, above_zero=True, error=InvalidValue)
    if plan.lease < MIN_LEASE:
        raise SettingsError(
            f"lease={plan.lease:g}: a lease below {MIN_LEASE} s cannot be kept; the heartbeat comes "
            f"every third of it. A lease is how long others wait for a dead worker: take 5 or more"
        )
    for name in plan.queues or ():
        check_name("queue", name, error=InvalidValue)
    return plan


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
    """Import a module of the user's, or say in one line why that is not possible."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _cannot_import(name, error) from error
        hint = ""
        if name.endswith(".py") or "/" in name:
            module = name.removesuffix(".py").strip("./").replace("/", ".")
            hint = f"; give the name of a module, such as {module}"
        raise SettingsError(f"there is no module {name}{hint}") from error
    except (Exception, SystemExit) as error:
        # The top of a user's module is the user's code: it may raise anything.
        raise _cannot_import(name, error) from error


def _cannot_import(name: str, error: BaseException) -> OmniqError:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        where = f" ({error.filename}, line {error.lineno})"
        return SettingsError(f"module {name} cannot be imported: {error.msg}{where}")
    return SettingsError(f"module {name} cannot be imported: {error!r}{where}")
