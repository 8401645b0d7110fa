"""A folder of files is put back to an earlier state while a process stands still in the middle of a claim."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from omniq.errors import StorageError, StoreWentBack
from omniq.models import Limit
from omniq.outcomes import Succeeded
from omniq.settings import Settings
from omniq.storage.file import FileStorage
from omniq.storage.file.section import FileSection
from omniq.storage.file.wakeups import FolderWatch
from omniq.storage.file.writes import Writes
from omniq.testing.builders import a_member, a_result, some_tasks
from omniq.testing.clock import ManualClock

FAST = Settings(durability="os")
WIDE = (Limit(key="wide", max_running=9),)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(params=[True, False], ids=["watched", "unwatched"])
async def stores(root: Path, request, monkeypatch):
    clock = ManualClock()
    if not request.param:
        monkeypatch.setattr(FolderWatch, "open", classmethod(lambda cls, folder: None))
    async with (
        FileStorage(root, settings=FAST, clock=clock) as storage,
        FileStorage(root, settings=FAST, clock=clock) as another,
    ):
        yield storage, another


def files_of(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def put_back(root: Path, copy: dict[Path, bytes]) -> None:
    for path in files_of(root).keys() - copy.keys():
        path.unlink()
    for path, data in copy.items():
        if not path.exists():
            path.write_bytes(data)


@pytest.mark.parametrize("limits", [(), WIDE], ids=["plain", "limited"])
async def test_a_claim_that_was_under_way_when_the_folder_was_put_back_gives_no_token_twice(
    stores, root, monkeypatch, limits
):
    """It has looked at its newest claim before. The name that it renames is there again."""
    storage, another = stores
    await storage.enqueue_many(some_tasks("abc", limits=limits))
    await storage.renew()
    await another.renew()
    copy = files_of(root)
    (first,) = await storage.reserve(1)
    await storage.record([Succeeded("a", first.token, a_result(first))])
    loop = asyncio.get_running_loop()
    given: list[tuple[str, int]] = []

    def stand_still() -> None:
        """Another owner claims the task that this one is about to claim; then the folder is put back."""
        monkeypatch.undo()
        for task in asyncio.run_coroutine_threadsafe(another.reserve(1), loop).result(30):
            given.append((task.id, task.token))
        put_back(root, copy)

    claim, check = FileSection._claim, Writes._check

    def claim_late(self, claims, **options):
        stand_still()
        return claim(self, claims, **options)

    def check_early(self, write):
        check(self, write)
        stand_still()

    if limits:
        monkeypatch.setattr(Writes, "_check", check_early)
    else:
        monkeypatch.setattr(FileSection, "_claim", claim_late)
    with pytest.raises(StoreWentBack):
        await storage.reserve(1)

    assert given == [("b", 1)]
    again = {task.id: task.token for task in await storage.reserve(5)}
    assert sorted(again) == ["a", "b", "c"]
    assert min(again.values()) > 2**21


async def test_a_held_task_that_another_process_is_writing_is_not_missing(stores, monkeypatch):
    """A write takes the name of each file that it replaces; meanwhile the task has no name."""
    storage, another = stores
    await storage.enqueue_many(some_tasks("ab"))
    await storage.renew()
    (held,) = await storage.reserve(1)
    loop = asyncio.get_running_loop()
    claimed: list[str] = []
    take = Writes._take

    def take_and_stand_still(self, write, each):
        take(self, write, each)
        monkeypatch.setattr(Writes, "_take", take)
        tasks = asyncio.run_coroutine_threadsafe(storage.reserve(1), loop).result(30)
        claimed.extend(task.id for task in tasks)

    monkeypatch.setattr(Writes, "_take", take_and_stand_still)
    waiter = a_member("c", after=(held.id,))
    with suppress(StorageError):
        # The claim may have undone the write, which is made again then.
        await another.enqueue_many([waiter])

    assert claimed == ["b"]
    assert (await storage.store_record()).epoch == 0
