"""Another user of the machine can neither read nor change a store, nor redirect its files."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from omniq.errors import SettingsError, StorageError, StorageRefused
from omniq.models import Schedule
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.storage.base import BaseStorage
from omniq.storage.permissions import store_rules
from omniq.testing.builders import a_result, a_task, an_error

OTHER_UID = 65_534


@pytest.fixture(params=["file", "sqlite"])
def local_url(request, tmp_path):
    tmp_path.chmod(0o755)
    return {
        "file": f"file://{tmp_path}/made/store?durability=os",
        "sqlite": f"sqlite:///{tmp_path}/made/store.db?durability=os",
    }[request.param]


async def do_everything(storage: BaseStorage) -> None:
    await storage.enqueue_many([a_task("a", unique="k"), a_task("b"), a_task("c")])
    held = {task.id: task for task in await storage.reserve(3)}
    await storage.save_checkpoint("a", held["a"].token, b"checkpoint")
    await storage.mark_done("a", a_result(held["a"]))
    await storage.mark_failed("b", an_error(), will_retry=False)
    await storage.put_schedule(Schedule(id="s", task=a_task(), interval=5.0))
    await storage.pause_queue("q")


@pytest.mark.security("S08")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_only_the_owner_can_access_a_store_regardless_of_the_umask(
    local_url, umask, tmp_path
):
    before = os.umask(umask)
    try:
        async with open_storage(local_url) as storage:
            await do_everything(storage)
            modes = {
                path: stat.S_IMODE(path.lstat().st_mode)
                for path in (tmp_path / "made").rglob("*")
                if not path.is_socket()
            }
    finally:
        os.umask(before)

    assert modes
    wrong = {
        str(path): oct(mode)
        for path, mode in modes.items()
        if mode & 0o077 and not _is_beside_the_database(path)
    }
    assert wrong == {}


def _is_beside_the_database(path: Path) -> bool:
    # SQLite gives its logs the mode of the database, which is checked itself.
    return path.name.endswith(("-wal", "-shm")) and stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.security("S08")
async def test_a_store_that_every_user_may_write_to_is_refused(local_url, tmp_path):
    async with open_storage(local_url) as storage:
        await storage.enqueue(a_task("a"))
    place = next((tmp_path / "made").glob("store*"))
    place.chmod(place.stat().st_mode | 0o002)

    with pytest.raises(StorageRefused, match="chmod o-w"):
        async with open_storage(local_url):
            pass

    place.chmod(place.stat().st_mode & ~0o002)
    async with open_storage(local_url) as storage:
        assert await storage.get_task("a") is not None


@pytest.mark.security("S08")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_a_store_of_another_user_is_refused(local_url, tmp_path):
    async with open_storage(local_url) as storage:
        await storage.enqueue(a_task("a"))
    place = next((tmp_path / "made").glob("store*"))
    os.chown(place, 12_345, 12_345)
    # The other user must be able to reach the store, whose folders may allow only root.
    for above in (tmp_path / "made", *tmp_path.parents):
        if above.stat().st_uid == 0 and above not in (Path("/"), Path("/tmp")):
            above.chmod(0o755)

    message = refusal_for_another_user(place)

    assert "belongs to another user (uid 12345)" in message


def refusal_for_another_user(place: Path) -> str:
    """The message that another user of the machine gets for this file or folder."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(OTHER_UID)
        os.setuid(OTHER_UID)
        try:
            store_rules(Settings()).check(os.stat(place), place)
            os.write(writer, b"accepted")
        except StorageRefused as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    message = os.read(reader, 1000).decode()
    os.close(reader)
    return message


@pytest.mark.security("S07")
@pytest.mark.timeout(120)
@pytest.mark.fault("F59")
async def test_links_and_pipes_that_are_planted_in_a_store_hang_and_leak_nothing(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret text")
    store = tmp_path / "store"
    url = f"file://{store}?durability=os"
    async with open_storage(url) as storage:
        await storage.enqueue(a_task("real"))
    for folder in [path for path in store.iterdir() if path.is_dir()]:
        for suffix in (".task", ".result", ".dead", ""):
            (folder / f"link{suffix}").symlink_to(secret)
            os.mkfifo(folder / f"pipe{suffix}")
            os.link(secret, folder / f"hard{suffix}")

    async with open_storage(url) as storage:
        claimed = [task.id for task in await storage.reserve(10)]
        for name in ("link", "pipe", "hard"):
            assert await storage.get_task(name) is None
            assert await storage.get_result(name) is None
        await storage.list_tasks()
        await storage.purge_expired()

    assert claimed == ["real"]
    assert secret.read_text() == "secret text"


@pytest.mark.timeout(120)
@pytest.mark.security("S07")
@pytest.mark.parametrize("times", [100, pytest.param(10_000, marks=pytest.mark.deep)])
async def test_files_that_are_swapped_for_links_while_they_are_read_are_not_followed(
    times, tmp_path
):
    """One thread swaps a record for a link and back as fast as it can; no read follows the link."""
    secret = tmp_path / "secret"
    secret.write_text("secret text")
    store = tmp_path / "store"
    url = f"file://{store}?durability=os"
    async with open_storage(url) as storage:
        await storage.enqueue(a_task("real"))
        (task,) = await storage.reserve(1)
        await storage.mark_done("real", a_result(task, "value"))
        record = store / "results" / "real.result"
        swaps = await _read_while_swapped(storage, record, record.read_bytes(), secret, times)

    assert swaps >= times
    assert secret.read_text() == "secret text"
    assert secret.stat().st_nlink == 1


async def _read_while_swapped(
    storage: BaseStorage, record: Path, whole: bytes, secret: Path, times: int
) -> int:
    aside = record.with_suffix(".aside")
    swaps, over = 0, threading.Event()

    def swap() -> None:
        nonlocal swaps
        while not over.is_set():
            for make in (lambda: aside.symlink_to(secret), lambda: aside.write_bytes(whole)):
                make()
                os.replace(aside, record)
                swaps += 1

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        while swaps < times:
            result = await storage.get_result("real")
            assert result is None or result.result == "value"
    finally:
        over.set()
        thread.join()
    return swaps


@pytest.mark.security("S07")
async def test_a_store_whose_folder_is_a_link_stays_inside_its_target(tmp_path):
    """A folder inside of the store that is swapped for a link is set aside, not followed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    store = tmp_path / "store"
    url = f"file://{store}?durability=os"
    async with open_storage(url):
        pass
    for folder in ("corrupt", "tmp"):
        (store / folder).rmdir()
        (store / folder).symlink_to(elsewhere)

    try:
        async with open_storage(url) as storage:
            await storage.enqueue(a_task("a"))
    except StorageError:
        pass
    assert list(elsewhere.iterdir()) == []


@pytest.mark.security("S27")
@pytest.mark.parametrize("name", ["omniq.toml", "pyproject.toml"])
def test_settings_that_every_user_may_change_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = {"omniq.toml": "lease = 7\n", "pyproject.toml": "[tool.omniq]\nlease = 7\n"}[name]
    path = tmp_path / name
    path.write_text(text)
    path.chmod(0o666)
    with pytest.raises(SettingsError, match=f"chmod g?o-w .*{name}"):
        Settings.load()

    path.chmod(0o644)
    assert Settings.load().lease == 7
