"""Tasks enqueued inside the caller's transaction, on every kind of connection to SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from omniq import AsyncTaskQueue, DuplicateTask, InvalidTask, StorageError, TaskNotFound, TaskQueue
from omniq.storage.memory import MemoryStorage
from omniq.storage.sqlite import SQLiteStorage
from tests.queue.sample_tasks import fetch, once, send

INSERT = "INSERT INTO notes VALUES ('order')"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tasks.db"
    with TaskQueue(f"sqlite:///{path}"), closing(sqlite3.connect(path)) as setup:
        setup.execute("CREATE TABLE notes (note TEXT)")
        setup.commit()
    return path


@pytest.fixture
def queue(path):
    with TaskQueue(f"sqlite:///{path}") as queue:
        yield queue


@pytest.fixture
async def async_queue(path):
    async with AsyncTaskQueue(f"sqlite:///{path}") as queue:
        yield queue


@pytest.fixture
def connection(path):
    with closing(sqlite3.connect(path)) as connection:
        yield connection


@pytest.fixture
def engine(path):
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool)
    yield engine
    engine.dispose()


@pytest.fixture
async def async_engine(path):
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", poolclass=NullPool)
    yield engine
    await engine.dispose()


def notes(path):
    with closing(sqlite3.connect(path)) as reader:
        return reader.execute("SELECT count(*) FROM notes").fetchone()[0]


def ids(queue):
    return [task.id for task in queue.list_tasks()]


# sqlite3


def test_a_commit_stores_the_row_and_exactly_one_task(path, queue, connection):
    connection.execute(INSERT)
    handle = queue.options(connection=connection).enqueue(send, "a@b", subject="hi")
    assert ids(queue) == []
    with pytest.raises(TaskNotFound):
        handle.status()
    connection.commit()

    (task,) = queue.list_tasks()
    assert (task.id, task.args, task.kwargs) == (handle.id, ("a@b",), {"subject": "hi"})
    assert (task.queue, task.priority) == ("mail", 5)
    assert notes(path) == 1


def test_a_rollback_stores_neither_the_row_nor_the_task(path, queue, connection):
    connection.execute(INSERT)
    queue.options(connection=connection).enqueue(send, "a@b")
    connection.rollback()

    assert (ids(queue), notes(path)) == ([], 0)


def test_many_tasks_are_enqueued_in_one_transaction_with_options(queue, connection):
    with connection:
        handles = queue.options(connection=connection, priority=9, delay=60).enqueue_many(
            fetch, [f"u{number}" for number in range(300)]
        )

    tasks = queue.list_tasks(limit=1000)
    assert [task.id for task in tasks] == [handle.id for handle in handles]
    assert {task.priority for task in tasks} == {9}


def test_a_refusal_leaves_the_transaction_usable(path, queue, connection):
    queue.options(task_id="taken").enqueue(fetch, "u")
    connection.execute(INSERT)
    with pytest.raises(DuplicateTask):
        queue.options(connection=connection, task_id="taken").enqueue(fetch, "u")
    queue.options(connection=connection, task_id="free").enqueue(fetch, "u")
    connection.commit()

    assert sorted(ids(queue)) == ["free", "taken"]
    assert notes(path) == 1


def test_a_refusal_before_the_first_write_leaves_no_transaction_open(queue, connection):
    queue.options(task_id="taken").enqueue(fetch, "u")
    with pytest.raises(DuplicateTask):
        queue.options(connection=connection, task_id="taken").enqueue(fetch, "u")

    assert not connection.in_transaction


def test_a_unique_key_that_is_held_returns_the_same_task(queue, connection):
    first = queue.enqueue(once, 1)
    second = queue.options(connection=connection).enqueue(once, 1)
    connection.commit()

    assert second.id == first.id
    assert ids(queue) == [first.id]


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE", "SAVEPOINT mine"])
def test_autocommit_is_refused_until_a_transaction_is_begun(path, queue, begin):
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        enqueuer = queue.options(connection=connection)
        with pytest.raises(InvalidTask, match="begin one first"):
            enqueuer.enqueue(fetch, "u")
        assert ids(queue) == []
        connection.execute(begin)
        handle = enqueuer.enqueue(fetch, "u")
        assert ids(queue) == []
        connection.execute("COMMIT")

    assert ids(queue) == [handle.id]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has no autocommit attribute yet")
@pytest.mark.parametrize("autocommit", [True, False])
def test_the_autocommit_attribute_is_respected(path, queue, autocommit):
    options: dict[str, Any] = {"autocommit": autocommit}
    with closing(sqlite3.connect(path, **options)) as connection:
        if autocommit:
            with pytest.raises(InvalidTask, match="begin one first"):
                queue.options(connection=connection).enqueue(fetch, "u")
            return
        handle = queue.options(connection=connection).enqueue(fetch, "u")
        assert ids(queue) == []
        connection.commit()

    assert ids(queue) == [handle.id]


def test_another_database_is_refused(tmp_path, queue, connection):
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        with pytest.raises(InvalidTask, match=r"other\.db"):
            queue.options(connection=other).enqueue(fetch, "u")
        assert not other.in_transaction
        # A power cut can separate the commits of attached files.
        other.execute("ATTACH DATABASE ? AS tasks", (str(queue.storage._backend._path),))
        with pytest.raises(InvalidTask, match=r"other\.db"):
            queue.options(connection=other).enqueue(fetch, "u")
    with closing(sqlite3.connect(":memory:")) as other, pytest.raises(InvalidTask, match="memory"):
        queue.options(connection=other).enqueue(fetch, "u")

    assert ids(queue) == []


def test_the_same_file_under_another_name_is_the_same(tmp_path, path, queue):
    (tmp_path / "alias.db").symlink_to(path)
    with closing(sqlite3.connect(tmp_path / "alias.db")) as connection, connection:
        handle = queue.options(connection=connection).enqueue(fetch, "u")

    assert ids(queue) == [handle.id]


def test_the_connections_factories_have_no_effect_and_are_unchanged(path, queue, connection):
    class Odd(sqlite3.Connection):
        def cursor(self, *_):
            raise AssertionError("only the caller may use this method")

    connection.row_factory = lambda cursor, row: {"row": row}
    connection.text_factory = bytes
    enqueuer = queue.options(connection=connection, unique="k")
    first = enqueuer.enqueue(fetch, "u")
    assert enqueuer.enqueue(fetch, "v").id == first.id
    assert connection.execute("SELECT 'x'").fetchone() == {"row": (b"x",)}
    connection.commit()
    with closing(sqlite3.connect(path, factory=Odd)) as odd:
        second = queue.options(connection=odd).enqueue(fetch, "w")
        odd.commit()

    assert ids(queue) == [first.id, second.id]


def test_a_connection_that_is_closed_or_of_another_thread_is_refused(path, queue):
    closed = sqlite3.connect(path)
    closed.close()
    with pytest.raises(InvalidTask, match="closed"):
        queue.options(connection=closed).enqueue(fetch, "u")
    found = []

    def enqueue(connection):
        try:
            queue.options(connection=connection).enqueue(fetch, "u")
        except InvalidTask as error:
            found.append(str(error))

    with closing(sqlite3.connect(path)) as connection:
        thread = threading.Thread(target=enqueue, args=(connection,))
        thread.start()
        thread.join()

    assert "same thread" in found[0]
    assert ids(queue) == []


def test_a_transaction_that_read_before_another_commit_gets_an_error_that_says_what_to_do(
    queue, connection
):
    connection.isolation_level = None
    connection.execute("BEGIN")
    connection.execute("SELECT * FROM notes").fetchall()
    queue.enqueue(fetch, "u")
    with pytest.raises(StorageError, match="BEGIN IMMEDIATE"):
        queue.options(connection=connection).enqueue(fetch, "v")

    assert connection.in_transaction
    connection.execute("ROLLBACK")


def test_a_task_enqueued_on_a_connection_is_run(path, connection):
    with TaskQueue(f"sqlite:///{path}") as queue, queue.worker(poll_interval=5):
        with connection:
            handle = queue.options(connection=connection).enqueue(fetch, "four")

        assert handle.result(timeout=30) == 4


async def test_a_blocking_connection_works_with_the_async_queue_too(async_queue, path, connection):
    async with asyncio.timeout(30):
        handle = await async_queue.options(connection=connection).enqueue(fetch, "u")
        assert await async_queue.list_tasks() == []
        connection.commit()

        assert [task.id for task in await async_queue.list_tasks()] == [handle.id]


def test_a_backend_without_transactions_raises_an_error(connection):
    with TaskQueue(MemoryStorage()) as queue, pytest.raises(InvalidTask, match="no transactions"):
        queue.options(connection=connection).enqueue(fetch, "u")


@pytest.mark.parametrize("nonsense", [object(), "a string", 7])
def test_an_object_that_is_not_a_connection_is_refused(queue, nonsense):
    with pytest.raises(InvalidTask, match="expected one of sqlite3"):
        queue.options(connection=nonsense).enqueue(fetch, "u")


# SQLAlchemy


@pytest.mark.parametrize("writes_first", [True, False])
@pytest.mark.parametrize("face", ["connection", "session"])
def test_a_transaction_of_sqlalchemy_commits_both_or_neither(
    path, queue, engine, face, writes_first
):
    def enqueue(using):
        if writes_first:
            using.execute(text(INSERT))
        handle = queue.options(connection=using, unique="k").enqueue(fetch, "u")
        assert queue.options(connection=using, unique="k").enqueue(fetch, "v").id == handle.id
        if not writes_first:
            using.execute(text(INSERT))
        assert ids(queue) == []
        return handle

    with engine.connect() if face == "connection" else Session(engine) as using:
        enqueue(using)
        using.rollback()
        assert (ids(queue), notes(path)) == ([], 0)
        handle = enqueue(using)
        using.commit()

    assert (ids(queue), notes(path)) == ([handle.id], 1)


def test_a_refusal_leaves_a_session_usable(path, queue, engine):
    queue.options(task_id="taken").enqueue(fetch, "u")
    with Session(engine) as session:
        for note in (False, True):
            if note:
                session.execute(text(INSERT))
            with pytest.raises(DuplicateTask):
                queue.options(connection=session, task_id="taken").enqueue(fetch, "u")
        queue.options(connection=session, task_id="free").enqueue(fetch, "u")
        session.commit()

    assert (sorted(ids(queue)), notes(path)) == (["free", "taken"], 1)


def test_autocommit_of_sqlalchemy_is_refused(queue, engine):
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.raises(InvalidTask, match="begin one first"):
            queue.options(connection=connection).enqueue(fetch, "u")
        connection.rollback()

    assert ids(queue) == []


def test_an_engine_and_another_database_of_sqlalchemy_are_refused(tmp_path, queue, engine):
    with pytest.raises(InvalidTask, match="expected one of sqlite3"):
        queue.options(connection=engine).enqueue(fetch, "u")
    other = create_engine(f"sqlite:///{tmp_path / 'other.db'}", poolclass=NullPool)
    with other.connect() as connection, pytest.raises(InvalidTask, match=r"other\.db"):
        queue.options(connection=connection).enqueue(fetch, "u")

    assert ids(queue) == []


@pytest.mark.parametrize("face", ["connection", "session"])
async def test_an_async_transaction_of_sqlalchemy_commits_both_or_neither(
    path, async_queue, async_engine, face
):
    async def enqueue(using):
        await using.execute(text(INSERT))
        handles = await async_queue.options(connection=using).enqueue_many(fetch, ["u", "v"])
        with pytest.raises(DuplicateTask):
            await async_queue.options(connection=using, task_id=handles[0].id).enqueue(fetch, "w")
        assert await async_queue.list_tasks() == []
        return [handle.id for handle in handles]

    using = async_engine.connect() if face == "connection" else AsyncSession(async_engine)
    async with using as using:
        await enqueue(using)
        await using.rollback()
        assert (await async_queue.list_tasks(), notes(path)) == ([], 0)
        given = await enqueue(using)
        await using.commit()

    assert [task.id for task in await async_queue.list_tasks()] == given
    assert notes(path) == 1


async def test_an_async_connection_is_refused_by_the_blocking_queue(path, async_engine):
    storage = SQLiteStorage(path)
    queue = TaskQueue(storage)
    await asyncio.to_thread(queue.open)
    try:
        async with async_engine.connect() as connection, AsyncSession(async_engine) as session:
            for using in (connection, session):
                with pytest.raises(InvalidTask, match="is for async code; use AsyncTaskQueue"):
                    queue.options(connection=using).enqueue(fetch, "u")
    finally:
        await asyncio.to_thread(queue.close)
