"""A file that is not a record blocks no task and no call, and is never run."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from omniq.errors import StorageError
from omniq.models import Schedule, Task, TaskResult, TaskStatus
from omniq.settings import Settings
from omniq.storage.file import FileStorage
from omniq.storage.file.encoding import DOCUMENT, FORMAT, LIVE, Kind, Live, frame
from omniq.storage.file.filesystem import FOLDERS
from omniq.storage.row_rules import Row
from omniq.testing.builders import a_result, a_task, an_error, some_tasks
from omniq.testing.clock import ManualClock

WHOLE = LIVE.encode(
    Live(
        Row(id="x", queue="default", priority=9, func_path="m.evil", due=0, visible=0, created_at=0)
    )
)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


CONTENTS = {
    "empty": b"",
    "cut in the header": WHOLE[:9],
    "cut in the payload": WHOLE[:-7],
    "too long": WHOLE + b"more",
    "flipped in the payload": flipped(WHOLE, 30),
    "flipped in the length": flipped(WHOLE, 11),
    "flipped in the checksum": flipped(WHOLE, 13),
    "of a later version": flipped(WHOLE, 4),
    "of another kind": flipped(WHOLE, 5),
    "text": b"not a record at all, but long enough to be one\n" * 3,
    "shared, cut off": frame(Kind.SHARED, b"\nx 0 99\n") + WHOLE[:-7],
    "shared in a shared one": frame(Kind.SHARED, b"\nx 0 99\n") + frame(Kind.SHARED, b"\nx 0 9\n"),
    "of another task": WHOLE.replace(b"\xa1x", b"\xa1y"),
}

NAMES = {
    "tasks": [
        "x.c-1.0.task",
        "y.c-1.0p0.task",
        "r.c-2.1.1.W.5.running",
        "z.c-1.1ac.1.W.5.running",
        "v.c-1.0.task.new",
        "w.c-1.0.task.d-1.old",
        "u2.c-1.0.task.d-2.done",
        "x.dead.d-3.old",
        "d-1.done",
        "d-3.open",
        *(f"{kind}~x.c-1.7.doc" for kind in ("gate", "unique", "checkpoint", "schedule")),
        *(f"{kind}~b.c-1.never.doc" for kind in ("paused_queue", "newest", "progress", "store")),
    ],
    "parts": ["w.d-1.part", "w.d-1.dead", "u2.d-2.part", "d-1.data"],
    "results": ["x.result", "x.1.N.part"],
    "dead": ["x.dead", "x.1.N.part"],
    "tmp": ["x.task.tmp", "x.N.tmp", "N.tasks"],
    "corrupt": ["x", "x.reason"],
    "leases": ["W.0123456789ab.5.5.0.0.lease", "W.info", "W.lease"],
}

ODD_NAMES = [
    b".x.c-1.0.task.swp",
    b"x.c-1.0.task~",
    b".nfs000000000001",
    b"..task",
    b".task",
    b".c-1.0.task",
    b"x y.c-1.0.task",
    b"x\n.c-1.0.task",
    b"\xff\xfe.c-1.0.task",
    "ü.c-1.0.task".encode(),
    b"x.c-1.0." + b"9" * 30 + b".W.5.running",
    b"x.c-1.0.-1.W.5.running",
    b"x.c-1.0.1..5.running",
    b"x.c-1.0.1.W.running",
    b"x.c-1.01.task",
    b"x.c-1.0ca.task",
    b"x.1.done",
    b"x.c-1.0.task.d.e.new",
    b".old",
    b".open",
    b"gate.c-1.never.doc",
    b"Gate~x.c-1.never.doc",
    b"gate~x.c-1.soon.doc",
    b"a" * 240 + b".c-1.0.task",
    b"a" * 129 + b".c-1.0.task",
]


def make_fifo(path: str) -> None:
    os.mkfifo(path)


def make_socket(path: str) -> None:
    # The length of a socket's path is limited; through a file descriptor it is short.
    fd = os.open(os.path.dirname(path), os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{fd}/{os.path.basename(path)}")
    os.close(fd)


def make_link_out(path: str) -> None:
    os.symlink("/etc/passwd", path)


def make_loop(path: str) -> None:
    os.symlink(os.path.basename(path), path)


def make_folder(path: str) -> None:
    os.mkdir(path)
    Path(path, "inside").write_bytes(b"")


SPECIAL: dict[str, Callable[[str], None]] = {
    "fifo": make_fifo,
    "socket": make_socket,
    "link out of the store": make_link_out,
    "link to itself": make_loop,
    "folder": make_folder,
}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def folder(tmp_path, clock):
    """A store that was used, and is not open."""
    async with FileStorage(tmp_path, settings=Settings(durability="os"), clock=clock):
        return tmp_path


async def use(folder: Path, clock: ManualClock) -> list[Task]:
    """Call every method of the store; returns the claimed tasks."""
    async with FileStorage(folder, settings=Settings(durability="os"), clock=clock) as storage:
        await storage.enqueue_many(some_tasks("abc"))
        await storage.enqueue(a_task("u", unique="key"))
        await storage.put_schedule(Schedule(id="daily", task=a_task(), interval=5.0))
        await storage.give_back_abandoned()
        claimed = await storage.reserve(10)
        by_id = {task.id: task for task in claimed}
        await storage.save_checkpoint("a", by_id["a"].token, b"checkpoint")
        await storage.mark_done("a", a_result(by_id["a"]))
        await storage.mark_failed("b", an_error(), will_retry=False)
        await storage.mark_failed("c", an_error(), will_retry=True)
        await storage.reschedule("c", clock.now())
        for read in (storage.stats, storage.workers, storage.list_schedules, storage.gates):
            await read()
        for task_id in ("a", "b", "c", "x"):
            await storage.get_result(task_id)
            await storage.get_dead(task_id)
            await storage.load_checkpoint(task_id)
            await storage.get_progress(task_id)
        listed = await storage.list_tasks()
        assert {"a", "b", "c", "u"} <= {task.id for task in listed}
        assert [letter.task_id for letter in await storage.list_dead()] == ["b"]
        assert await storage.retry_dead("b")
        await storage.purge_expired()
        await storage.purge_results(clock.now())
        await storage.purge_checkpoints(clock.now())
        await storage.give_back_abandoned()
        claimed += await storage.reserve(10)
    return claimed


def path_of(folder: Path, task_id: str) -> Path:
    """The only file of a live task."""
    (path,) = (folder / "tasks").glob(f"{task_id}.*")
    return path


def quarantined(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "corrupt").iterdir())


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.fault("F58")
async def test_bad_records_in_every_folder_are_never_run_and_block_no_task(kind, folder, clock):
    for where, names in NAMES.items():
        for name in names:
            (folder / where / name).write_bytes(CONTENTS[kind])

    claimed = await use(folder, clock)

    assert {task.id for task in claimed} == {"a", "b", "c", "u"}
    assert not (folder / "tasks" / "x.c-1.0.task").exists()


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.fault("F59")
async def test_special_files_block_no_call(kind, folder, clock):
    for where, names in NAMES.items():
        for name in names:
            SPECIAL[kind](str(folder / where / name))

    claimed = await use(folder, clock)

    assert {task.id for task in claimed} == {"a", "b", "c", "u"}
    assert os.stat("/etc/passwd").st_size > 0


@pytest.mark.fault("F59")
async def test_odd_names_are_ignored_in_every_folder(folder, clock):
    for where in (*FOLDERS, "tasks"):
        for name in ODD_NAMES:
            (folder / where / os.fsdecode(name)).write_bytes(WHOLE)

    claimed = await use(folder, clock)

    assert {task.id for task in claimed} == {"a", "b", "c", "u"}


@pytest.mark.fault("F58")
async def test_a_record_of_a_later_format_is_left_alone(folder, clock):
    """A newer omniq has written it; this one must neither run it nor take it for damaged."""
    newer = {
        "tasks/x.c-1.0.task": frame(Kind.LIVE, WHOLE[16:], FORMAT + 1),
        "tasks/y.c-1.1.1.W.5.running": frame(Kind.LIVE, WHOLE[16:], FORMAT + 1),
        "tasks/paused_queue~x.c-1.never.doc": frame(Kind.DOCUMENT, b"", FORMAT + 1),
        "results/x.result": frame(Kind.ENDED, b"", FORMAT + 1),
        "dead/z.dead": frame(Kind.ENDED, b"", FORMAT + 1),
    }
    for path, data in newer.items():
        (folder / path).write_bytes(data)
    async with FileStorage(folder, settings=Settings(durability="os"), clock=clock) as storage:
        await storage.enqueue(a_task("a"))
        await storage.give_back_abandoned()
        assert [task.id for task in await storage.reserve(5)] == ["a"]
        assert [task.id for task in await storage.list_tasks()] == ["a"]
        assert await storage.list_dead() == []
        assert await storage.purge_expired() == 0
        for task_id in ("x", "y", "z"):
            with pytest.raises(StorageError, match="newer omniq"):
                await storage.enqueue(a_task(task_id))

    assert quarantined(folder) == []
    assert all((folder / path).read_bytes() == data for path, data in newer.items())


async def test_a_store_that_needs_a_newer_omniq_is_refused(folder, clock):
    (path,) = (folder / "tasks").glob("store~store.*")
    document = DOCUMENT.decode(path.read_bytes())
    info = msgspec.msgpack.decode(document.data)
    newer = msgspec.msgpack.encode([*info[:2], info[2] + 1, info[3] + 1])
    path.write_bytes(DOCUMENT.encode(msgspec.structs.replace(document, data=newer)))
    with pytest.raises(StorageError, match="newer version of omniq"):
        async with FileStorage(folder, settings=Settings(durability="os"), clock=clock) as storage:
            await storage.enqueue(a_task("a"))


async def test_a_quarantined_file_has_its_path_and_the_reason(folder, clock):
    (folder / "tasks" / "x.c-1.0.task").write_bytes(flipped(WHOLE, 30))

    async with FileStorage(folder, settings=Settings(durability="os"), clock=clock) as storage:
        assert await storage.reserve(1) == []

    record, reason = quarantined(folder)
    assert record.startswith("tasks.x.c-1.0.task.")
    assert (folder / "corrupt" / record).read_bytes() == flipped(WHOLE, 30)
    assert (
        folder / "corrupt" / reason
    ).read_text() == "tasks/x.c-1.0.task: the checksum is wrong\n"


@pytest.mark.parametrize("at", [0, 4, 5, 9, 14, 40])
async def test_a_flipped_bit_in_a_waiting_task_quarantines_it(at, folder, clock):
    async with FileStorage(folder, settings=Settings(durability="os"), clock=clock) as storage:
        for task in some_tasks("ab"):
            await storage.enqueue(task)
        path = path_of(folder, "a")
        path.write_bytes(flipped(path.read_bytes(), at))

        assert [task.id for task in await storage.reserve(5)] == ["b"]
        assert await storage.get_task("a") is None

    assert len(quarantined(folder)) == 2


async def test_a_flipped_bit_in_one_record_of_a_shared_file_quarantines_one_task(folder, clock):
    async with FileStorage(folder, settings=Settings(durability="os"), clock=clock) as storage:
        await storage.enqueue_many(some_tasks("abc"))
        path = path_of(folder, "b")
        data = path.read_bytes()
        assert data == path_of(folder, "a").read_bytes()
        path.write_bytes(flipped(data, len(data) // 2))

        assert [task.id for task in await storage.reserve(5)] == ["a", "c"]

    assert [name.split(".")[1] for name in quarantined(folder)] == ["b", "b"]


@pytest.mark.parametrize("at", [0, 4, 5, 9, 14, 20])
async def test_a_flipped_bit_in_the_header_of_a_shared_file_quarantines_all_its_tasks(
    at, folder, clock
):
    async with FileStorage(folder, settings=Settings(durability="os"), clock=clock) as storage:
        await storage.enqueue_many(some_tasks("abc"))
        await storage.enqueue(a_task("d"))
        path = path_of(folder, "b")
        path.write_bytes(flipped(path.read_bytes(), at))

        assert [task.id for task in await storage.reserve(5)] == ["d"]

    assert len(quarantined(folder)) == 6


@pytest.mark.parametrize(
    "lines", [b"", b"\nx", b"\nx ", b"\nx 0\n", b"\nx a b\n", b"\nx 0 9 9\n", b"\ny 0 9\n"]
)
async def test_a_shared_file_with_bad_positions_is_quarantined(lines, folder, clock):
    (folder / "tasks" / "x.c-1.0.task").write_bytes(frame(Kind.SHARED, lines) + WHOLE)

    async with FileStorage(folder, settings=Settings(durability="os"), clock=clock) as storage:
        assert await storage.reserve(1) == []

    assert len(quarantined(folder)) == 2


async def test_a_flipped_bit_in_a_task_of_a_dead_worker_quarantines_it(folder, clock):
    lost = FileStorage(folder, settings=Settings(durability="os"), clock=clock)
    await lost.open()
    for task in some_tasks("ab"):
        await lost.enqueue(task)
    assert len(await lost.reserve(2)) == 2
    path = path_of(folder, "a")
    path.write_bytes(flipped(path.read_bytes(), 40))
    clock.advance(60)

    async with FileStorage(folder, settings=Settings(durability="os"), clock=clock) as storage:
        given_back = await storage.give_back_abandoned()

    assert [back.task_id for back in given_back] == ["b"]
    assert len(quarantined(folder)) == 2


async def test_a_flipped_bit_in_a_result_quarantines_the_result(folder, clock):
    async with FileStorage(folder, settings=Settings(durability="os"), clock=clock) as storage:
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)
        await storage.mark_done("a", TaskResult(task_id="a", status=TaskStatus.SUCCESS))
        path = folder / "results" / "a.result"
        path.write_bytes(flipped(path.read_bytes(), 40))

        assert await storage.get_result("a") is None
        assert await storage.list_tasks() == []
        assert await storage.enqueue(a_task("a")) == "a"

    assert len(quarantined(folder)) == 2
