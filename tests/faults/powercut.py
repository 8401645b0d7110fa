"""Cut the power of a disk repeatedly while omniq writes to it, and count what was lost.

    python -m tests.faults.powercut --backend both --cuts 200

Needs root, because it mounts a file system; without root it says so and exits 0. Each cut stops an
ext4 file system while the writers work (`disk.py`), mounts it again, and audits the store against
the writers' log of acknowledged changes (`history.py`, `audit.py`). In half of the cuts another
process forces the journal to the disk repeatedly, so that the cut also produces states in which a
rename is on the disk and the data that it should follow is not.

The seed decides what the writers do and when the cut comes, but not how far they are by then: two
runs with the same seed are similar, not equal.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NoReturn

from omniq.models import Task
from omniq.outcomes import Failed, Outcome, Retried, Succeeded
from omniq.storage import open_storage
from omniq.storage.base import BaseStorage
from tests.faults.audit import Report, audit
from tests.faults.disk import Disk, Unavailable, has_ended, kill, spawn
from tests.faults.history import History, Log, new_error, new_result, new_task, payload

CUTS_PER_STORE = 8
"""How many cuts one store gets: recovery must also work after an earlier recovery."""

AUDIT_TIMEOUT = 60.0
SHOWN = 20


@dataclass
class Totals:
    """The results of all cuts of one backend."""

    cuts: int = 0
    acknowledged: int = 0
    quarantined: int = 0
    lost: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, torn or broken."""
        return not (self.lost or self.torn or self.broken)

    def __str__(self) -> str:
        return (
            f"cuts {self.cuts}, acknowledged {self.acknowledged}, lost {len(self.lost)}, "
            f"torn {len(self.torn)}, broken {len(self.broken)}, quarantined {self.quarantined}, "
            f"{self.seconds:.0f} s"
        )


def main() -> int:
    """Run with the options of the command line and return the exit status."""
    options = _parse()
    # Ctrl-C and SIGTERM must unmount as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for backend in ("file", "sqlite"):
        # Import here, not in every fork.
        importlib.import_module(f"omniq.storage.{backend}")
    print(f"seed {options.seed}", flush=True)
    rng = random.Random(options.seed)
    try:
        with Disk() as disk:
            if options.control:
                return _run_control(disk, options.cuts, rng)
            return _run_backends(disk, options, rng)
    except Unavailable as reason:
        print(f"skipped: {reason}")
        return 0
    except KeyboardInterrupt:
        print("interrupted")
        return 130


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="powercut", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=("file", "sqlite", "both"), default="both")
    parser.add_argument("--cuts", type=int, default=200, help="cuts for each backend")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument(
        "--durability",
        choices=("power", "os"),
        default="power",
        help="os: loses what was written last, by design; reported, not failed",
    )
    parser.add_argument("--keep", type=Path, help="copy a store that failed, and its log, to here")
    parser.add_argument(
        "--control",
        action="store_true",
        help="no omniq: plain files, which must lose without fsync and must not with it",
    )
    return parser.parse_args()


def _run_backends(disk: Disk, options: argparse.Namespace, rng: random.Random) -> int:
    backends = ("file", "sqlite") if options.backend == "both" else (options.backend,)
    failed = False
    for backend in backends:
        series = Series(disk, backend, options.durability, rng, options.keep)
        totals = series.run(options.cuts)
        print(f"{backend} durability={options.durability}: {totals}", flush=True)
        for line in (totals.lost + totals.torn + totals.broken)[:SHOWN]:
            print(f"  {line}")
        failed |= not totals.is_good
    if failed and options.durability == "os":
        print("durability=os does not promise to survive a power cut: reported, not failed")
        return 0
    return int(failed)


class Series:
    """Many cuts of one backend on one disk."""

    def __init__(
        self, disk: Disk, backend: str, durability: str, rng: random.Random, keep: Path | None
    ) -> None:
        self._disk = disk
        self._backend = backend
        self._durability = durability
        self._rng = rng
        self._keep = keep
        self._totals = Totals()
        self._quarantine: set[Path] = set()
        self._cut_at: dict[str, int] = {}

    def run(self, cuts: int) -> Totals:
        """Cut that many times and return the results."""
        began = time.monotonic()
        for number in range(cuts):
            if number % CUTS_PER_STORE == 0:
                self._new_store(number)
            self._cut_once(number)
            _show_progress(self._backend, number + 1, cuts, len(self._totals.lost))
        self._totals.seconds = time.monotonic() - began
        return self._totals

    def _new_store(self, number: int) -> None:
        for folder in (self._disk.root, self._disk.scratch):
            for old in folder.glob("store-*"):
                shutil.rmtree(old)
        self._folder = self._disk.root / f"store-{number}"
        self._logs = self._disk.scratch / f"store-{number}"
        self._folder.mkdir()
        self._logs.mkdir()
        # The folder belongs to the user; the test is about what omniq does in it.
        os.sync()

    @property
    def _url(self) -> str:
        options = f"?durability={self._durability}"
        if self._backend == "file":
            return f"file://{self._folder / 'tasks'}{options}"
        return f"sqlite:///{self._folder / 'tasks.db'}{options}"

    def _cut_once(self, number: int) -> None:
        before = self._history().acknowledged
        logs = [self._logs / f"{number}-{w}.log" for w in range(self._rng.randint(1, 3))]
        writers = [
            spawn(partial(write, self._url, log, log.stem, self._rng.random())) for log in logs
        ]
        others = []
        if self._rng.random() < 0.5:
            others.append(spawn(partial(force_journal, self._folder / "noise", self._rng.random())))
        self._wait_until_the_cut(before)
        early = any(has_ended(pid) for pid in writers)
        # The kernel may let an unfinished sync return as if it had succeeded, and a writer may log
        # that a moment later. With the power off, no process could log anything.
        self._cut_at |= dict.fromkeys((log.stem for log in logs), time.monotonic_ns())
        self._disk.cut()
        for pid in (*writers, *others):
            kill(pid)
        self._disk.restart()
        history = self._history()
        self._totals.cuts += 1
        self._totals.acknowledged += history.acknowledged - before
        report = self._audit(number, history)
        if early:
            report.broken.append(f"a writer ended before the cut: {history.errors}")
        self._add(number, report)

    def _wait_until_the_cut(self, acknowledged: int) -> None:
        """Wait: mostly until the writers have had replies, sometimes while they open the store."""
        if self._rng.random() < 0.15:
            time.sleep(self._rng.uniform(0, 0.04))
            return
        deadline = time.monotonic() + 30
        # On a busy machine a writer may need seconds for its first reply.
        while self._history().acknowledged == acknowledged and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(self._rng.uniform(0, 0.08))

    def _audit(self, number: int, history: History) -> Report:
        saved = self._logs / "report"
        saved.unlink(missing_ok=True)
        if self._keep is not None:
            _copy(self._folder, self._keep / "store")
            _copy(self._logs, self._keep / "logs")
        pid = spawn(partial(check, self._url, history, self._logs / f"{number}-a.log", saved))
        deadline = time.monotonic() + AUDIT_TIMEOUT
        while not has_ended(pid) and time.monotonic() < deadline:
            time.sleep(0.001)
        kill(pid)
        report = Report.load(saved)
        if self._backend == "file":
            self._check_quarantine(history, report)
        if self._keep is not None and not report.is_good:
            (self._keep / "store").rename(self._keep / f"store-{number}")
            (self._keep / "logs").rename(self._keep / f"logs-{number}")
        return report

    def _check_quarantine(self, history: History, report: Report) -> None:
        """Report quarantined records that the store had acknowledged."""
        acknowledged = {i for i, known in history.tasks.items() if known.is_enqueued}
        new = set(self._folder.glob("**/corrupt/*")) - self._quarantine
        for path in new:
            report.torn.extend(
                f"{task_id}: acknowledged, and in quarantine as {path.name}"
                for task_id in acknowledged
                if path.name.startswith(f"{task_id}.")
            )
        report.quarantined = len(new)
        self._quarantine |= new

    def _history(self) -> History:
        history = History()
        for log in sorted(self._logs.glob("*.log"), key=lambda path: path.stat().st_mtime_ns):
            history.add(log, until=self._cut_at.get(log.stem))
        return history

    def _add(self, number: int, report: Report) -> None:
        totals = self._totals
        where = f"{self._folder.name}, cut {number}: "
        totals.lost.extend(where + text for text in report.lost)
        totals.torn.extend(where + text for text in report.torn)
        totals.broken.extend(where + text for text in report.broken)
        totals.quarantined += report.quarantined
        if not report.is_good:
            # A lost task would be counted again after every further cut.
            self._new_store(number + 1)


def write(url: str, path: Path, label: str, seed: float) -> None:
    """Be a writer: use the store at random until the process is killed."""
    try:
        asyncio.run(_write(url, path, label, random.Random(seed)))
    except Exception as error:
        # After the cut every call fails; the parent knows whether this was before the cut.
        Log(path).note(f"{type(error).__name__}: {error}", "write")


async def _write(url: str, path: Path, label: str, rng: random.Random) -> None:
    async with open_storage(url) as storage:
        log = Log(path)
        # Several at once, so that the batches that form during a write are cut too.
        ids = (f"{label}-{number}" for number in itertools.count())
        lanes = rng.randint(1, 3)
        await asyncio.gather(*(_use_at_random(storage, log, ids, rng) for _ in range(lanes)))


async def _use_at_random(
    storage: BaseStorage, log: Log, ids: Iterator[str], rng: random.Random
) -> NoReturn:
    while True:
        match rng.randrange(5):
            case 0 | 1:
                task = new_task(next(ids))
                await log.call("enqueue", [task.id], storage.enqueue(task))
            case 2:
                tasks = [new_task(next(ids)) for _ in range(rng.randint(2, 20))]
                await log.call("enqueue", [t.id for t in tasks], storage.enqueue_many(tasks))
            case _:
                claimed = await log.claim(storage.reserve(rng.randint(1, 12)))
                if rng.random() < 0.5:
                    await _finish_together(storage, log, claimed, rng)
                    continue
                for task in claimed:
                    await _finish_at_random(storage, log, task.id, rng)


async def _finish_together(
    storage: BaseStorage, log: Log, tasks: Sequence[Task], rng: random.Random
) -> None:
    outcomes: list[tuple[str, Outcome]] = []
    for task in tasks:
        error = new_error(task.id)
        choices: list[tuple[str, Outcome]] = [
            ("mark_done", Succeeded(task.id, task.token, new_result(task.id))),
            ("mark_failed", Failed(task.id, task.token, error)),
            ("mark_retry", Retried(task.id, task.token, error, eta=datetime.now(UTC))),
        ]
        outcomes.append(rng.choice(choices))
    for verb, outcome in outcomes:
        log.note("try", verb, [outcome.task_id])
    recorded = await storage.record([outcome for _, outcome in outcomes])
    for (verb, outcome), is_recorded in zip(outcomes, recorded, strict=True):
        if is_recorded:
            log.note("ok", verb, [outcome.task_id])


async def _finish_at_random(
    storage: BaseStorage, log: Log, task_id: str, rng: random.Random
) -> None:
    match rng.randrange(8):
        case 0:
            pass  # stays claimed: the cut finds a running task
        case 1:
            act = storage.mark_failed(task_id, new_error(task_id), will_retry=False)
            await log.call("mark_failed", [task_id], act)
        case 2:
            act = storage.mark_failed(task_id, new_error(task_id), will_retry=True)
            await log.call("mark_retry", [task_id], act)
            now = datetime.now(UTC)
            await log.call("reschedule", [task_id], storage.reschedule(task_id, now))
        case _:
            act = storage.mark_done(task_id, new_result(task_id))
            await log.call("mark_done", [task_id], act)


def force_journal(path: Path, seed: float) -> None:
    """Force the journal to the disk at random times, as the fsync of any other process does.

    Renames are then on the disk while the data of the renamed files may not be.
    """
    rng = random.Random(seed)
    with suppress(OSError):  # the cut
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        while True:
            time.sleep(rng.uniform(0, 0.002))
            os.pwrite(file, b"noise", 0)
            os.fsync(file)


def check(url: str, history: History, log: Path, saved: Path) -> None:
    """Be the first process after the reboot: audit the store and save the report."""
    asyncio.run(audit(url, history, Log(log))).save(saved)


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)


def _run_control(disk: Disk, cuts: int, rng: random.Random) -> int:
    """Show that the harness reports a loss where there must be one, and none elsewhere."""
    verdicts = []
    for is_synced in (False, True):
        acknowledged = lost = torn = 0
        for number in range(cuts):
            folder = disk.root / f"control-{number}"
            folder.mkdir()
            os.sync()
            log = disk.scratch / "control.log"
            log.unlink(missing_ok=True)
            pid = spawn(partial(write_plain_files, folder, log, is_synced))
            time.sleep(rng.uniform(0.005, 0.05))
            cut_at = time.monotonic_ns()
            disk.cut()
            kill(pid)
            disk.restart()
            lines = log.read_text().splitlines() if log.exists() else []
            names = [
                name for name, _, at in (line.partition(" ") for line in lines) if int(at) < cut_at
            ]
            acknowledged += len(names)
            lost += sum(not (folder / name).exists() for name in names)
            torn += sum(path.read_text() != payload(path.name) for path in folder.glob("task-*"))
            shutil.rmtree(folder)
        kind = "with fsync" if is_synced else "without fsync"
        print(
            f"plain files {kind}: cuts {cuts}, acknowledged {acknowledged}, lost {lost}, torn {torn}"
        )
        verdicts.append((lost + torn == 0) if is_synced else (lost > 0))
    if all(verdicts):
        print("control passed: the harness reports real losses and no others")
        return 0
    print("control FAILED: on this machine the harness proves nothing")
    return 1


def write_plain_files(folder: Path, log: Path, is_synced: bool) -> None:
    """Write one file for each task, with or without syncs, until the cut."""
    acknowledged = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with suppress(OSError):
        for number in itertools.count():
            _write_plain_file(folder, f"task-{number}", is_synced)
            os.write(acknowledged, f"task-{number} {time.monotonic_ns()}\n".encode())


def _write_plain_file(folder: Path, name: str, is_synced: bool) -> None:
    temporary = folder / f"new-{name}"
    with temporary.open("x") as file:
        file.write(payload(name))
        file.flush()
        if is_synced:
            os.fsync(file.fileno())
    temporary.rename(folder / name)
    if is_synced:
        parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def _show_progress(backend: str, number: int, cuts: int, lost: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if number == cuts else ""
        print(f"\r{backend}: cut {number} of {cuts}, lost {lost}", end=end, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
