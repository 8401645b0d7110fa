"""A folder of an older omniq is upgraded when it is opened: nothing is lost, also after a crash."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from omniq.clock import to_micros
from omniq.gate_rules import Gate, GateState
from omniq.models import DeadLetter, Limit, Progress, Schedule, Task, TaskStatus, WorkerInfo
from omniq.serialization import encode_internal
from omniq.settings import Settings
from omniq.storage.file import FileStorage
from omniq.storage.file.encoding import Kind, frame
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_file import pack
from omniq.storage.row_rules import Row
from omniq.testing.builders import a_result, a_task
from omniq.testing.clock import ManualClock

FAST = Settings(durability="os")
OLD_FOLDERS = (
    *("queue", "results", "dead", "tmp", "corrupt"),
    *("workers", "gates", "unique", "schedules", "paused", "notes"),
)
LIMIT = (Limit(key="k", max_running=1),)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class OldStore:
    """Writes a folder as omniq did before format 2."""

    def __init__(self, folder: Path, clock: ManualClock) -> None:
        self.folder = folder
        self.clock = clock
        self._seq = clock.micros() << 12
        self._encode = FileStorage(folder).serializer.encode_task
        for name in OLD_FOLDERS:
            (folder / name).mkdir(parents=True, mode=0o700)

    def row(self, task: Task, **fields: object) -> dict[str, object]:
        """The fields of a row that older versions had."""
        self._seq += 1
        now = self.clock.micros()
        due = now if task.eta is None else to_micros(task.eta)
        row = Row(
            id=task.id, seq=self._seq, nonce="n", queue=task.queue, priority=task.priority,
            func_path=task.func_path, body=self._encode(task), due=due,
            visible=0 if task.eta is None else due, created_at=now, unique=task.unique,
            result_ttl=3600 * 10**6, gates=_gates(task),
        )  # fmt: skip
        old = {name: getattr(row, name) for name in row.__struct_fields__ if name not in NEW_FIELDS}
        return {**old, **fields}

    def write(self, path: str, kind: Kind, value: object) -> None:
        """Write one record."""
        target = self.folder / path
        target.parent.mkdir(exist_ok=True, mode=0o700)
        target.write_bytes(frame(kind, encode_internal(value)))

    def live(self, name: str, task: Task, *, newest: bytes | None = None, **fields: object) -> None:
        """Write a live task."""
        record = {"row": self.row(task, **fields), "newest": newest}
        self.write(f"queue/{name}", Kind.LIVE, record)

    def shared(self, *tasks: Task) -> None:
        """Write waiting tasks that share a file."""
        records = [
            (task.id, frame(Kind.LIVE, encode_internal({"row": self.row(task)}))) for task in tasks
        ]
        (packed,) = pack("x", records)
        first = self.folder / "queue" / f"{tasks[0].id}.task"
        first.write_bytes(packed.data)
        for task in tasks[1:]:
            os.link(first, self.folder / "queue" / f"{task.id}.task")

    def ended(self, path: str, task: Task, status: TaskStatus, **more: object) -> None:
        """Write the record of an ended task."""
        result = FileStorage(self.folder).serializer.encode_result(a_result(task, 42))
        now = self.clock.micros()
        record = {
            "row": self.row(task, status=status, token=1),
            "finished_at": now,
            "expires_at": now + 3600 * 10**6,
            "result": result,
            **more,
        }
        self.write(path, Kind.ENDED, record)


NEW_FIELDS = {
    *("attached", "turn", "stored_at", "max_crashes", "workflow", "format"),
}


def _gates(task: Task) -> tuple[Gate, ...]:
    return tuple(Gate(f"running:{limit.key}", "running", 1) for limit in task.limits)


def build(folder: Path, clock: ManualClock) -> None:
    """A store with a task in every state."""
    store = OldStore(folder, clock)
    now = clock.micros()
    store.shared(a_task("plain"), a_task("second"), a_task("third"))
    store.live("later.task", a_task("later", eta=clock.now() + timedelta(hours=1)))
    store.live("once.task", a_task("once", unique="key"))
    store.live("every.task", a_task("every", queue="every"), newest=b"newest", repeats=True)
    store.live("in.a.paused.one.task", a_task("in.a.paused.one", queue="held"))
    store.live(f"held.1.W.{now}.running", a_task("held", queue="q"))
    store.live(f"stopping.1.W.{now}.cancelling", a_task("stopping", queue="q"))
    store.live(f"limited.1.W.{now}.running", a_task("limited", limits=LIMIT, queue="g"))
    store.live("blocked.task", a_task("blocked", limits=LIMIT, queue="g"))
    store.ended("results/done.result", a_task("done"), TaskStatus.SUCCESS)
    letter = DeadLetter(
        task_id="lost", func_path="m.f", failure_reason="failed", attempt_count=1,
        first_failure=clock.now(), last_failure=clock.now(), error_details="no",
    )  # fmt: skip
    store.ended("dead/lost.dead", a_task("lost"), TaskStatus.FAILED, letter=letter)
    # Changes and an enqueue that were under way when their processes died.
    store.live("ending.1.N.done", a_task("ending"))
    store.ended("results/ending.1.N.part", a_task("ending"), TaskStatus.SUCCESS)
    store.live("again.1.N.done", a_task("again"))
    again = {"row": store.row(a_task("again", queue="again"), token=1, settled=1)}
    store.write("results/again.1.N.part", Kind.LIVE, again)
    store.write("tmp/intent.task.tmp", Kind.LIVE, {"row": store.row(a_task("intent"))})
    store.write("gates/0a/3", Kind.GATE, ("running:k", GateState(holders=[("limited", 1)])))
    schedule = Schedule(id="daily", task=a_task("s"), interval=5.0, version=7)
    body = FileStorage(folder).serializer.encode_task(a_task("s", args=[1]))
    store.write("schedules/daily/6.N.over", Kind.SCHEDULE, {"schedule": schedule, "body": body})
    store.write("schedules/daily/7.N.part", Kind.SCHEDULE, {"schedule": schedule, "body": body})
    store.write("notes/held/1.checkpoint", Kind.CHECKPOINT, {"saved_at": now, "data": b"step 3"})
    store.write(
        "notes/held/progress", Kind.PROGRESS, Progress(task_id="held", token=1, fraction=0.5)
    )
    (folder / "paused" / "held.paused").write_bytes(b"")
    boot = clock.boot_micros() + 30 * 10**6
    (folder / "workers" / f"W.{_boot(clock)}.{boot}.lease").write_bytes(b"")
    info = WorkerInfo(id="W", host="h", pid=1, started_at=clock.now(), last_heartbeat=clock.now())
    store.write("workers/W.info", Kind.WORKER, info)


def _boot(clock: ManualClock) -> str:
    return hashlib.sha256(clock.boot_id().encode()).hexdigest()[:12]


async def check(folder: Path, clock: ManualClock) -> None:
    """Everything is there, and runs."""
    async with FileStorage(folder, settings=FAST, clock=clock) as storage:
        for task_id in ("done", "ending"):
            result = await storage.get_result(task_id)
            assert result is not None
            assert result.result == 42
        assert [letter.task_id for letter in await storage.list_dead()] == ["lost"]
        assert await storage.load_checkpoint("held") == b"step 3"
        progress = await storage.get_progress("held")
        assert progress is not None
        assert progress.fraction == 0.5
        assert await storage._engine.newest_result("every") == b"newest"
        (schedule,) = await storage.list_schedules()
        assert (schedule.version, schedule.task.args) == (7, (1,))
        assert await storage.paused_queues() == {"held"}
        assert (await storage.gates())["running:k"].holders == [("limited", 1)]
        assert await storage.enqueue(a_task("twice", unique="key")) == "once"
        assert [worker.running for worker in await storage.workers()] == [
            ("held", "limited", "stopping")
        ]
        claimed = await storage.reserve(20)
        assert [task.id for task in claimed if task.queue == "default"] == [
            *("plain", "second", "third", "once", "intent")
        ]
        assert {task.id for task in claimed if task.queue != "default"} == {"every", "again"}
        clock.advance(60)
        await storage.renew()
        given_back = {each.task_id: each.status for each in await storage.give_back_abandoned()}
        assert given_back == {
            "held": TaskStatus.RETRYING,
            "limited": TaskStatus.RETRYING,
            "stopping": TaskStatus.CANCELLED,
        }
        assert await storage.retry_dead("lost")
        for task in await storage.reserve(1, queues=["g"]):
            await storage.mark_done(task.id, a_result(task))
        assert len(await storage.reserve(1, queues=["g"])) == 1
        later = await storage.get_task("later")
        assert later is not None
        assert later.status is TaskStatus.PENDING
    assert not list((folder / "corrupt").iterdir())
    left = {"queue", "unique", "tasks", "parts", "results", "dead", "leases", "tmp", "corrupt"}
    assert set(os.listdir(folder)) == left
    assert (folder / "queue").is_file()


async def test_a_folder_of_an_older_omniq_is_upgraded_when_it_is_opened(tmp_path, clock):
    build(tmp_path, clock)
    await check(tmp_path, clock)


@pytest.mark.parametrize("step", range(1, 120, 4))
async def test_an_upgrade_that_dies_at_any_point_is_continued(step, tmp_path, clock, monkeypatch):
    build(tmp_path, clock)
    left = step
    for name in ("move", "remove_quietly", "link"):
        real = getattr(Disk, name)

        def die_after(disk, *args, real=real):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return real(disk, *args)

        monkeypatch.setattr(Disk, name, die_after)
    try:
        await FileStorage(tmp_path, settings=FAST, clock=clock).open()
    except KeyboardInterrupt:
        pass
    else:
        pytest.skip("the upgrade has fewer steps")
    monkeypatch.undo()
    await check(tmp_path, clock)


async def test_what_an_older_omniq_adds_later_is_moved_by_the_next_recovery(tmp_path, clock):
    async with FileStorage(tmp_path, settings=FAST, clock=clock) as storage:
        (tmp_path / "queue").unlink()
        for name in set(OLD_FOLDERS) - {"results", "dead", "tmp", "corrupt"}:
            (tmp_path / name).mkdir()
        store = OldStore.__new__(OldStore)
        store.folder, store.clock, store._seq = tmp_path, clock, 1
        store._encode = storage.serializer.encode_task
        store.live("a.task", a_task("a"))
        await storage.give_back_abandoned()

        assert [task.id for task in await storage.reserve(5)] == ["a"]
        assert (tmp_path / "queue").is_file()


def start_older_omniq(folder: Path) -> None:
    """Create the missing folders and look at each of them, as the versions before format 2 do."""
    for name in OLD_FOLDERS:
        with suppress(FileExistsError):
            (folder / name).mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            (folder / name).stat()


async def test_an_older_omniq_cannot_be_started_again_beside_the_new_format(tmp_path, clock):
    """Also after one that was running has moved the file `queue` away, as it does with damaged files."""
    build(tmp_path, clock)
    start_older_omniq(tmp_path)
    async with FileStorage(tmp_path, settings=FAST, clock=clock):
        with pytest.raises(OSError, match="unique"):
            start_older_omniq(tmp_path)
        (tmp_path / "queue").rename(tmp_path / "corrupt" / "queue.1")
        for _ in range(2):
            with pytest.raises(OSError, match="unique"):
                start_older_omniq(tmp_path)
    (tmp_path / "corrupt" / "queue.1").unlink()
    await check(tmp_path, clock)
    with pytest.raises(OSError, match="unique"):
        start_older_omniq(tmp_path)
