"""Blocking code reaches the event loop through one portal that never hangs and never leaks."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest
import sqlalchemy.ext.asyncio
import sqlalchemy.orm

from omniq.concurrency.portal import Portal, is_async, run_here
from omniq.errors import CallTimeout, InvalidTask, StorageClosed, StorageError

# Python 3.12 and later warn about a fork with threads, which these tests do on purpose.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def portal():
    portal = Portal()
    yield portal
    portal.close()


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


async def fail() -> None:
    raise LookupError("as expected")


async def run_forever(started: threading.Event, cleaned_up: list[str]) -> None:
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        cleaned_up.append("yes")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_no_thread_is_started_before_the_first_call():
    before = threading.active_count()
    Portal()

    assert threading.active_count() == before


def test_a_call_returns_what_the_coroutine_returns(portal):
    assert portal.run(answer()) == 42


def test_a_call_raises_what_the_coroutine_raises(portal):
    with pytest.raises(LookupError, match="as expected"):
        portal.run(fail())


def test_all_calls_share_one_loop(portal):
    async def loop_id() -> int:
        return id(asyncio.get_running_loop())

    assert portal.run(loop_id()) == portal.run(loop_id())


def test_many_threads_may_call_at_once(portal):
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(portal.run(answer()))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == [42] * 8


async def test_a_thread_with_its_own_running_loop_may_call(portal):
    assert portal.run(answer()) == 42


def test_a_call_has_the_callers_context_variables(portal):
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("of the caller")

    async def read_variable() -> str:
        return variable.get()

    assert portal.run(read_variable()) == "of the caller"


def test_a_call_from_the_loop_itself_is_refused_instead_of_hanging(portal):
    async def nested() -> None:
        portal.run(answer())

    with pytest.raises(StorageError, match="AsyncTaskQueue"):
        portal.run(nested())


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_exit_inside_a_coroutine_reaches_its_caller_and_leaves_the_loop_running(portal, error):
    async def leave() -> None:
        raise error

    with pytest.raises(error):
        portal.run(leave())

    assert portal.run(answer()) == 42


def test_a_coroutine_that_cancels_itself_differs_from_a_closed_portal(portal):
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        portal.run(give_up())


def test_an_interrupt_of_the_waiting_thread_cancels_the_coroutine_and_waits_for_its_cleanup(portal):
    started = threading.Event()
    cleaned_up: list[str] = []

    def interrupt() -> None:
        started.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        portal.run(run_forever(started, cleaned_up))

    assert cleaned_up == ["yes"]
    assert portal.run(answer()) == 42


def test_an_interrupt_right_after_the_start_cancels_the_coroutine_as_well(portal, monkeypatch):
    started = threading.Event()
    cleaned_up: list[str] = []
    submit = portal._submit

    def interrupted(call: Any) -> None:
        submit(call)
        started.wait()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(portal, "_submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            portal.run(run_forever(started, cleaned_up))

    assert cleaned_up == ["yes"]
    assert portal.run(answer()) == 42


def test_closing_twice_is_the_same_as_closing_once(portal):
    portal.run(answer())

    portal.close()
    portal.close()


def test_closing_a_portal_that_never_ran_is_fine():
    Portal().close()


def test_closing_ends_the_thread(portal):
    async def thread() -> threading.Thread:
        return threading.current_thread()

    loop_thread = portal.run(thread())
    portal.close()

    assert not loop_thread.is_alive()


def test_a_call_after_closing_is_refused(portal):
    portal.close()

    with pytest.raises(StorageClosed):
        portal.run(answer())


def test_closing_cancels_running_calls_and_their_callers_get_an_error(portal):
    started = threading.Event()
    cleaned_up: list[str] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            portal.run(run_forever(started, cleaned_up))
        except StorageClosed as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    started.wait()
    portal.close()
    caller.join()

    assert len(errors) == 1
    assert cleaned_up == ["yes"]


def test_an_unreferenced_portal_stops_its_thread():
    portal = Portal()

    async def thread() -> threading.Thread:
        return threading.current_thread()

    loop_thread = portal.run(thread())
    alive = weakref.ref(portal)
    del portal
    gc.collect()

    assert alive() is None
    assert not loop_thread.is_alive()


@forks
def test_in_a_forked_child_the_error_says_to_open_a_new_queue(portal):
    portal.run(answer())
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        message = b"no error"
        try:
            portal.run(answer())
        except StorageError as error:
            message = f"forked={portal.forked} {error}".encode()
        portal.close()
        os.write(writable, message)
        os._exit(0)
    os.close(writable)
    os.waitpid(child, 0)
    with os.fdopen(readable) as pipe:
        report = pipe.read()

    assert report.startswith("forked=True")
    assert "open a new queue in the child" in report
    assert not portal.forked
    assert portal.run(answer()) == 42


@forks
def test_a_portal_that_had_not_started_works_in_a_forked_child():
    portal = Portal()
    child = os.fork()
    if child == 0:
        os._exit(portal.run(answer()))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def test_the_interpreter_exits_without_output_with_an_open_portal():
    done = run_python(
        "import asyncio\n"
        "from omniq.concurrency.portal import Portal\n"
        "portal = Portal()\n"
        "portal.run(asyncio.to_thread(len, 'abc'))\n"
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_interpreter_exits_although_a_coroutine_never_ends():
    done = run_python(
        "import asyncio, threading\n"
        "from omniq.concurrency.portal import Portal\n"
        "portal = Portal()\n"
        "started = threading.Event()\n"
        "async def never():\n"
        "    started.set()\n"
        "    await asyncio.Event().wait()\n"
        "def call():\n"
        "    try:\n"
        "        portal.run(never())\n"
        "    except Exception as error:\n"
        "        pass\n"
        "threading.Thread(target=call, daemon=True).start()\n"
        "started.wait()\n"
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (asyncpg.Connection, True),
        (asyncpg.pool.PoolConnectionProxy, True),
        (psycopg.AsyncConnection, True),
        (aiosqlite.Connection, True),
        (sqlalchemy.ext.asyncio.AsyncConnection, True),
        (sqlalchemy.ext.asyncio.AsyncSession, True),
        (sqlite3.Connection, False),
        (psycopg.Connection, False),
        (sqlalchemy.Connection, False),
        (sqlalchemy.orm.Session, False),
        (object, False),
    ],
)
def test_async_connections_are_recognized_by_their_class(kind, expected):
    assert is_async(kind) is expected


def test_a_coroutine_that_never_suspends_runs_in_the_calling_thread():
    async def name() -> str:
        return threading.current_thread().name

    assert run_here(name(), object()) == threading.current_thread().name


def test_a_coroutine_that_suspends_cannot_run_in_the_calling_thread():
    async def wait() -> None:
        await asyncio.sleep(0)

    with pytest.raises(InvalidTask, match="is for async code; use AsyncTaskQueue"):
        run_here(wait(), object())


# Deadlines


async def ignore_cancellation(release: asyncio.Event) -> str:
    while not release.is_set():
        try:
            await release.wait()
        except asyncio.CancelledError:
            continue
    return "done"


def test_a_call_past_its_deadline_is_cancelled_and_cleaned_up():
    portal, cleaned_up = Portal(call_timeout=0.2), list[str]()
    with pytest.raises(CallTimeout, match=r"within 0\.2 s") as caught:
        portal.run(run_forever(threading.Event(), cleaned_up))
    portal.close()

    assert caught.value.was_sent
    assert cleaned_up == ["yes"]


def test_a_call_that_ignores_its_cancellation_does_not_hold_its_caller():
    portal, release = Portal(call_timeout=0.1), asyncio.Event()

    async def end() -> None:
        release.set()

    began = time.monotonic()
    with pytest.raises(CallTimeout):
        portal.run(ignore_cancellation(release))
    took = time.monotonic() - began
    with portal.deadline(None):
        portal.run(end())
    portal.close()

    assert took < 10


def test_a_call_that_ends_while_it_is_cancelled_returns_what_it_has():
    async def finish_when_cancelled() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "stored"
        raise AssertionError

    async def fail_when_cancelled() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            raise StorageError("the connection was cut")

    portal = Portal(call_timeout=0.1)
    assert portal.run(finish_when_cancelled()) == "stored"
    with pytest.raises(CallTimeout) as caught:
        portal.run(fail_when_cancelled())
    portal.close()

    assert isinstance(caught.value.__cause__, StorageError)


def test_a_call_after_the_deadline_is_not_made():
    portal, started = Portal(), threading.Event()
    with portal.deadline(0), pytest.raises(CallTimeout) as caught:
        portal.run(run_forever(started, []))
    portal.close()

    assert not caught.value.was_sent
    assert not started.is_set()


def test_blocks_of_deadlines_may_be_nested():
    portal = Portal()
    with portal.deadline(0):
        with portal.deadline(60):
            assert portal.run(answer()) == 42
        with portal.deadline(None):
            assert portal.run(answer()) == 42
        with pytest.raises(CallTimeout):
            portal.run(answer())
    assert portal.run(answer()) == 42
    portal.close()


def test_the_time_that_a_call_waits_on_purpose_is_added():
    portal = Portal(call_timeout=0.1)
    assert portal.run(asyncio.sleep(0.4, "late"), wait=30.0) == "late"
    assert portal.run(asyncio.sleep(0.4, "late"), wait=None) == "late"
    with pytest.raises(CallTimeout):
        portal.run(asyncio.sleep(30), wait=0.0)
    portal.close()
