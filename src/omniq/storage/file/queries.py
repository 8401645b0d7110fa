"""Queries: counts and lists live tasks, ended tasks and dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from omniq.errors import StorageError
from omniq.models import TaskStatus
from omniq.storage import inspection
from omniq.storage.backend import Counts, FinishedQuery, Record, complete
from omniq.storage.file.finished import FinishedTasks
from omniq.storage.file.section import FileSection
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.inspection import DeadQuery, Scan, ScanQuery, TaskQuery
from omniq.storage.newest_by_id import scan_by_id
from omniq.storage.row_rules import Row


class Queries:
    """What one section finds."""

    def __init__(self, files: TaskFiles, finished: FinishedTasks, section: FileSection) -> None:
        self._files = files
        self._finished = finished
        self._now = section.now
        self._section = section

    def _find(self, task_id: str) -> Record | None:
        """What is stored under an id; None for records of a newer format, which are left alone."""
        with suppress(StorageError):
            return self._section.find(task_id)
        return None

    def counts(self) -> Counts:
        """Count the tasks, each once, including those that change their state meanwhile."""
        counts = Counts(now=self._now, by_status=dict.fromkeys(TaskStatus, 0))
        before = self._files.index.ids()
        ended = self._finished.results()
        self._files.read_unread()
        index = self._files.index
        live = {row.id: row for row in index.ready.rows.values()}
        for task_id in before | index.ids():
            if task_id in live:
                counts.add(live[task_id])
            elif task_id not in ended:
                record = self._find(task_id)
                if record is not None and (record.is_live or record.finished is not None):
                    counts.add(record.row)
        for task_id, summary in ended.items():
            if summary.expires_at > self._now and task_id not in live:
                counts.by_status[summary.status] += 1
        counts.dead = len(self._finished.letters())
        counts.waiting = self.count_waiting()
        return counts

    def count_waiting(self) -> int:
        """The number of live tasks that do not run, without reading the waiting ones."""
        index = self._files.index
        taken = {name.key for name in index.taken_rows()} - index.rows.keys()
        held = [task_id for names in index.held.values() for task_id in names]
        records = (self._find(task_id) for task_id in (*held, *taken))
        return index.waiting_count + sum(
            record is not None and record.is_live and record.row.status is not TaskStatus.RUNNING
            for record in records
        )

    def page(self, query: object) -> object:
        """Return one page."""
        match query:
            case TaskQuery():
                return self._list_rows(query)
            case ScanQuery():
                return self._scan(query)
            case DeadQuery():
                letters = self._finished.read_letters(query.after)
                matching = (
                    letter for letter in letters if inspection.letter_matches(letter, query)
                )
                return list(islice(matching, query.limit))
            case FinishedQuery():
                return self._finished.list_ids(query)
        raise TypeError(f"no such query: {query!r}")

    def _list_rows(self, query: TaskQuery) -> list[Row]:
        """A page of rows, live and ended together, in id order."""
        ids = sorted(task_id for task_id in self._ids() if task_id > query.after)
        return list(islice(self._matching(ids, query), query.limit))

    def _scan(self, query: ScanQuery) -> Scan:
        async def read_backwards(before: str, limit: int) -> tuple[list[Row], str | None]:
            ids = sorted((task_id for task_id in self._ids() if task_id < before), reverse=True)
            rows = list(islice(self._matching(ids[: query.max_scanned], query), limit))
            is_cut = len(ids) > query.max_scanned and len(rows) < limit
            return rows, ids[query.max_scanned - 1] if is_cut else None

        async def read_page(page: TaskQuery) -> list[Row]:
            return self._list_rows(page)

        return complete(scan_by_id(query, read_backwards, read_page))

    def _ids(self) -> set[str]:
        """The ids of all tasks, live and ended."""
        self._files.refresh()
        live = self._files.index.ids()
        ended = self._finished.results()
        return {
            *live,
            *(task_id for task_id, summary in ended.items() if summary.expires_at > self._now),
            *self._files.index.ids(),
        }

    def _matching(self, ids: Iterable[str], query: TaskQuery | ScanQuery) -> Iterator[Row]:
        for task_id in ids:
            record = self._find(task_id)
            if record is None or (not record.is_live and record.finished is None):
                continue
            row = record.row if record.finished is None else record.finished.row
            if inspection.row_matches(row, query):
                yield row
