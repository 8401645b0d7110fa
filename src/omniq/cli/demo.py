"""`omniq demo`: several kinds of tasks on three workers, one of which is killed; no task is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from omniq.cli import demo_tasks, output
from omniq.cli.command import Option
from omniq.cli.queue_session import CommandFailed
from omniq.cli.screen import region
from omniq.clock import SYSTEM_CLOCK
from omniq.models import TaskResult, TaskStatus, WorkerInfo
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.tasks.functions import path_of

_WORKERS = 3
_LEASE = 1.5
_TIMEOUT = 55.0
_STOP_SECONDS = 5.0
_BAR = 40
_DOCUMENT = "report.pdf"
_LIVE = (TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.RETRYING)

_MIX = (
    ("fetch", "async, on the event loop", 300),
    ("thumbnail", "in a thread; every fifth fails at first", 100),
    ("encode", "in a child process", 12),
    ("invoice", "fails for good: a dead letter", 2),
    ("publish", "four durable steps", 1),
)

_Workers = dict[int, subprocess.Popen[bytes]]


def demo(
    keep: Annotated[
        Path | None,
        Option("--keep", metavar="FOLDER", help="Keep the storage in this new folder."),
    ] = None,
) -> None:
    """Show omniq at work in less than a minute, without a server; one worker is killed.

    The demo uses a temporary folder, which is deleted at the end.
    """
    if keep is not None:
        try:
            keep.mkdir(parents=True)
        except OSError as error:
            raise CommandFailed(f"--keep {keep}: {error.strerror}") from error
        asyncio.run(_Demo(keep.resolve()).run())
        url = f"sqlite:///{keep.resolve()}/demo.db"
        output.print_line("")
        output.print_line("To inspect the storage:")
        for command in ("stats", "tasks list", "dead list", "schedules list"):
            output.print_line(f"  omniq {command} --url {url}")
        return
    with tempfile.TemporaryDirectory(prefix="omniq-demo-") as folder:
        asyncio.run(_Demo(Path(folder)).run())
    output.print_line("")
    output.print_line(
        "Everything was deleted. To keep and inspect the storage: omniq demo --keep ./omniq-demo"
    )


class _Snapshot(msgspec.Struct, frozen=True):
    """What the live view shows at one moment."""

    total: int
    left: int
    by_status: dict[TaskStatus, int]
    workers: Sequence[WorkerInfo]
    steps: Sequence[str]
    killed: str


class _Demo:
    """One run of the demo, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run_log = folder / "runs.log"
        self._url = f"sqlite:///{folder}/demo.db?durability=os"
        self._document_id = ""
        self._killed = ""

    async def run(self) -> None:
        """Run the demo; raises `CommandFailed` if a task was lost."""
        began = SYSTEM_CLOCK.monotonic()
        async with AsyncTaskQueue(self._url) as queue:
            ids = await self._enqueue(queue)
            output.print_line(f"{len(ids)} tasks are stored on disk. Starting {_WORKERS} workers.")
            with self._workers() as workers:
                await self._watch(queue, set(ids), workers)
            results = {task_id: await queue.get_result(task_id) for task_id in ids}
            fired = await queue.list_tasks(func_path=path_of(demo_tasks.heartbeat), limit=1000)
        self._report(ids, results, len(fired), SYSTEM_CLOCK.monotonic() - began)

    async def _enqueue(self, queue: AsyncTaskQueue) -> dict[str, str]:
        """Enqueue all tasks; return their kinds by id."""
        run_log = str(self._run_log)
        kinds: dict[str, str] = {}
        for kind, _, count in _MIX:
            what: list[object] = [_DOCUMENT] if kind == "publish" else list(range(count))
            function = getattr(demo_tasks, kind)
            for handle in await queue.enqueue_many(function, [(run_log, each) for each in what]):
                kinds[handle.id] = kind
        self._document_id = next(task_id for task_id, kind in kinds.items() if kind == "publish")
        await queue.schedules.add("heartbeat", demo_tasks.heartbeat, args=(run_log,), interval=1)
        return kinds

    @contextmanager
    def _workers(self) -> Iterator[_Workers]:
        environ = {name: value for name, value in os.environ.items() if name[:6] != "OMNIQ_"}
        command = [sys.executable, "-m", "omniq", "worker", demo_tasks.__name__, "--url", self._url]
        settings = ["--concurrency", "6", "--lease", str(_LEASE), "--poll-interval", "0.2"]
        with (self._folder / "workers.log").open("ab") as log:
            started = [
                subprocess.Popen(
                    [*command, *settings],
                    cwd=self._folder,
                    env={**environ, "OMNIQ_BASE_RETRY_DELAY": "0.2"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C must reach only the demo, which then stops its workers.
                    start_new_session=True,
                )
                for _ in range(_WORKERS)
            ]
        workers = {worker.pid: worker for worker in started}
        try:
            yield workers
        finally:
            _end(workers.values())

    async def _watch(self, queue: AsyncTaskQueue, ids: set[str], workers: _Workers) -> None:
        deadline = SYSTEM_CLOCK.monotonic() + _TIMEOUT
        with region() as view:
            while SYSTEM_CLOCK.monotonic() < deadline:
                snapshot = await self._take_snapshot(queue, ids)
                view.update([_render(snapshot)])
                if not snapshot.left:
                    return
                if not self._killed:
                    self._kill_publisher(snapshot, workers)
                await SYSTEM_CLOCK.sleep(0.1)
        raise CommandFailed(
            f"the demo did not end within {_TIMEOUT:g} s; try it on an idle machine"
        )

    async def _take_snapshot(self, queue: AsyncTaskQueue, ids: set[str]) -> _Snapshot:
        left = {
            task.id
            for status in _LIVE
            for task in await queue.list_tasks(status=status, limit=1000)
            if task.id in ids
        }
        return _Snapshot(
            total=len(ids),
            left=len(left),
            by_status=(await queue.stats()).by_status,
            workers=await queue.workers(),
            steps=[fields[1] for fields in self._lines() if fields[0] == _DOCUMENT],
            killed=self._killed,
        )

    def _kill_publisher(self, snapshot: _Snapshot, workers: _Workers) -> None:
        """Kill the worker that publishes the document, when it is half-way through its steps."""
        if len(snapshot.steps) <= len(demo_tasks.STEPS) // 2:
            return
        for worker in snapshot.workers:
            if self._document_id in worker.running and worker.pid in workers:
                os.kill(worker.pid, signal.SIGKILL)
                workers.pop(worker.pid).wait()
                self._killed = (
                    f"worker {worker.pid} got SIGKILL in step {len(snapshot.steps)} of {_DOCUMENT}, "
                    f"while it held {len(worker.running)} tasks"
                )
                return

    def _lines(self) -> list[list[str]]:
        if not self._run_log.exists():
            return []
        return [line.split() for line in self._run_log.read_text().splitlines()]

    def _report(
        self,
        kinds: dict[str, str],
        results: dict[str, TaskResult | None],
        fired: int,
        seconds: float,
    ) -> None:
        lost = [task_id for task_id, result in results.items() if not _has_ended(result)]
        rows = [
            _row(kind, how, [results[task_id] for task_id, own in kinds.items() if own == kind])
            for kind, how, _ in _MIX
        ]
        columns = (
            "kind",
            ">enqueued",
            ">succeeded",
            ">in a later run",
            ">dead",
            ">lost",
            "how it runs",
        )
        output.show("", output.Listing(columns, rows))
        steps = Counter(fields[1] for fields in self._lines() if fields[0] == _DOCUMENT)
        counted = ", ".join(f"{step} ×{steps[step]}" for step in demo_tasks.STEPS)
        output.print_line("")
        if not self._killed:
            raise CommandFailed("no worker was killed: this machine is too busy; try again")
        output.print_line(
            f"{self._killed}; the others took over when its lease of {_LEASE:g} s expired."
        )
        output.print_line(
            f"Its steps: {counted}. Steps that were completed before the kill did not run again."
        )
        output.print_line(f"Meanwhile a schedule enqueued a heartbeat every second: {fired}.")
        redone = [step for step in demo_tasks.STEPS if steps[step] > 1]
        if lost or len(steps) < len(demo_tasks.STEPS) or len(redone) > 1:
            raise CommandFailed(f"{len(lost)} tasks lost, steps {counted}: this must not happen")
        output.print_line(f"{len(results)} tasks, 0 lost, {seconds:.1f} s in all.")


def _end(workers: Iterable[subprocess.Popen[bytes]]) -> None:
    """Ask all workers to stop; kill those that do not stop in time."""
    waiting = list(workers)
    for worker in waiting:
        worker.terminate()
    for worker in waiting:
        try:
            worker.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _render(snapshot: _Snapshot) -> output.Renderable:
    done = snapshot.total - snapshot.left
    full = done * _BAR // snapshot.total
    count = output.Text.of(
        output.Text("█" * full, "green"), f"{'░' * (_BAR - full)} {done}/{snapshot.total}"
    )
    states = output.Text.join(
        "   ",
        [
            output.Text.of(output.status_text(status), f" {snapshot.by_status[status]}")
            for status in TaskStatus
        ],
    )
    held = "   ".join(f"{worker.pid} holds {len(worker.running)}" for worker in snapshot.workers)
    return output.key_values(
        [
            ("done", count),
            ("tasks", states),
            ("workers", held),
            (_DOCUMENT, " → ".join(snapshot.steps)),
            ("", output.text(snapshot.killed, "bold red")),
        ]
    )


def _row(kind: str, how: str, results: Sequence[TaskResult | None]) -> tuple[output.Cell, ...]:
    statuses = Counter(result.status for result in results if result is not None)
    later = sum(
        result is not None and result.status is TaskStatus.SUCCESS and result.attempts > 1
        for result in results
    )
    lost = sum(not _has_ended(result) for result in results)
    return (
        kind,
        len(results),
        statuses[TaskStatus.SUCCESS],
        later,
        statuses[TaskStatus.FAILED],
        output.text(lost, "bold red" if lost else "bold green"),
        how,
    )


def _has_ended(result: TaskResult | None) -> bool:
    return result is not None and result.status.is_final
