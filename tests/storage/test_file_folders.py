"""The folders of a file store: each is opened once, links are refused, and no swap leads elsewhere."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest

from omniq.errors import StorageError, StorageRefused
from omniq.outcomes import Failed
from omniq.settings import Settings
from omniq.storage.file import FileStorage
from omniq.storage.file.filesystem import FOLDERS
from omniq.testing.builders import a_result, a_task, an_error, some_tasks

FAST = Settings(durability="os")


async def use(storage: FileStorage) -> None:
    """Write to every folder but `corrupt`."""
    await storage.enqueue_many(some_tasks("abc"))
    done, failed, _ = await storage.reserve(3)
    await storage.mark_done(done.id, a_result(done))
    await storage.record([Failed(failed.id, failed.token, an_error())])
    await storage.enqueue(a_task("d"))
    await storage.purge_expired()


def exchange(one: Path, another: Path) -> None:
    """Give each of two paths the name of the other, in one step."""
    libc, here, exchange_both = ctypes.CDLL(None), -100, 2
    libc.renameat2(here, os.fsencode(one), here, os.fsencode(another), exchange_both)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", FOLDERS)
async def test_a_store_with_a_link_in_place_of_a_folder_is_refused(name, tmp_path):
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    async with FileStorage(root, settings=FAST) as storage:
        await use(storage)
    (root / name).rename(elsewhere)
    before = files_in(elsewhere)
    (root / name).symlink_to(elsewhere)

    with pytest.raises(StorageRefused, match=f"{name} is not a folder.*follows no links"):
        await FileStorage(root, settings=FAST).open()
    assert files_in(elsewhere) == before

    (root / name).unlink()
    elsewhere.rename(root / name)
    async with FileStorage(root, settings=FAST) as storage:
        assert [letter.task_id for letter in await storage.list_dead()] == ["b"]


@pytest.mark.parametrize("name", FOLDERS)
async def test_a_folder_that_is_swapped_for_a_link_while_it_is_open_is_not_left(name, tmp_path):
    root, aside, elsewhere = tmp_path / "store", tmp_path / "aside", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    async with FileStorage(root, settings=FAST) as storage:
        await storage.renew()
        (root / name).rename(aside)
        (root / name).symlink_to(elsewhere)
        await use(storage)
        with pytest.raises(StorageError, match=f"{name} was moved or replaced"):
            await storage.renew()
        with pytest.raises(StorageError, match=f"{name} was moved or replaced"):
            await storage.give_back_abandoned()

    assert files_in(elsewhere) == {}
    (root / name).unlink()
    aside.rename(root / name)
    async with FileStorage(root, settings=FAST) as storage:
        assert [letter.task_id for letter in await storage.list_dead()] == ["b"]


async def test_a_store_that_is_replaced_as_a_whole_is_noticed(tmp_path):
    root = tmp_path / "store"
    async with FileStorage(root, settings=FAST) as storage:
        await storage.renew()
        root.rename(tmp_path / "aside")
        root.mkdir(mode=0o700)
        with pytest.raises(StorageError, match="was moved or replaced"):
            await storage.renew()


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_heartbeat_that_starts_after_the_store_was_moved_away_makes_no_other(
    is_replaced, tmp_path
):
    root = tmp_path / "store"
    async with FileStorage(root, settings=FAST) as storage:
        await storage.renew()
        root.rename(tmp_path / "aside")
        if is_replaced:
            root.mkdir(mode=0o700)
        with pytest.raises(StorageError, match="was moved or replaced"):
            await storage.sibling().open()

    assert root.exists() == is_replaced
    assert not is_replaced or list(root.iterdir()) == []


@pytest.mark.parametrize("name", ["tasks", "results", "leases"])
@pytest.mark.parametrize("times", [100, pytest.param(5_000, marks=pytest.mark.deep)])
async def test_folders_that_are_swapped_for_links_while_stores_are_opened_are_not_followed(
    name, times, tmp_path
):
    """One thread swaps the folder for a link and back as fast as it can."""
    root, link, elsewhere = tmp_path / "store", tmp_path / "link", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    async with FileStorage(root, settings=FAST):
        pass
    link.symlink_to(elsewhere)
    is_over, swaps = threading.Event(), 0

    def swap() -> None:
        nonlocal swaps
        while not is_over.is_set():
            exchange(link, root / name)
            swaps += 1

    thread = threading.Thread(target=swap)
    thread.start()
    refused = 0
    try:
        while swaps < times:
            try:
                async with FileStorage(root, settings=FAST) as storage:
                    await storage.enqueue(a_task())
                    await storage.renew()
            except StorageError:
                refused += 1
    finally:
        is_over.set()
        thread.join()

    assert files_in(elsewhere) == {}
