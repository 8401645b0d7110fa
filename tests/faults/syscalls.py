"""Make each system call of the file backend fail once, or kill the process there; audit the store.

    python -m tests.faults.syscalls
    python -m tests.faults.syscalls --only fsync:EIO:3      # one point, with its trace

A child opens a store in a fresh folder and uses it: enqueue, a batch, claims, a success, a retry, a
final failure. It waits until strace is attached, so that no call of Python's start is counted.
A first run lists the calls that touch the store; then every one of them is a point at which a
separate run fails (EIO, ENOSPC) or dies (SIGKILL). The child repeats a call that failed, once: the
fault is over by then, so the repeated call must succeed. Then another process audits the store.

Needs strace and the right to trace a child; without them it says so and exits 0.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from omniq.errors import DuplicateTask, OmniqError
from omniq.models import Task
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.storage.base import BaseStorage
from tests.faults.audit import Report, audit
from tests.faults.disk import has_ended, kill, spawn
from tests.faults.history import History, Log, new_error, new_result, new_task

T = TypeVar("T")

SYNCS = ("fsync", "fdatasync", "syncfs")
PUBLISHING = ("rename", "renameat", "renameat2", "link", "linkat")
CHANGES = (
    *("write", "pwrite64", "writev", "ftruncate", "fallocate"),
    *PUBLISHING,
    *("openat", "mkdir", "mkdirat"),
)
REMOVALS = ("unlink", "unlinkat", "rmdir")
READS = ("read", "pread64", "getdents64")
LOGGING = ("pwritev", "pwritev2")
"""How the child writes its log: traced, to see when calls were acknowledged; never made to fail."""

TRACED = (*SYNCS, *CHANGES, *REMOVALS, *READS, *LOGGING)

FAULTS = ("EIO", "ENOSPC", "SIGKILL")
MORE_FAULTS = ("EINTR", "EDQUOT", "EACCES", "EMFILE")
RUN_TIMEOUT = 30.0
SHARDS = 2
TRIES = 3
_ALLOW_ANY_TRACER = (0x59616D61, ctypes.c_ulong(-1))
_CALL = re.compile(r"^(\d+) +(\w+)\(")


@dataclass(frozen=True, order=True)
class Point:
    """The `number`-th time that a thread of the child makes this call, and what happens then."""

    syscall: str
    fault: str
    number: int

    def __str__(self) -> str:
        return f"{self.syscall}:{self.fault}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """Return the point that `str` has written as this text."""
        syscall, fault, number = text.split(":")
        return cls(syscall, fault, int(number))

    @property
    def injection(self) -> str:
        """The fault as an option of strace."""
        kind = "signal" if self.fault.startswith("SIG") else "error"
        return f"inject={self.syscall}:{kind}={self.fault}:when={self.number}"


@dataclass
class Verdict:
    """The result of one run. `was_hit` is false if the fault did not concern the store."""

    point: str
    was_hit: bool
    problems: list[str] = field(default_factory=list)


def main() -> int:
    """Run with the options of the command line and return the exit status."""
    options = _parse()
    # Import here, not in every fork, where the system calls of the import would be counted.
    importlib.import_module("omniq.storage.file")
    if reason := why_unavailable():
        print(f"skipped: {reason}")
        return 0
    with tempfile.TemporaryDirectory(prefix="omniq-syscalls-", dir=_quick_folder()) as folder:
        if options.only:
            return _run_one(Path(folder), Point.parse(options.only))
        faults = FAULTS + (MORE_FAULTS if options.more else ())
        points = [
            point
            for point in find_points(Path(folder), faults)
            if not options.syscall or point.syscall in options.syscall
        ]
        verdicts = _run_all(Path(folder), points)
    _print_table(points, verdicts)
    return int(any(verdict.problems for verdict in verdicts) or not verdicts)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="syscalls", description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="CALL:FAULT:N", help="run one point and show its trace")
    parser.add_argument("--syscall", action="append", choices=TRACED, help="only this call")
    parser.add_argument("--more", action="store_true", help=f"also {', '.join(MORE_FAULTS)}")
    return parser.parse_args()


def why_unavailable() -> str | None:
    """Return what is missing on this machine, or None if the sweep can run."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    # A dry run of exactly what a point does: attach to a child and make one call fail.
    with tempfile.TemporaryDirectory(prefix="omniq-syscalls-") as folder:
        target = Path(folder) / "store"
        try:
            run = Run(Path(folder), Point("mkdir", "EIO", 1), lambda: partial(_make_folder, target))
            run.go()
        except TracerError as error:
            return f"strace cannot inject faults: {error}"
        return "strace cannot inject faults: the call did not fail" if target.exists() else None


class TracerError(Exception):
    """strace did not attach."""


def _make_folder(target: Path) -> None:
    with suppress(OSError):
        target.mkdir()


class Run:
    """One child under strace, in a separate folder; `point=None` only traces."""

    def __init__(
        self,
        folder: Path,
        point: Point | None,
        prepare: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self.store = folder / "store"
        self.log = folder / "acknowledged.log"
        self.trace = folder / "trace"
        self._point = point
        self._prepare = prepare or partial(prepare_child, self.store, self.log)

    def go(self) -> int | None:
        """Run the child and return its exit status, or None if it hung and was killed."""
        gate, opener = socket.socketpair()
        with gate, opener:
            child = spawn(partial(self._wait_and_act, gate, opener))
            try:
                # The calls with which the child prepares itself must not be counted.
                gate.close()
                opener.recv(1)
                tracer = self._attach(child)
                opener.send(b"!")
                ended = _wait(child)
            finally:
                status = kill(child)
        tracer.communicate(timeout=RUN_TIMEOUT)
        return status if ended else None

    def _wait_and_act(self, gate: socket.socket, opener: socket.socket) -> None:
        opener.close()
        ctypes.CDLL(None).prctl(*_ALLOW_ANY_TRACER)
        role = self._prepare()
        gate.send(b".")
        # Not a read: reads are counted.
        if gate.recv(1):
            role()

    def _attach(self, child: int) -> subprocess.Popen[str]:
        command = ["strace", "-f", "-y", "-s", "300", "-o", str(self.trace), "-p", str(child)]
        # The question mark lets strace skip calls that this kernel does not have.
        command += ["-e", "trace=" + ",".join(f"?{name}" for name in TRACED), "-e", "signal=none"]
        if self._point is not None:
            command += ["-e", self._point.injection]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        said = []
        for line in tracer.stderr:
            if "attached" in line:
                return tracer
            said.append(line.strip())
        tracer.wait()
        raise TracerError("; ".join(said))


def _wait(pid: int) -> bool:
    deadline = time.monotonic() + RUN_TIMEOUT
    while not has_ended(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def prepare_child(store: Path, log: Path) -> Callable[[], None]:
    """Return what the child does: each kind of change to a new store, once."""
    # Explicit settings: the search for files in the current folder must not be counted.
    storage = open_storage(f"file://{store}", settings=Settings())
    opened = Log(log)
    return lambda: asyncio.run(_act(storage, opened))


async def _act(storage: BaseStorage, log: Log) -> None:
    # One thread for blocking calls: strace counts the calls of each thread separately.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    await _twice(log, "open", [], storage.open)
    await _enqueue(storage, log)
    for task in await _claim(storage, log, 2, "first"):
        if task.id == "a":
            done = partial(storage.mark_done, task.id, new_result(task.id))
            await _twice(log, "mark_done", [task.id], done)
        else:
            await _retry(storage, log, task.id)
    for task in await _claim(storage, log, 1, "second"):
        fail = partial(storage.mark_failed, task.id, new_error(task.id), will_retry=False)
        await _twice(log, "mark_failed", [task.id], fail)
    await _claim(storage, log, 1, "third")
    await _twice(log, "close", [], storage.close)


async def _enqueue(storage: BaseStorage, log: Log) -> None:
    await _twice(log, "enqueue", ["a"], partial(storage.enqueue, new_task("a")))
    batch = [new_task(task_id) for task_id in ("b", "c", "d")]
    many = partial(storage.enqueue_many, batch, nonce="batch")
    await _twice(log, "enqueue", [task.id for task in batch], many)


async def _claim(storage: BaseStorage, log: Log, limit: int, claim_id: str) -> list[Task]:
    reserve = partial(storage.reserve, limit, claim_id=claim_id)
    tasks = await _twice(log, "reserve", [], reserve) or []
    log.note("ok", "claimed", [t.id for t in tasks], tokens=[t.token for t in tasks])
    return tasks


async def _retry(storage: BaseStorage, log: Log, task_id: str) -> None:
    failed = partial(storage.mark_failed, task_id, new_error(task_id), will_retry=True)
    await _twice(log, "mark_retry", [task_id], failed)
    again = partial(storage.reschedule, task_id, datetime.now(UTC))
    await _twice(log, "reschedule", [task_id], again)


async def _twice(log: Log, verb: str, ids: list[str], make: Callable[[], Awaitable[T]]) -> T | None:
    """Make the call; if it fails, log the error and repeat the call once, as a caller would."""
    for retry in (False, True):
        log.note("try", verb, ids)
        try:
            value = await make()
        except DuplicateTask:
            # The first call took effect before it failed: the task is stored.
            log.note("ok" if retry else "untyped DuplicateTask", verb, ids)
            return None
        except OmniqError as error:
            log.note(f"{'again' if retry else 'typed'} {type(error).__name__}: {error}", verb, ids)
        except Exception as error:
            log.note(f"untyped {type(error).__name__}: {error}", verb, ids)
        else:
            log.note("ok", verb, ids)
            return value
    return None


def find_points(folder: Path, faults: Iterable[str]) -> list[Point]:
    """Return every call on the store in a run without faults, with every fault it can have."""
    found: set[tuple[str, int]] = set()
    for number in range(2):
        # Twice: the first run also imports modules lazily, which shifts the counts.
        where = folder / f"undisturbed-{number}"
        where.mkdir()
        run = Run(where, None)
        status = run.go()
        history = _read_history(run.log)
        if status != 0 or history.errors:
            raise SystemExit(f"the run without faults failed: status {status}, {history.errors}")
        found = set(_calls_on(run.store, run.trace))
    return sorted(
        Point(syscall, fault, number)
        for syscall, number in found
        for fault in faults
        if _can_happen(syscall, fault)
    )


def _calls_on(store: Path, trace: Path) -> Iterable[tuple[str, int]]:
    counts: Counter[tuple[str, str]] = Counter()
    for line in trace.read_text().splitlines():
        if called := _CALL.match(line):
            thread, syscall = called.groups()
            counts[thread, syscall] += 1
            if str(store) in line:
                yield syscall, counts[thread, syscall]


def _can_happen(syscall: str, fault: str) -> bool:
    if syscall in READS:
        return fault in ("EIO", "EINTR")
    if syscall in REMOVALS:
        return fault not in ("ENOSPC", "EDQUOT", "EMFILE")
    return fault != "EMFILE" or syscall == "openat"


def examine(folder: Path, point: Point) -> Verdict:
    """Run the point in `folder` and return what is wrong afterwards."""
    run = Run(folder, point)
    status = run.go()
    lines = run.trace.read_text().splitlines()
    is_kill = point.fault == "SIGKILL"
    was_hit = any(_is_hit(line, point, run.store) for line in lines)
    # Each thread has a first call: the kill may hit one of another thread, outside the store.
    verdict = Verdict(str(point), was_hit=was_hit or (is_kill and status == -9))
    if not verdict.was_hit:
        return verdict
    if status is None:
        verdict.problems.append("the child hung")
    elif status != (-9 if is_kill else 0):
        verdict.problems.append(f"the child ended with status {status}")
    history = _read_history(run.log)
    for verb, text in history.errors:
        if not text.startswith("typed "):
            verdict.problems.append(f"{verb}: {text}")
    if point.syscall in SYNCS and not is_kill:
        verdict.problems.extend(_ignored_sync_failures(lines, run.log))
    verdict.problems.extend(_audit(run, history))
    return verdict


def _is_hit(line: str, point: Point, store: Path) -> bool:
    """Whether this line is the call that was made to fail, and concerns the store."""
    called = _CALL.match(line)
    if called is None or called[2] != point.syscall or str(store) not in line:
        return False
    if point.fault == "SIGKILL":
        return line.endswith(("= ?", "<unfinished ...>"))
    return "(INJECTED)" in line


def _ignored_sync_failures(lines: list[str], log: Path) -> Iterable[str]:
    """Yield failed syncs whose call succeeded although the data was not written again.

    The kernel may drop the data and report that only once: another sync of the file proves nothing.
    """
    failed: str | None = None
    is_written_anew = False
    for line in lines:
        called = _CALL.match(line)
        if called is None:
            continue
        syscall, target = called[2], line.partition("<")[2].partition(">")[0]
        if syscall in SYNCS and "(INJECTED)" in line:
            failed, is_written_anew = target, False
        elif failed is None:
            continue
        elif syscall in PUBLISHING and f'{Path(failed).name}"' in line:
            yield f"{failed} was given its name although its sync had failed"
        elif syscall in SYNCS:
            is_written_anew |= target != failed and not Path(target).is_dir()
        elif syscall in LOGGING and str(log) in line:
            if '\\"event\\": \\"ok\\"' in line and not is_written_anew:
                yield f"acknowledged although the sync of {failed} had failed"
            failed = None


def _audit(run: Run, history: History) -> list[str]:
    saved = run.store.parent / "report"
    log = run.store.parent / "audit.log"
    pid = spawn(lambda: asyncio.run(audit(f"file://{run.store}", history, Log(log))).save(saved))
    _wait(pid)
    kill(pid)
    report = Report.load(saved)
    return [*report.lost, *report.torn, *report.broken]


def _read_history(log: Path) -> History:
    history = History()
    history.add(log)
    return history


def _run_all(folder: Path, points: list[Point]) -> list[Verdict]:
    """Run all points in a few processes: each of them forks, so none may have threads."""
    began = time.monotonic()
    outputs = [folder / f"verdicts-{shard}" for shard in range(SHARDS)]
    pids = [
        spawn(partial(_run_shard, folder, points[shard::SHARDS], outputs[shard]))
        for shard in range(SHARDS)
    ]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(statuses):
        raise SystemExit(f"the sweep itself failed: {statuses}")
    lines = [line for output in outputs for line in output.read_text().splitlines()]
    print(f"{len(points)} points in {time.monotonic() - began:.0f} s")
    return [Verdict(**json.loads(line)) for line in lines]


def _run_shard(folder: Path, points: list[Point], output: Path) -> None:
    with output.open("w") as file:
        for point in points:
            for _ in range(TRIES):
                where = folder / str(point)
                where.mkdir()
                verdict = examine(where, point)
                shutil.rmtree(where)
                if verdict.was_hit:
                    break
            else:
                verdict.problems.append("the fault never struck the store")
            print(json.dumps(asdict(verdict)), file=file, flush=True)


def _run_one(folder: Path, point: Point) -> int:
    verdict = examine(folder, point)
    for name in ("trace", "acknowledged.log"):
        print(f"--- {name}\n{(folder / name).read_text()}")
    print(verdict)
    return int(bool(verdict.problems))


def _print_table(points: list[Point], verdicts: list[Verdict]) -> None:
    rows: defaultdict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        point = Point.parse(verdict.point)
        rows[point.syscall, point.fault].append(verdict)
    print(f"{'call':<12} {'fault':<8} {'points':>6} {'hit':>5}  verdict")
    for (syscall, fault), those in sorted(rows.items()):
        bad = sum(bool(verdict.problems) for verdict in those)
        hit = sum(verdict.was_hit for verdict in those)
        said = f"{bad} FAILED" if bad else "whole"
        print(f"{syscall:<12} {fault:<8} {len(those):>6} {hit:>5}  {said}")
    for verdict in verdicts:
        for problem in verdict.problems:
            print(f"  {verdict.point}  {problem}")
    print(f"{len(points)} points, {sum(v.was_hit for v in verdicts)} hit the store")


def _quick_folder() -> str | None:
    shared = Path("/dev/shm")
    return str(shared) if os.access(shared, os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
