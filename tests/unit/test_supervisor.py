"""`Worker` in this process: refused arguments, start and stop. Tests of processes are in acceptance."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
from loguru import logger

from omniq import (
    OmniqError,
    SettingsError,
    ShutdownTimeout,
    StorageError,
    TaskQueue,
    TaskStatus,
    log,
)
from omniq.settings import Settings
from omniq.storage.memory import MemoryStorage
from omniq.storage.types import Capabilities
from omniq.testing.faults import FaultyStorage
from omniq.worker.process import worker_child
from omniq.worker.process.pool_process import PoolProcess, Ready, WorkerConfig
from omniq.worker.process.supervisor import Worker
from omniq.worker.process.worker_children import WorkerChildConfig, WorkerChildren
from tests.unit import worker_tasks

if TYPE_CHECKING:
    from loguru import Message

MODULE = worker_tasks.__name__
ADD, HOLD, STUBBORN = f"{MODULE}.add", f"{MODULE}.hold", f"{MODULE}.stubborn"
LOOP_KIND = f"{MODULE}.loop_kind"


class UnreachableServer(FaultyStorage):
    """A storage of several workers that the test can make unreachable."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, reach="fleet")


@pytest.fixture(autouse=True)
def gate():
    gate = worker_tasks.reset()
    yield gate
    gate.let_go.set()


@pytest.fixture
def storage():
    return MemoryStorage()


@pytest.fixture
def queue(storage):
    with TaskQueue(storage) as queue:
        yield queue


class Lines(list[str]):
    """The logged lines, and a way to wait for one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def write(self, message: Message) -> None:
        with self._changed:
            self.append(message.record["message"])
            self._changed.notify_all()

    def wait_for(self, text: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(text in line for line in self), 30)


@pytest.fixture
def lines():
    lines = Lines()
    sink = logger.add(lines.write, level=0)
    log.enable("INFO")
    yield lines
    log.disable()
    logger.remove(sink)


def wait_for_start(gate: worker_tasks.Gate, count: int = 1) -> None:
    for _ in range(count):
        assert gate.started.acquire(timeout=30)


# Refused arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": []}, "modules"),
        ({"lease": 0.4}, "0.5 s cannot be held"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"poll_interval": 0}, "poll_interval"),
        ({"shutdown_timeout": -1}, "shutdown_timeout"),
        ({"queues": ["no good"]}, "queue"),
        ({"processes": 0}, "processes"),
        ({"processes": 2}, "one process"),
    ],
)
def test_invalid_arguments_are_refused_by_the_constructor(options, message):
    with pytest.raises(OmniqError, match=message):
        Worker("memory://", **{"modules": [MODULE], **options})


def test_several_processes_need_a_url(storage):
    with pytest.raises(SettingsError, match="URL"):
        Worker(storage, [MODULE], processes=2)


def test_a_lease_in_the_url_applies():
    with pytest.raises(SettingsError, match=r"lease=0\.3"):
        Worker("memory://?lease=0.3", [MODULE])


def test_an_unknown_url_is_refused_by_the_constructor():
    with pytest.raises(SettingsError, match="nosuch"):
        Worker("nosuch://x", [MODULE])


def test_a_missing_module_is_reported_before_a_task_is_claimed(queue, storage):
    handle = queue.enqueue(ADD, 1, 2)
    worker = Worker(storage, [MODULE, "tests.unit.no_such_module"])

    with pytest.raises(SettingsError, match=r"there is no module tests\.unit\.no_such_module"):
        worker.start()
    assert handle.status() is TaskStatus.PENDING


# Starting and stopping


def test_a_worker_connects_runs_and_stops(queue, storage):
    with Worker(storage, [worker_tasks], max_concurrency=2):
        handle = queue.enqueue(ADD, 1, 2)

        assert handle.result(30) == 3


def test_a_worker_opens_and_closes_a_storage_that_is_not_open():
    storage = MemoryStorage()
    with Worker(storage, [MODULE]):
        assert storage.is_open

    assert not storage.is_open


def test_no_more_than_max_concurrency_run_at_once(queue, storage, gate):
    handles = [queue.enqueue(HOLD) for _ in range(5)]
    with Worker(storage, [MODULE], max_concurrency=2):
        wait_for_start(gate, 2)
        assert queue.stats().by_status[TaskStatus.RUNNING] == 2
        gate.let_go.set()
        assert {handle.result(30) for handle in handles} == {"held"}

    assert gate.most_inside == 2


def test_stop_waits_for_running_tasks_and_claims_no_more(queue, storage, gate, lines):
    worker = Worker(storage, [MODULE])
    worker.start()
    running = queue.enqueue(HOLD)
    wait_for_start(gate)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    lines.wait_for("worker.stopping")
    waiting = queue.enqueue(ADD, 1, 2)
    gate.let_go.set()
    stopping.join(30)

    assert running.status() is TaskStatus.SUCCESS
    assert waiting.status() is TaskStatus.PENDING


@pytest.mark.parametrize("after", [0.0, 0.001, 0.01])
def test_a_stop_that_arrives_while_the_worker_starts_waits_for_what_was_claimed(
    queue, storage, gate, after
):
    """Such a task may run only once: if it were released, it would be a dead letter."""
    handles = [queue.options(max_crashes=0).enqueue(ADD, number, 1) for number in range(20)]
    worker = Worker(storage, [MODULE])

    def stop_soon() -> None:
        timer = threading.Timer(after, worker.request_stop, [30.0])
        timer.start()
        if not after:
            timer.join()

    worker.before_claims = stop_soon
    worker.start()
    worker.stop()

    ends = {handle.status() for handle in handles}
    assert ends <= {TaskStatus.SUCCESS, TaskStatus.PENDING}
    assert queue.dead.list() == []


@pytest.mark.parametrize("after", [None, 0.0, 0.0005, 0.001, 0.002, 0.003])
def test_a_stop_that_arrives_before_the_worker_has_started_costs_no_task(queue, storage, after):
    """At any instant of the start; None: before it."""
    handles = [queue.options(max_crashes=0).enqueue(ADD, number, 1) for number in range(20)]
    worker = Worker(storage, [MODULE])
    if after is None:
        worker.request_stop(30.0)
    else:
        threading.Timer(after, worker.request_stop, [30.0]).start()
    worker.start()
    worker.stop()

    assert {handle.status() for handle in handles} <= {TaskStatus.SUCCESS, TaskStatus.PENDING}
    assert queue.dead.list() == []


def test_several_processes_that_are_stopped_before_the_first_is_ready_say_that_it_is():
    """It may have claimed tasks meanwhile, and its supervisor waits for these."""
    worker = Worker("sqlite:///unused.db", [MODULE], processes=3)
    notices: list[object] = []
    config = WorkerChildConfig(
        worker=worker.config, url=None, settings={}, path=[], log=log.child_config()
    )
    children = WorkerChildren(3, config, notices.append, worker.storage.clock)
    children.stop(30.0)
    children._on_ready()

    assert notices == [Ready()]
    assert children._started == 0


@pytest.mark.parametrize("function", [HOLD, STUBBORN])
def test_stop_releases_tasks_that_do_not_end_in_time(queue, storage, gate, function):
    worker = Worker(storage, [MODULE])
    worker.start()
    handle = queue.enqueue(function)
    wait_for_start(gate)

    with pytest.raises(ShutdownTimeout):
        worker.stop(0.05)
    assert worker.was_cut_off
    assert handle.status() is TaskStatus.PENDING
    assert queue.get_task(handle.id).attempts == 0


def test_a_worker_is_started_once(storage):
    worker = Worker(storage, [MODULE])
    with worker, pytest.raises(SettingsError, match="started already"):
        worker.start()


def test_stop_before_start_does_nothing(storage):
    Worker(storage, [MODULE]).stop()


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_returns_0_after_a_signal_and_restores_the_handlers(storage, number):
    before = signal.getsignal(number), signal.getsignal(signal.SIGHUP)

    code = Worker(storage, [MODULE]).run(on_ready=lambda: signal.raise_signal(number))

    assert code == 0
    assert (signal.getsignal(number), signal.getsignal(signal.SIGHUP)) == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("function", [HOLD, STUBBORN])
def test_the_second_signal_ends_the_worker_at_once(queue, storage, gate, function):
    handle = queue.enqueue(function)
    worker = Worker(storage, [MODULE])

    def send_both() -> None:
        wait_for_start(gate)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.35)
        signal.raise_signal(signal.SIGINT)

    assert worker.run(on_ready=send_both) == 128 + signal.SIGINT
    assert worker.was_cut_off
    assert handle.status() is TaskStatus.PENDING
    assert queue.get_task(handle.id).attempts == 0


def test_a_signal_that_is_sent_to_the_process_and_to_its_group_counts_once(queue, storage, gate):
    handle = queue.enqueue(HOLD)
    worker = Worker(storage, [MODULE])

    def send_both() -> None:
        wait_for_start(gate)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        gate.let_go.set()

    assert worker.run(on_ready=send_both) == 0
    assert not worker.was_cut_off
    assert handle.status() is TaskStatus.SUCCESS


@pytest.mark.fault("F09")
def test_sigquit_ends_the_worker_at_once(queue, storage, gate):
    handle = queue.enqueue(HOLD)
    worker = Worker(storage, [MODULE])

    def quit_now() -> None:
        wait_for_start(gate)
        signal.raise_signal(signal.SIGQUIT)

    assert worker.run(on_ready=quit_now) == 128 + signal.SIGQUIT
    assert handle.status() is TaskStatus.PENDING


# Unreachable storages


@pytest.mark.fault("F48")
def test_a_worker_waits_for_an_unreachable_server_and_logs_it_once(lines):
    server = UnreachableServer(MemoryStorage())
    server.fail("open", times=2)
    with Worker(server, [MODULE]):
        assert server.is_open

    assert server.calls["open"] == 3
    assert sum("storage.failing" in line for line in lines) == 1
    assert sum("the storage is back after" in line for line in lines) == 1


def test_a_worker_that_waits_for_a_server_can_be_stopped():
    server = UnreachableServer(MemoryStorage())
    server.fail("open", times=None)
    worker = Worker(server, [MODULE])
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()

    assert worker.run() == 0
    timer.join()


def test_a_local_storage_that_cannot_be_opened_is_an_error_at_once():
    local = FaultyStorage(MemoryStorage())
    local.fail("open", times=None)

    with pytest.raises(StorageError):
        Worker(local, [MODULE]).start()
    assert local.calls["open"] == 1


@pytest.mark.fault("F10")
def test_a_stop_that_cannot_reach_the_storage_is_an_error():
    faulty = FaultyStorage(MemoryStorage())
    worker = Worker(faulty, [MODULE])
    worker.start()
    faulty.fail("close", "record", times=None)

    with pytest.raises(StorageError):
        worker.stop(5)


# The event loop


@pytest.mark.parametrize("library", ["uvloop", "asyncio"])
def test_uvloop_is_used_when_it_is_installed(monkeypatch, storage, queue, library):
    if library == "uvloop":
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    with Worker(storage, [MODULE]):
        assert queue.enqueue(LOOP_KIND).result(timeout=30) == library


def test_missing_arguments_come_from_the_settings(storage):
    settings = Settings(concurrency=7, poll_interval=2.0, lease=9.0, shutdown_timeout=4.0)
    worker = Worker("memory://", [MODULE], poll_interval=3.0, settings=settings)

    assert worker.config == WorkerConfig(
        modules=(MODULE,),
        concurrency=7,
        poll_interval=3.0,
        base_retry_delay=1.0,
        lease=9.0,
        shutdown_timeout=4.0,
    )


def test_a_worker_that_was_stopped_before_its_start_ends(storage):
    notices = []
    ended = threading.Event()

    def notify(notice):
        notices.append(type(notice).__name__)
        if notices[-1] == "Ended":
            ended.set()

    serving = PoolProcess(storage, Worker(storage, [MODULE]).config, notify, {})
    serving.stop(0)
    serving.start()

    assert ended.wait(30)
    assert serving.join(30)


def test_reporting_to_a_supervisor_that_has_ended_raises_nothing():
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        worker_child._report_ready(ours)
