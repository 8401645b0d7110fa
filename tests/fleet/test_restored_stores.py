"""A store is put back to an earlier state under living workers: no token is given twice, nothing is stuck."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from omniq import TaskQueue, TaskStatus
from omniq.storage import open_storage
from omniq.storage.incarnation import StoreRecord
from omniq.testing.server_process import children_of
from omniq.testing.server_programs import ServerMissing
from omniq.testing.servers import PostgresServer, RedisServer, Server
from omniq.testing.standby import PostgresPair
from tests.acceptance.command import WorkerCommand, wait_until
from tests.fleet.conftest import StartWorker
from tests.fleet.fleet_tasks import note_token
from tests.fleet.traces import have_run_since, traces

WORKERS = 3
TASKS, NEWER = 600, 60
WIDTH = 4
OPTIONS = ("--concurrency", str(WIDTH), "--poll-interval", "0.2", "--lease", "6")


class Place(ABC):
    """A store that can be copied and put back."""

    url: str

    @abstractmethod
    def copy(self) -> None:
        """Note the state of the store."""

    @abstractmethod
    def put_back(self) -> None:
        """Put the store back to that state."""

    def close(self) -> None:  # noqa: B027 - only those on servers have something to end
        """End what it has started."""


class OnServer(Place):
    """A store on a server, which is killed and started again with older files."""

    def __init__(self, server: Server) -> None:
        self.server = server
        server.start()
        self.url = server.url

    def close(self) -> None:
        self.server.close()

    def put_back(self) -> None:
        self.server.kill()
        self.replace()
        self.server.start()

    @abstractmethod
    def replace(self) -> None:
        """Replace the files of the stopped server."""


class CutLog(OnServer):
    """Redis, whose log is cut short."""

    def __init__(self, folder: Path) -> None:
        super().__init__(RedisServer(durable=True))
        self._log = self.server._folder / "appendonly.aof"

    def copy(self) -> None:
        self._size = self._log.stat().st_size

    def replace(self) -> None:
        with self._log.open("r+b") as log:
            log.truncate(self._size)


class OldSnapshot(OnServer):
    """Redis, started with an older snapshot."""

    def __init__(self, folder: Path) -> None:
        super().__init__(RedisServer())
        self._copy = folder / "copy.rdb"

    def copy(self) -> None:
        import redis

        with closing(redis.Redis.from_url(self.url)) as client:
            client.save()
        shutil.copy(self.server._folder / "dump.rdb", self._copy)

    def replace(self) -> None:
        shutil.copy(self._copy, self.server._folder / "dump.rdb")


class OldData(OnServer):
    """PostgreSQL, with an older data folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(PostgresServer())
        self._copy = folder / "copy"

    def copy(self) -> None:
        self.server.stop()
        self._move(self.server._folder / "data", self._copy)
        self.server.start()

    def replace(self) -> None:
        shutil.rmtree(self.server._folder / "data")
        self._move(self._copy, self.server._folder / "data")

    def _move(self, source: Path, target: Path) -> None:
        # With the owners of the files.
        subprocess.run(["cp", "-a", str(source), str(target)], check=True)


class LaggingStandby(Place):
    """PostgreSQL, whose standby has stopped to follow when it is promoted."""

    def __init__(self, folder: Path) -> None:
        self._pair = PostgresPair().__enter__()
        self.url = self._pair.url

    def close(self) -> None:
        self._pair.close()

    def copy(self) -> None:
        for sql in ("ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()"):
            asyncio.run(self._tell_standby(sql))
        wait_until(
            lambda: not asyncio.run(self._tell_standby("SELECT 1 FROM pg_stat_wal_receiver"))
        )

    async def _tell_standby(self, sql: str) -> list[Any]:
        import asyncpg

        url = (
            f"postgresql://omniq:{self._pair.primary.password}@127.0.0.1:{self._pair.standby.port}"
        )
        connection = await asyncpg.connect(f"{url}/postgres")
        try:
            found: list[Any] = await connection.fetch(sql)
            return found
        finally:
            await connection.close()

    def put_back(self) -> None:
        self._pair.primary.kill()
        self._pair.promote()


class OldDatabase(Place):
    """SQLite, into which an older copy is restored while workers use it. The leases stay."""

    def __init__(self, folder: Path) -> None:
        self._path, self._copy = folder / "tasks.db", folder / "copy.db"
        self.url = f"sqlite:///{self._path}"

    def copy(self) -> None:
        self._restore(self._path, self._copy)

    def put_back(self) -> None:
        self._restore(self._copy, self._path)

    def _restore(self, source: Path, target: Path) -> None:
        with closing(sqlite3.connect(source)) as before, closing(sqlite3.connect(target)) as after:
            before.backup(after)


class OldFolder(Place):
    """A folder of files, put back as `rsync --delete` does it: file by file."""

    def __init__(self, folder: Path) -> None:
        self._root, self._copy = folder / "store", folder / "copy"
        self.url = f"file://{self._root}"

    def copy(self) -> None:
        self._copy_new(self._root, self._copy)

    def put_back(self) -> None:
        for path in self._root.rglob("*"):
            if path.is_file() and not (self._copy / path.relative_to(self._root)).exists():
                path.unlink(missing_ok=True)
        self._copy_new(self._copy, self._root)

    def _copy_new(self, source: Path, target: Path) -> None:
        for path in source.rglob("*"):
            copy = target / path.relative_to(source)
            if path.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
            elif not copy.exists():
                try:
                    data = path.read_bytes()
                except FileNotFoundError:
                    continue
                copy.parent.mkdir(parents=True, exist_ok=True)
                draft = copy.with_name(f".{copy.name}")
                draft.write_bytes(data)
                draft.rename(copy)


PLACES: dict[str, Any] = {
    "redis-log": CutLog,
    "redis-snapshot": OldSnapshot,
    "postgres": OldData,
    "postgres-standby": LaggingStandby,
    "sqlite": OldDatabase,
    "file": OldFolder,
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    try:
        place: Place = PLACES[request.param](tmp_path)
    except ServerMissing as missing:
        pytest.skip(str(missing))
    yield place
    place.close()


async def _record(url: str) -> StoreRecord:
    async with open_storage(url) as storage:
        return await storage.store_record()


def given(folder: Path) -> Counter[tuple[str, str]]:
    """How often each token of each task has started a run."""
    return Counter((each.name, each.what) for each in traces(folder))


def has_stopped(pid: int) -> bool:
    """Whether all threads of the process have stopped."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] in "TXZ" for stat in stats)


@contextmanager
def standing_still(workers: list[WorkerCommand]) -> Iterator[None]:
    """Stop the processes meanwhile: they live on, with all that they remember."""
    pids = [worker.process.pid for worker in workers]
    pids += [child for pid in pids for child in children_of(pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        # A thread first completes its system call: a file that is renamed after its folder was listed is in no copy.
        wait_until(lambda: all(map(has_stopped, pids)))
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.deep
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seconds", [0.7, 2.5])
def test_no_token_is_given_twice_and_nothing_is_stuck(
    place: Place, seconds: float, tmp_path: Path, start_worker: StartWorker
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    with TaskQueue(place.url) as queue:
        calls: list[Any] = [(note_token, (str(folder),), {}) for _ in range(TASKS)]
        ids = [handle.id for handle in queue.enqueue_many(calls)]
    workers = [start_worker(place.url, *OPTIONS, "--log-level", "WARNING") for _ in range(WORKERS)]
    wait_until(lambda: len(given(folder)) > TASKS / 10)
    # A folder is copied file by file. All other copies are made in one step.
    pause = partial(standing_still, workers) if isinstance(place, OldFolder) else nullcontext
    with pause():
        place.copy()
    with TaskQueue(place.url) as queue:
        # Of these the store will know nothing, although workers have run them, or hold them.
        newer = queue.options(priority=9).enqueue_many([(note_token, (str(folder),), {})] * NEWER)
    wait_until(lambda: {handle.id for handle in newer} <= {each.name for each in traces(folder)})
    # A worker that has claimed nothing since the copy has nothing to notice by: see the guide about restoring. These
    # tasks are in the copy, and one more than a worker runs at a time was claimed after it.
    now = time.monotonic_ns()
    wait_until(lambda: have_run_since(folder, workers, now, times=WIDTH + 1))
    time.sleep(seconds)
    with pause():
        place.put_back()
    with TaskQueue(place.url) as queue:
        wait_until(lambda: queue.stats().by_status[TaskStatus.SUCCESS] == TASKS, within=60)
        results = [queue.get_result(task_id) for task_id in ids]
    for worker in workers:
        worker.process.terminate()
    assert [worker.ends() for worker in workers] == [0] * WORKERS

    assert all(result is not None and result.status is TaskStatus.SUCCESS for result in results)
    assert asyncio.run(_record(place.url)).epoch > 0
    assert sum("store.restored" in worker.text for worker in workers) == 1
    twice = {key: count for key, count in given(folder).items() if count > 1}
    assert twice == {}
