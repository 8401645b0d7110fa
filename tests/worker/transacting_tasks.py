"""Tasks that write in a transaction, and what they do after it."""

from __future__ import annotations

import asyncio
from typing import Any

from omniq import PermanentError, TaskContext, task
from tests.worker.recorder import RECORDER, until

INSERT = "INSERT INTO notes VALUES (?)"


@task
async def write(ctx: TaskContext, note: str, value: Any = None) -> str:
    async with ctx.transaction() as connection:
        connection.execute(INSERT, (note,))
        ctx.result = value
    return "not kept"


@task
def write_in_thread(ctx: TaskContext, note: str, value: Any = None) -> str:
    with ctx.transaction() as connection:
        connection.execute(INSERT, (note,))
        ctx.result = value
    return "not kept"


@task(executor="process")
def write_in_process(ctx: TaskContext, note: str) -> None:
    with ctx.transaction() as connection:
        connection.execute(INSERT, (note,))


@task(executor="thread")
async def write_on_a_loop_of_its_own(ctx: TaskContext, note: str, is_async: bool) -> None:
    if is_async:
        async with ctx.transaction() as connection:
            connection.execute(INSERT, (note,))
    with ctx.transaction() as connection:
        connection.execute(INSERT, (note,))


@task
async def write_and_raise(ctx: TaskContext, note: str, where: str) -> None:
    RECORDER.note(note)
    async with ctx.transaction() as connection:
        connection.execute(INSERT, (note,))
        if where == "inside":
            raise PermanentError("inside the block")
    raise PermanentError("after the block")


@task
async def write_and_hang(ctx: TaskContext, note: str) -> None:
    async with ctx.transaction() as connection:
        connection.execute(INSERT, (note,))
    RECORDER.note(note)
    await asyncio.Event().wait()


@task
def write_and_hang_in_thread(ctx: TaskContext, note: str) -> None:
    with ctx.transaction() as connection:
        connection.execute(INSERT, (note,))
    RECORDER.note(note)
    RECORDER.gate(note).wait(8)


@task
async def hang_inside(ctx: TaskContext, note: str) -> None:
    async with ctx.transaction() as connection:
        connection.execute(INSERT, (note,))
        RECORDER.note(note)
        await until(RECORDER.gate(note).is_set)


@task
async def misuse(ctx: TaskContext, how: str) -> None:
    """Misuses a transaction in that way; the task fails with the error that this raises."""
    match how:
        case "with":
            with ctx.transaction():
                pass
        case "commit":
            async with ctx.transaction() as connection:
                connection.execute(INSERT, (how,))
                connection.commit()
        case "commit in SQL":
            async with ctx.transaction() as connection:
                connection.execute(INSERT, (how,))
                connection.execute("COMMIT")
        case "own block":
            async with ctx.transaction() as connection:
                with connection:
                    connection.execute(INSERT, (how,))
        case "script":
            async with ctx.transaction() as connection:
                connection.execute(INSERT, (how,))
                connection.executescript("CREATE TABLE more (note)")
        case "close":
            async with ctx.transaction() as connection:
                connection.execute(INSERT, (how,))
                connection.close()
        case "nested":
            async with ctx.transaction() as connection, ctx.transaction():
                connection.execute(INSERT, (how,))
        case "step":
            async with ctx.transaction() as connection:
                connection.execute(INSERT, (how,))
                await ctx.step("one", write, ctx, "b")
        case "unserialisable":
            async with ctx.transaction() as connection:
                connection.execute(INSERT, (how,))
                ctx.result = object()


@task
async def write_twice(ctx: TaskContext, note: str) -> None:
    async with ctx.transaction() as connection:
        connection.execute(INSERT, (note,))
    try:
        async with ctx.transaction() as connection:
            connection.execute(INSERT, (note,))
    except Exception as error:
        RECORDER.facts["second"] = str(error)


@task
async def fail_then_write(ctx: TaskContext, note: str) -> None:
    """The first transaction is rolled back, and the task continues with a second one."""
    try:
        async with ctx.transaction() as connection:
            connection.execute(INSERT, ("undone",))
            raise LookupError
    except LookupError:
        pass
    async with ctx.transaction() as connection:
        connection.execute(INSERT, (note,))


@task
async def write_with_odd_rows(ctx: TaskContext, note: str) -> None:
    async with ctx.transaction() as connection:
        connection.row_factory = lambda cursor, row: {"row": row}
        connection.text_factory = bytes
        connection.execute(INSERT, (note,))
        ctx.result = len(connection.execute("SELECT * FROM notes").fetchall())


@task
def query_for_ever(ctx: TaskContext, note: str) -> None:
    with ctx.transaction() as connection:
        connection.execute(INSERT, (note,))
        connection.execute(
            "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"
        )


@task
async def hold_too_long(ctx: TaskContext, note: str) -> None:
    """Continues to write although its time is over."""
    async with ctx.transaction() as connection:
        connection.execute(INSERT, (note,))

        def is_refused() -> bool:
            try:
                connection.execute(INSERT, (note,))
            except Exception:
                return True
            return False

        await until(is_refused)
        RECORDER.note(note)
        try:
            connection.execute(INSERT, (note,))
        except Exception as error:
            RECORDER.facts["then"] = type(error).__name__


@task
async def hand_on(ctx: TaskContext, path: str, note: str) -> None:
    """Enqueues the next task in the same transaction."""
    from omniq import AsyncTaskQueue

    async with AsyncTaskQueue(f"sqlite:///{path}") as queue, ctx.transaction() as connection:
        connection.execute(INSERT, (note,))
        handle = await queue.options(connection=connection).enqueue(write, f"{note} too")
        ctx.result = handle.id
