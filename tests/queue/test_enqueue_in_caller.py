"""A blocking enqueue on SQLite and files runs in the thread of its caller, and promises what it did before."""

from __future__ import annotations

import asyncio
import contextvars
import linecache
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from omniq import (
    AsyncTaskQueue,
    InvalidTask,
    QueueFull,
    Settings,
    StorageClosed,
    StorageError,
    Task,
    TaskQueue,
)
from tests.queue import sample_tasks

STORES = ["sqlite", "file"]


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, tmp_path)


def url_of(kind: str, folder: Path) -> str:
    path = folder / ("tasks.db" if kind == "sqlite" else "tasks")
    return f"{kind}:///{path}?durability=os"


@pytest.fixture
def queue(url: str) -> Iterator[TaskQueue]:
    with TaskQueue(url) as queue:
        enqueue_first(queue)
        yield queue


def enqueue_first(queue: TaskQueue) -> None:
    """The first enqueue runs on the event loop, because SQLite connects in another thread."""
    with until(lambda: queue.storage.is_idle):
        queue.enqueue(sample_tasks.plain)


@contextmanager
def until(holds: Callable[[], bool]) -> Iterator[None]:
    """Leave the block only when the condition holds."""
    yield
    give_up = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < give_up
        threading.Event().wait(0.005)


def record_thread(queue: TaskQueue) -> list[str]:
    """The names of the threads in which later enqueues run."""
    names: list[str] = []

    @contextmanager
    def wrapper(tasks: list[Task]) -> Iterator[list[Task]]:
        names.append(threading.current_thread().name)
        yield tasks

    queue.wrap_enqueue(wrapper)
    return names


def count(queue: TaskQueue) -> int:
    return sum(queue.stats().by_status.values())


def stored(url: str) -> set[str]:
    with TaskQueue(url) as queue:
        return {task.id for task in queue.list_tasks(limit=1_000)}


def test_an_enqueue_runs_in_the_thread_of_its_caller(queue: TaskQueue) -> None:
    names = record_thread(queue)

    queue.enqueue(sample_tasks.plain)
    queue.enqueue_many(sample_tasks.plain, [1, 2])
    queue.options(priority=3).enqueue(sample_tasks.plain)

    assert names == [threading.current_thread().name] * 3


def test_an_enqueue_with_a_deadline_or_in_an_event_loop_or_beside_a_worker_runs_on_the_event_loop(
    url: str, queue: TaskQueue
) -> None:
    names = record_thread(queue)

    async def main() -> None:
        queue.enqueue(sample_tasks.plain)

    asyncio.run(main())
    with queue.deadline(30):
        queue.enqueue(sample_tasks.plain)
    with queue.worker():
        assert queue.enqueue(sample_tasks.plain).result(30) is None
    with TaskQueue(url, settings=Settings(call_timeout=30)) as other:
        more = record_thread(other)
        other.enqueue_many(sample_tasks.plain, [1])
        other.enqueue_many(sample_tasks.plain, [1])

    assert names + more == ["omniq-portal"] * 5


def test_a_wrapper_does_not_change_the_context_variables_of_the_caller(queue: TaskQueue) -> None:
    variable = contextvars.ContextVar("variable", default="of the caller")

    @contextmanager
    def wrapper(tasks: list[Task]) -> Iterator[list[Task]]:
        variable.set("of the wrapper")
        yield tasks

    queue.wrap_enqueue(wrapper)
    queue.enqueue(sample_tasks.plain)

    assert variable.get() == "of the caller"


@pytest.mark.timeout(30)
def test_a_call_from_within_an_enqueue_gets_an_error_that_says_why(queue: TaskQueue) -> None:
    found: list[str] = []

    def call(*_: object) -> str:
        for nested in (
            lambda: queue.enqueue(sample_tasks.plain),
            lambda: other.enqueue(sample_tasks.plain),
            lambda: other.list_tasks(),
            lambda: asyncio.run(AsyncTaskQueue(queue.storage).enqueue(sample_tasks.plain)),
        ):
            with pytest.raises(StorageError) as error:
                nested()
            found.append(str(error.value))
        return "key"

    @contextmanager
    def wrapper(tasks: list[Task]) -> Iterator[list[Task]]:
        call()
        yield tasks

    # Two queues over one storage object.
    other = TaskQueue(queue.storage)
    queue.options(unique=call).enqueue(sample_tasks.plain)
    queue.wrap_enqueue(wrapper)
    queue.enqueue(sample_tasks.plain)

    assert len(found) == 8
    assert all("from within an enqueue" in each for each in found)
    assert count(queue) == 3


def test_a_wrapper_may_enqueue_to_another_storage(queue: TaskQueue, tmp_path: Path) -> None:
    with TaskQueue(f"sqlite:///{tmp_path}/audit.db") as audit:
        enqueue_first(audit)

        @contextmanager
        def wrapper(tasks: list[Task]) -> Iterator[list[Task]]:
            audit.enqueue(sample_tasks.plain)
            yield tasks

        queue.wrap_enqueue(wrapper)
        queue.enqueue(sample_tasks.plain)

        assert (count(audit), count(queue)) == (2, 2)


def test_errors_are_those_of_the_event_loop(url: str) -> None:
    def fails(*_: object) -> str:
        raise ValueError("no key")

    with TaskQueue(url, settings=Settings(max_pending=3)) as queue:
        for _ in range(3):
            queue.enqueue(sample_tasks.plain)
        with pytest.raises(QueueFull):
            queue.enqueue(sample_tasks.plain)
        with pytest.raises(InvalidTask, match="no key"):
            queue.options(unique=fails).enqueue(sample_tasks.plain)
        with pytest.raises(InvalidTask):
            queue.enqueue(3)  # type: ignore[call-overload]
        assert count(queue) == 3
    with pytest.raises(StorageClosed):
        queue.enqueue(sample_tasks.plain)


@contextmanager
def interrupts(modules: str, act: Callable[[], None], line: int) -> Iterator[list[int]]:
    """Act at the n-th line that this thread runs in these modules; counts the lines."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if modules not in frame.f_code.co_filename:
            return trace
        if event == "line" and not _calls_nothing(frame):
            count[0] += 1
            if count[0] == line:
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def _calls_nothing(frame: FrameType) -> bool:
    """Whether no real signal is handled in the line: the exit of a `with`, or a `try`."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith(("with ", "try:"))


def interrupt() -> None:
    raise KeyboardInterrupt


def lines_of_an_enqueue(queue: TaskQueue, enqueue: Callable[[], object], modules: str) -> int:
    with interrupts(modules, lambda: None, 0) as count:
        enqueue()
    return count[0]


def interrupt_each(url: str, modules: str, step: int) -> None:
    """Ctrl-C in every line of an enqueue: it is done or not, and nothing else has changed."""
    sure: set[str] = set()
    perhaps: set[str] = set()
    with TaskQueue(url) as queue:

        def enqueue(name: str) -> None:
            queue.options(task_id=name, unique=f"key of {name}").enqueue(sample_tasks.plain)

        for name in ("first", "second"):
            enqueue(name)
        total = lines_of_an_enqueue(queue, lambda: enqueue("third"), modules)
        sure |= {"first", "second", "third"}
        for line in range(1, total + 1, step):
            name = f"at-{line}"
            with interrupts(modules, interrupt, line), pytest.raises(KeyboardInterrupt):
                enqueue(name)
            perhaps.add(name)
            if line % (5 * step) == 1:
                enqueue(f"after-{line}")
                sure.add(f"after-{line}")
        names = record_thread(queue)
        for number in range(100):
            # The thread of the store may still end what an interrupt has left to it.
            enqueue(f"last-{number}")
            sure.add(f"last-{number}")
            if names[-1] == threading.current_thread().name:
                break
        assert names[-1] == threading.current_thread().name
    with TaskQueue(url) as queue:
        waiting = {task.id for task in queue.list_tasks(limit=5_000)}
        assert sure <= waiting <= sure | perhaps
        # Each name is either taken or free, and its unique key with it.
        for name in sorted(perhaps):
            handle = queue.options(unique=f"key of {name}").enqueue(sample_tasks.plain)
            assert (handle.id == name) == (name in waiting), name
        expected = count(queue)
        pool = queue.worker(concurrency=20)
        pool.run_until_empty()
        assert count(queue) == expected
        assert pool.stats().completed_tasks == expected


@pytest.mark.timeout(60)
def test_ctrl_c_in_the_middle_of_an_enqueue_leaves_it_done_or_not(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for kind in STORES:
        folder = tmp_path / kind
        folder.mkdir()
        interrupt_each(url_of(kind, folder), "/omniq/storage/", step=41)


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_ctrl_c_in_any_line_of_the_store_leaves_an_enqueue_done_or_not(url: str) -> None:
    kind = url.partition(":")[0]

    interrupt_each(url, f"/omniq/storage/{kind}/", step=1)


@pytest.mark.timeout(30)
def test_a_signal_handler_that_enqueues_in_the_middle_of_a_transaction_gets_an_error(
    queue: TaskQueue,
) -> None:
    def enqueue() -> None:
        queue.enqueue(sample_tasks.plain)

    total = lines_of_an_enqueue(queue, enqueue, "/omniq/storage/")
    refused = 0
    for line in range(10, total, 30):
        with interrupts("/omniq/storage/", enqueue, line):
            try:
                enqueue()
            except StorageError as error:
                refused += "from within an enqueue" in str(error)

    # A few lines run before and after the part that waits for no other call.
    assert refused >= total // 30 - 3


@pytest.mark.timeout(30)
def test_ctrl_c_ends_the_wait_for_another_program_that_holds_the_lock(tmp_path: Path) -> None:
    def on_alarm(*_: object) -> None:
        raise KeyboardInterrupt

    url = url_of("sqlite", tmp_path)
    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with TaskQueue(url) as queue:
            enqueue_first(queue)
            with closing(sqlite3.connect(tmp_path / "tasks.db", isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with pytest.raises(KeyboardInterrupt):
                    queue.enqueue(sample_tasks.plain)
                other.execute("ROLLBACK")
            assert count(queue) == 1
            queue.enqueue(sample_tasks.plain)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(stored(url)) == 2


def transactions(database: Path) -> int:
    """The commits in the write-ahead log of a database."""
    log = Path(f"{database}-wal").read_bytes()
    (page_size,) = struct.unpack(">I", log[8:12])
    salt = log[16:24]
    frames = (log[at : at + 24] for at in range(32, len(log), 24 + page_size))
    return sum(frame[4:8] != b"\0\0\0\0" and frame[8:16] == salt for frame in frames)


@pytest.mark.timeout(60)
def test_threads_that_enqueue_at_the_same_time_on_sqlite_share_a_commit(tmp_path: Path) -> None:
    url, database = url_of("sqlite", tmp_path), tmp_path / "tasks.db"
    with TaskQueue(url) as queue, ThreadPoolExecutor(8) as pool:
        enqueue_first(queue)
        before = transactions(database)
        storage: Any = queue.storage
        writer, batcher = storage._backend._writer, storage._batcher
        with closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with until(lambda: writer._turn.locked()):
                first = pool.submit(queue.enqueue, sample_tasks.plain)
            # The first of them waits for its turn, and the others for that one.
            with until(lambda: len(batcher._waiting) == 6):
                others = [pool.submit(queue.enqueue, sample_tasks.plain) for _ in range(7)]
            other.execute("ROLLBACK")
        ids = {each.result().id for each in [first, *others]}

        assert transactions(database) - before == 3
        assert len(ids) == 8


@pytest.mark.timeout(60)
def test_threads_that_enqueue_at_the_same_time_on_files_share_a_file(tmp_path: Path) -> None:
    with TaskQueue(url_of("file", tmp_path)) as queue, ThreadPoolExecutor(8) as pool:
        enqueue_first(queue)
        storage: Any = queue.storage
        backend, batcher = storage._backend, storage._batcher
        backend._turn.acquire()
        with until(queue.storage.callers_lock._lock.locked):  # type: ignore[union-attr]
            pool.submit(queue.enqueue, sample_tasks.plain)
        # The first of them waits for its turn, and the others for the first.
        with until(lambda: len(batcher._waiting) == 6):
            others = [pool.submit(queue.enqueue, sample_tasks.plain) for _ in range(7)]
        backend._turn.release()
        ids = {each.result().id for each in others}

        names = [each for each in (tmp_path / "tasks" / "tasks").iterdir() if "~" not in each.name]
        files = {each.stat().st_ino for each in names if each.name.split(".")[0] in ids}
        assert len(ids) == 7
        assert len(files) == 2


@pytest.mark.timeout(60)
def test_calls_beside_close_are_done_or_raise_a_typed_error(url: str) -> None:
    done: list[str] = []
    errors: list[BaseException] = []
    queue = TaskQueue(url)
    queue.open()
    queue.enqueue(sample_tasks.plain)

    def enqueue() -> None:
        try:
            while True:
                done.append(queue.enqueue(sample_tasks.plain).id)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=enqueue) for _ in range(3)]
    with until(lambda: len(done) > 20):
        for each in threads:
            each.start()
    queue.close()
    for each in threads:
        each.join()

    assert [type(each) for each in errors] == [StorageClosed] * 3, errors
    assert set(done) <= stored(url)


@pytest.mark.timeout(60)
def test_a_child_that_is_forked_in_the_middle_of_an_enqueue_gets_an_error_and_harms_nothing(
    url: str, queue: TaskQueue
) -> None:
    status: list[int] = []

    @contextmanager
    def fork(tasks: list[Task]) -> Iterator[list[Task]]:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                queue.enqueue(sample_tasks.plain)
            except StorageError as error:
                code = 0 if "open a new queue in the child" in str(error) else 2
            queue.close()
            with TaskQueue(url) as own:
                own.enqueue(sample_tasks.plain)
            os._exit(code)
        status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        yield tasks

    queue.wrap_enqueue(fork)
    ids = {queue.enqueue(sample_tasks.plain).id for _ in range(3)}

    assert status == [0, 0, 0]
    assert ids <= stored(url)
    assert len(stored(url)) == 1 + 3 + 3


@pytest.mark.timeout(60)
def test_a_child_may_be_forked_while_other_threads_enqueue(url: str, queue: TaskQueue) -> None:
    done: list[str] = []
    is_over = threading.Event()

    def enqueue() -> None:
        while not is_over.is_set() and len(done) < 500:
            done.append(queue.enqueue(sample_tasks.plain).id)

    threads = [threading.Thread(target=enqueue) for _ in range(2)]
    for each in threads:
        each.start()
    for _ in range(4):
        child = os.fork()
        if child == 0:
            # Everything that was copied is freed, in whatever state it was.
            os._exit(_drop(queue))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    is_over.set()
    for each in threads:
        each.join()

    assert set(done) <= stored(url)
    assert len(stored(url)) == len(done) + 1


def _drop(queue: TaskQueue) -> int:
    try:
        queue.enqueue(sample_tasks.plain)
    except StorageError:
        queue.close()
        storage: Any = queue.storage
        storage._backend.__dict__.clear()
        return 0
    return 1


EXIT = """
import threading
from omniq import StorageClosed, TaskQueue
queue = TaskQueue({url!r})
queue.open()
for _ in range(3):
    queue.enqueue("m.f")
def more():
    try:
        while True:
            queue.enqueue("m.f")
    except StorageClosed:
        pass
if {beside}:
    threading.Thread(target=more, daemon=True).start()
    queue.enqueue("m.f")
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("beside", [False, True])
def test_a_process_ends_without_output_that_does_not_close_its_queue(
    url: str, tmp_path: Path, beside: bool
) -> None:
    command = [sys.executable, "-W", "error", "-c", EXIT.format(url=url, beside=beside)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(stored(url)) >= 3


KILLED = """
from omniq import TaskQueue
with TaskQueue({url!r}) as queue:
    for number in range(20):
        print(queue.options(task_id=f"task-{{number:02}}").enqueue("m.f").id, flush=True)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "failpoint", "is_stored"),
    [
        ("sqlite", "sqlite.before_commit", False),
        ("sqlite", "sqlite.after_commit", True),
        ("file", "file.enqueue.after_link", False),
        ("file", "enqueue.after", True),
    ],
)
def test_a_process_that_is_killed_in_an_enqueue_has_stored_what_it_was_told(
    tmp_path: Path, kind: str, failpoint: str, is_stored: bool
) -> None:
    url = url_of(kind, tmp_path)
    environment = {**os.environ, "OMNIQ_FAILPOINTS": f"{failpoint}=kill@9"}

    killed = subprocess.run(
        [sys.executable, "-c", KILLED.format(url=url)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    told = killed.stdout.split()

    assert killed.returncode == -signal.SIGKILL
    assert len(told) > 3
    unsure = {f"task-{len(told):02}"}
    assert stored(url) == {*told, *(unsure if is_stored else ())}
