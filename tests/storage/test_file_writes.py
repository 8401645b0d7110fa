"""How the file backend writes: each file elsewhere first, then renamed, and never under a lock."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from omniq.outcomes import Failed, Retried
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.storage.file import FileStorage
from omniq.storage.sqlite import SQLiteStorage
from omniq.testing.builders import a_result, a_task, an_error, some_tasks
from omniq.testing.clock import ManualClock

_WATCHED = {"open", "os.rename", "os.link", "fcntl.fcntl", "fcntl.flock", "fcntl.lockf"}
_recording: list[tuple[str, tuple[Any, ...]]] | None = None


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if _recording is not None and event in _WATCHED:
        _recording.append((event, arguments))


# An audit hook cannot be removed; this one records only while a test wants it to.
sys.addaudithook(_record)


class Calls:
    """The system calls on files that this process made."""

    def __init__(self, events: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._events = events

    def created(self) -> set[str]:
        """The paths of the files that were created by opening them."""
        return {
            str(path)
            for name, (path, *_, flags) in self._named("open")
            if flags & os.O_CREAT and isinstance(path, str)
        }

    def renamed(self) -> dict[str, str]:
        """Each new name, with the name that the file had before."""
        moves = (*self._named("os.rename"), *self._named("os.link"))
        return {str(target): str(source) for _, (source, target, *_) in moves}

    def locks(self) -> list[str]:
        return [name for name, _ in self._events if name.startswith("fcntl.")]

    def _named(self, name: str) -> list[tuple[str, tuple[Any, ...]]]:
        return [event for event in self._events if event[0] == name]


@contextmanager
def recorded_calls() -> Iterator[Calls]:
    global _recording
    _recording = []
    try:
        yield Calls(_recording)
    finally:
        _recording = None


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["os", "power"])
async def storage(request, tmp_path, clock):
    settings = Settings(durability=request.param)
    async with FileStorage(tmp_path / "tasks", settings=settings, clock=clock) as storage:
        yield storage


@pytest.mark.parametrize("ids", ["a", "abc"], ids=["one task", "a batch"])
async def test_a_task_is_written_to_a_temporary_file_and_renamed_into_the_queue(storage, ids):
    with recorded_calls() as calls:
        await storage.enqueue_many(some_tasks(ids))

    # Such names are never read: the records are complete before the rename to the final name.
    assert {path for path in calls.created() if not path.endswith((".new", ".open"))} == set()
    renamed = calls.renamed()
    for task_id in ids:
        (path,) = [each for each in renamed if re.fullmatch(rf"{task_id}\..*\.task", each)]
        assert renamed[path] == f"{path}.new"


async def test_an_outcome_is_written_to_a_temporary_file_and_renamed(storage, clock):
    await storage.enqueue_many(some_tasks("abc"))
    done, failed, retried = await storage.reserve(3)
    with recorded_calls() as calls:
        await storage.mark_done(done.id, a_result(done))
        await storage.record([Failed(failed.id, failed.token, an_error())])
        later = clock.now() + timedelta(hours=1)
        await storage.record([Retried(retried.id, retried.token, an_error(), later)])

    assert {path for path in calls.created() if not path.endswith((".part", ".dead"))} == set()
    renamed = calls.renamed()
    (waiting,) = [path for path in renamed if path.endswith(".task")]
    assert waiting.startswith(f"{retried.id}.")
    for path in (f"{done.id}.result", f"{failed.id}.dead", waiting):
        assert renamed[path].endswith((".part", ".dead"))


async def test_no_lock_is_taken_and_no_lock_file_is_made(storage, tmp_path, clock):
    with recorded_calls() as calls:
        await storage.enqueue_many(some_tasks("abc"))
        async with FileStorage(tmp_path / "tasks", settings=Settings(), clock=clock) as another:
            for task in (*await storage.reserve(1), *await another.reserve(1)):
                owner = storage if task.owner == storage.owner else another
                await owner.mark_done(task.id, a_result(task))
            assert await another.dequeue(clock.now()) is not None
            await another.renew()

    endings = {path.rpartition(".")[2] for path in (*calls.created(), *calls.renamed())}
    assert calls.locks() == []
    assert endings == {
        *("task", "running", "new", "open", "done", "result", "part"),
        *("lease", "fenced", "info", "tmp", "tmpx"),
    }


async def test_the_settings_name_the_folder(tmp_path):
    settings = Settings(url=f"file:{tmp_path}/tasks", durability="os")
    async with open_storage(settings=settings) as storage:
        assert isinstance(storage, FileStorage)
        await storage.enqueue(a_task("a"))

    assert list((tmp_path / "tasks" / "tasks").glob("a.*.task"))


async def test_a_url_without_a_folder_is_the_base_folder(tmp_path):
    settings = Settings(url="file:", base_dir=tmp_path / "base", durability="os")
    async with open_storage(settings=settings) as storage:
        assert isinstance(storage, FileStorage)
        await storage.enqueue(a_task("a"))

    assert list((tmp_path / "base" / "tasks").glob("a.*.task"))


async def test_without_a_url_the_default_storage_is_in_the_base_folder(tmp_path):
    settings = Settings(base_dir=tmp_path / "base", durability="os")
    async with open_storage(settings=settings) as storage:
        assert isinstance(storage, SQLiteStorage)
        await storage.enqueue(a_task("a"))

    assert (tmp_path / "base" / "omniq.db").is_file()
