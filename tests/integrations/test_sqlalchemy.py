"""A session of SQLAlchemy for each run: committed when the function returns, rolled back when it raises."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from omniq import INJECTED, AsyncTaskQueue, TaskFailed, task
from omniq.integrations.sqlalchemy import session_per_run

VARIABLE = "OMNIQ_TEST_SESSIONS"
ENDED: list[str] = []


def make_engine() -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{os.environ[VARIABLE]}")
    yield engine
    engine.dispose()
    ENDED.append("disposed")


async def make_async_engine() -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{os.environ[VARIABLE]}")
    yield engine
    await engine.dispose()
    ENDED.append("disposed")


RunSession = Annotated[Session, session_per_run(make_engine)]
AsyncRunSession = Annotated[AsyncSession, session_per_run(make_async_engine)]


@task
def add(name: str, *, fails: bool = False, session: RunSession = INJECTED) -> bool:
    session.execute(text("INSERT INTO names VALUES (:name)"), {"name": name})
    if fails:
        raise ValueError("not stored")
    return session.in_transaction()


@task
async def add_async(name: str, *, fails: bool = False, session: AsyncRunSession = INJECTED) -> bool:
    await session.execute(text("INSERT INTO names VALUES (:name)"), {"name": name})
    if fails:
        raise ValueError("not stored")
    return session.in_transaction()


@task(executor="process")
def add_in_a_process(name: str, *, session: RunSession = INJECTED) -> bool:
    session.execute(text("INSERT INTO names VALUES (:name)"), {"name": name})
    return True


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the names that are stored."""
    path = tmp_path / "names.db"
    monkeypatch.setenv(VARIABLE, str(path))
    ENDED.clear()
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE names (name TEXT UNIQUE)"))

    def read() -> list[str]:
        with engine.begin() as connection:
            return [row[0] for row in connection.execute(text("SELECT name FROM names"))]

    yield read
    engine.dispose()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("func", [add, add_async])
async def test_a_run_commits_when_it_returns_and_rolls_back_when_it_raises(names, func):
    async with AsyncTaskQueue("memory:") as queue:
        for name, fails in (("a", False), ("b", True), ("c", False)):
            handle = await queue.options(max_retries=0).enqueue(func, name, fails=fails)
        last = await queue.options(max_retries=0).enqueue(func, "a")
        async with queue.worker(concurrency=1):
            assert await handle.result(30) is True
            with pytest.raises(TaskFailed, match="UNIQUE constraint failed"):
                await last.result(30)

    assert names() == ["a", "c"]
    assert ENDED == ["disposed"]


@pytest.mark.timeout(60)
async def test_a_child_process_has_an_engine_too(names):
    async with AsyncTaskQueue("memory:") as queue:
        handle = await queue.enqueue(add_in_a_process, "p")
        async with queue.worker():
            assert await handle.result(30) is True

    assert names() == ["p"]
