"""What is stored that the code here cannot run: to be known before a deploy, and not from dead letters after it.

Every waiting and running task, every dead letter and every schedule is compared with the functions that a worker
with these modules has. It only reads, one page at a time, and keeps counts: one for each function and reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from omniq.errors import SerializationError
from omniq.models import DeadLetter, Schedule, Task, TaskStatus
from omniq.operations.bulk_actions import OnProgress, all_tasks, no_progress
from omniq.operations.call_check import CallCheck, Misfit, ProblemKind
from omniq.signing import is_sealed
from omniq.storage.base import BaseStorage
from omniq.storage.row_rules import FORMAT
from omniq.tasks.functions import FunctionCache
from omniq.tasks.steps import read_checkpoint, task_key
from omniq.text.to_json import JsonRecord

RecordKind = Literal["task", "dead letter", "schedule", "declared schedule", "checkpoint"]

_LIVE = (TaskStatus.PENDING, TaskStatus.RETRYING, TaskStatus.RUNNING)
_PAGE = 1_000
_AT_ONCE = 32
_MOST_PROBLEMS = 1_000
_MOST_DETAILS = 10
_OTHERS = "other reasons of this kind"

_ADVICE: Mapping[ProblemKind, str] = {
    "missing": "deploy the function, or name its earlier path in @task(aliases=[…]) of the one that takes its place",
    "not run here": "mark it with @task, or name its module",
    "signature": "give new parameters a default, or write @task(version=…, upcasters={…})",
    "types": "let the annotation accept the stored values, or write @task(version=…, upcasters={…})",
    "newer version": "deploy code with that version before other code is taken away",
    "no upcaster": "keep the upcaster until nothing of that version is stored",
    "upcaster": "correct the upcaster",
    "undo": "deploy the function that undoes the step, or name its earlier path in @task(aliases=[…])",
    "unreadable": "run the check with the settings and the keys of the workers",
    "newer omniq": "deploy an omniq that is not older than the one that stored them",
    "declaration": "correct the @task of the function: its worker would not start",
}


class CheckProblem(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """Records of one function that the code cannot run for one reason, how many, and the id of one of them."""

    func_path: str
    record: RecordKind
    problem: ProblemKind
    detail: str
    count: int
    example: str

    @property
    def advice(self) -> str:
        """What to do next."""
        return _ADVICE[self.problem]

    def _as_json(self, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | {"advice": self.advice}


class CheckReport(JsonRecord, msgspec.Struct, frozen=True, kw_only=True):
    """What the code cannot run, by function, and how many records were compared with the code.

    `omitted`: records that cannot be run and are not among the problems, because there are too many of these.
    """

    tasks: int
    dead_letters: int
    schedules: int
    declared: int
    checkpoints: int
    problems: tuple[CheckProblem, ...]
    omitted: int = 0

    @property
    def ok(self) -> bool:
        """Whether the code can run everything."""
        return not self.problems

    def _as_json(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"ok": self.ok} | fields


class Declarations(msgspec.Struct, frozen=True, kw_only=True):
    """The schedules of the code, the ids of stored ones that they replace, and what is wrong, by function."""

    schedules: Sequence[Schedule] = ()
    replaced: frozenset[str] = frozenset()
    wrong: Mapping[str, str] = {}


async def check_stored(
    storage: BaseStorage,
    functions: FunctionCache,
    *,
    declarations: Declarations | None = None,
    dead: bool = True,
    on_progress: OnProgress = no_progress,
) -> CheckReport:
    """Compare what is stored with these functions. Without `dead`, dead letters are left out.

    A task that changes while it is read may be counted twice.
    """
    check = _Check(storage, CallCheck(functions), on_progress)
    declarations = declarations or Declarations()
    for func_path, why in declarations.wrong.items():
        check.found.add("declared schedule", func_path, Misfit("declaration", why), func_path)
    for schedule in declarations.schedules:
        check.call("declared schedule", schedule.task, schedule.id)
    await check.schedules(declarations.replaced)
    stats = await storage.stats()
    check.total = sum(stats.by_status[status] for status in _LIVE) + (stats.dead if dead else 0)
    await check.tasks()
    if dead:
        await check.dead_letters()
    return check.report()


class _Check:
    """One check: what was read until now, and what was found."""

    def __init__(self, storage: BaseStorage, calls: CallCheck, on_progress: OnProgress) -> None:
        self._storage = storage
        self._calls = calls
        self._on_progress = on_progress
        self._read: dict[RecordKind, int] = {}
        self._done = 0
        self.total = 0
        self.found = _Problems()

    def call(self, record: RecordKind, task: Task, example: str) -> None:
        """Count a record, and check its call."""
        self._read[record] = self._read.get(record, 0) + 1
        wrong = self._calls.why_not(task) if task.is_verified else self._unreadable(task)
        if wrong is not None:
            self.found.add(record, task.func_path, wrong, example)

    async def schedules(self, replaced: frozenset[str]) -> None:
        """Check those that will enqueue another task, but for those that the code replaces."""
        for schedule in await self._storage.list_schedules():
            if schedule.next_at is not None and schedule.id not in replaced:
                self.call("schedule", schedule.task, schedule.id)
        for schedule_id, why in (await self._storage.unreadable_schedules()).items():
            self._read["schedule"] = self._read.get("schedule", 0) + 1
            # Its function is in what cannot be read.
            self.found.add("schedule", "", Misfit("unreadable", why), schedule_id)

    async def tasks(self) -> None:
        """Check the tasks that have not ended, and the checkpoints of those that have run."""
        for status in _LIVE:
            page: list[Task] = []
            async for task in all_tasks(self._storage, status=status):
                page.append(task)
                if len(page) == _PAGE:
                    await self._page_of_tasks(page)
                    page = []
            await self._page_of_tasks(page)
        record = await self._storage.store_record()
        if record.format > FORMAT and (count := await self._storage.count_newer()):
            why = Misfit("newer omniq", "a newer omniq has stored them")
            self.found.add("task", "", why, "", count)

    async def _page_of_tasks(self, page: Sequence[Task]) -> None:
        for task in page:
            self.call("task", task, task.id)
        # Only a task that was claimed has a checkpoint.
        ran = [task for task in page if task.token and task.is_verified]
        for part in _parts(ran):
            loads = (self._storage.load_checkpoint(task.id) for task in part)
            for task, stored in zip(part, await asyncio.gather(*loads), strict=True):
                self._checkpoint(task, stored)
        self._advance(len(page))

    async def dead_letters(self) -> None:
        """Check the calls and the checkpoints of dead letters, as a retry would find them."""
        after = ""
        while page := await self._storage.list_dead(limit=_PAGE, after=after):
            for part in _parts(page):
                await self._some_dead_letters(part)
            after = page[-1].task_id
            self._advance(len(page))

    async def _some_dead_letters(self, letters: Sequence[DeadLetter]) -> None:
        storage = self._storage
        ids = [letter.task_id for letter in letters]
        tasks = await asyncio.gather(*map(storage.get_dead_task, ids))
        checkpoints = await asyncio.gather(*map(storage.load_checkpoint, ids))
        for task, stored in zip(tasks, checkpoints, strict=True):
            # None: it was retried or deleted meanwhile.
            if task is not None:
                self.call("dead letter", task, task.id)
                self._checkpoint(task, stored)

    def _checkpoint(self, task: Task, stored: bytes | None) -> None:
        if stored is None:
            return
        self._read["checkpoint"] = self._read.get("checkpoint", 0) + 1
        try:
            read_checkpoint(self._storage.serializer, task_key(task), stored)
        except SerializationError as error:
            why = str(error).replace(task.id, "…")
            self.found.add("checkpoint", task.func_path, Misfit("unreadable", why), task.id)

    def _unreadable(self, task: Task) -> Misfit:
        if is_sealed(self._storage.serializer):
            return Misfit("unreadable", "no key of this process fits, or the record is damaged")
        return Misfit(
            "unreadable", "it is signed or encrypted, or damaged, and there is no key here"
        )

    def _advance(self, count: int) -> None:
        self._done += count
        self._on_progress(self._done, max(self.total, self._done))

    def report(self) -> CheckReport:
        """What was read, and what was found."""
        read = self._read
        return CheckReport(
            tasks=read.get("task", 0),
            dead_letters=read.get("dead letter", 0),
            schedules=read.get("schedule", 0),
            declared=read.get("declared schedule", 0),
            checkpoints=read.get("checkpoint", 0),
            problems=self.found.sorted(),
            omitted=self.found.omitted,
        )


_Key = tuple[str, RecordKind, ProblemKind, str]


class _Problems:
    """Counts by function and reason, a bounded number of them."""

    def __init__(self) -> None:
        self._counts: dict[_Key, tuple[int, str]] = {}
        self._details: dict[tuple[str, RecordKind, ProblemKind], int] = {}
        self.omitted = 0

    def add(
        self, record: RecordKind, func_path: str, why: Misfit, example: str, count: int = 1
    ) -> None:
        group = (func_path, record, why.problem)
        key: _Key = (*group, why.detail)
        if key not in self._counts and self._details.get(group, 0) >= _MOST_DETAILS:
            # What an upcaster raises may be different for each task.
            key = (*group, _OTHERS)
        if key not in self._counts:
            if len(self._counts) >= _MOST_PROBLEMS:
                self.omitted += count
                return
            self._details[group] = self._details.get(group, 0) + 1
            self._counts[key] = (0, example)
        known, first = self._counts[key]
        self._counts[key] = (known + count, first)

    def sorted(self) -> tuple[CheckProblem, ...]:
        """The problems in order of function, the most frequent first."""
        found = sorted(self._counts.items(), key=lambda each: (each[0][0], -each[1][0], each[0]))
        return tuple(
            CheckProblem(
                func_path=func_path,
                record=record,
                problem=problem,
                detail=detail,
                count=count,
                example=example,
            )
            for (func_path, record, problem, detail), (count, example) in found
        )


def _parts(items: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (items[start : start + _AT_ONCE] for start in range(0, len(items), _AT_ONCE))
