"""Finished: counts, lists and deletes ended tasks and dead letters.

A result's file is read once; after that, an unchanged name and inode number identify it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import msgspec

from omniq.errors import StorageError
from omniq.models import DeadLetter, TaskStatus
from omniq.storage.backend import Counts, FinishedQuery, Record
from omniq.storage.file.encoding import ENDED_SUMMARY, NewerRecord, NotARecord
from omniq.storage.file.file_names import RowName, dead_path, id_of, result_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_file import unpack_all, unpack_one
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.inspection import (
    DeadQuery,
    ScanQuery,
    TaskQuery,
    letter_matches,
    row_matches,
)
from omniq.storage.row_rules import Row

_STALE_AFTER = 3600 * 10**9
"""Nanoseconds after which a temporary file counts as left behind by a process that died."""

Find = Callable[[str], Record | None]
"""Returns everything that is stored under an id."""


class ResultSummary(msgspec.Struct, frozen=True, gc=False):
    """The fields of a result that stay in memory: few, because there may be millions."""

    inode: int
    status: TaskStatus
    finished_at: int
    expires_at: int


class FinishedTasks:
    """The folders `results` and `dead`."""

    def __init__(self, files: TaskFiles) -> None:
        self._files = files
        self._disk: Disk = files.disk
        self._known: dict[str, ResultSummary] = {}
        self._letters: dict[str, tuple[int, DeadLetter]] = {}
        self._listed: list[str] = []
        self._listed_to = ""

    # Results

    def has_record(self, task_id: str) -> bool:
        """Whether a task with that id has a result or a dead letter, expired or not."""
        return self._disk.exists(result_path(task_id)) or self._disk.exists(dead_path(task_id))

    def results(self) -> dict[str, ResultSummary]:
        """All tasks that have ended and are not live again, expired or not."""
        found: dict[str, ResultSummary] = {}
        unread: list[tuple[int, str]] = []
        for name, inode in self._disk.scan("results"):
            task_id = id_of(name, ".result")
            if task_id is None:
                continue
            known = self._known.get(task_id)
            if known is not None and known.inode == inode:
                found[task_id] = known
            else:
                unread.append((inode, task_id))
        before, records = 0, dict[str, bytes]()
        for inode, task_id in sorted(unread):
            # Names of one file follow each other, so that it is read once.
            if inode != before or task_id not in records:
                records = self._read_file(result_path(task_id), task_id)
                before = inode
            summary = self._summary(result_path(task_id), task_id, inode, records)
            if summary is not None:
                found[task_id] = summary
        self._known = found
        self._files.refresh()
        is_live = self._files.index.is_live
        return {task_id: known for task_id, known in found.items() if not is_live(task_id)}

    def _read_file(self, path: str, task_id: str) -> dict[str, bytes]:
        try:
            data = self._disk.read(path)
            return (
                {} if data is None else (unpack_all(data) or {task_id: unpack_one(data, task_id)})
            )
        except NotARecord as error:
            self._disk.quarantine(path, str(error))
        except NewerRecord:
            pass
        return {}

    def _summary(
        self, path: str, task_id: str, inode: int, records: dict[str, bytes]
    ) -> ResultSummary | None:
        if task_id not in records:
            return None
        try:
            ended = ENDED_SUMMARY.decode(records[task_id])
            if ended.row.id != task_id:
                raise NotARecord(f"the record of another task, {ended.row.id}")
        except NotARecord as error:
            self._disk.quarantine(path, str(error))
            return None
        except NewerRecord:
            return None
        return ResultSummary(inode, ended.row.status, ended.finished_at, ended.expires_at)

    def list_ids(self, query: FinishedQuery) -> list[str]:
        """The ids of records whose instant is at most that of the query, in order."""
        by_expiry = query.by == "expires_at"
        if not query.after or query.after != self._listed_to:
            if by_expiry:
                self.remove_leftovers()
            self._listed = [
                task_id
                for task_id, each in sorted(self.results().items(), reverse=True)
                if (each.expires_at if by_expiry else each.finished_at) <= query.before
            ]
        # The folder is listed once for all pages.
        page = self._listed[: -query.limit - 1 : -1]
        del self._listed[-query.limit :]
        self._listed_to = page[-1] if page else ""
        return page

    def delete(self, task_id: str, finished_before: int | None) -> None:
        """Delete the record of an ended task, unless it is a later one than the caller means."""
        path, aside = result_path(task_id), f"tmp/{self._disk.nonce()}.tmp"
        self._known.pop(task_id, None)
        # Moved first and read then: it may be replaced between a check and the removal.
        if not self._disk.move(path, aside):
            return
        if finished_before is not None:
            summary = self._summary(aside, task_id, 0, self._read_file(aside, task_id))
            if summary is not None and summary.finished_at >= finished_before:
                self._disk.link(aside, path)
                self._disk.remove_quietly(aside)
                return
        self._erase(aside, task_id, dead_path(task_id))

    def _erase(self, path: str, task_id: str, other: str) -> None:
        """Remove a record, unless the other path is a name of the same record."""
        if self._disk.inode(path) == self._disk.inode(other):
            self._disk.remove(path)
        else:
            self._disk.erase(path, task_id)

    def remove_leftovers(self) -> None:
        """Remove old temporary files and parts that were left by processes that died."""
        now = self._disk.disk_time()
        index = self._files.index
        for folder in ("tmp", "parts"):
            for name in self._disk.names(folder):
                path = f"{folder}/{name}"
                # What a write that is not settled may still need stays, however old it is.
                if self._is_stale(path, now) and not any(
                    f".{write}." in name or name.startswith(write)
                    for write in (*index.writes, *index.markers)
                ):
                    self._disk.remove_quietly(path)

    def _is_stale(self, path: str, now: int) -> bool:
        try:
            return now - self._disk.changed_at(path) > _STALE_AFTER
        except FileNotFoundError:
            return False

    # Listing

    def counts(self, now: int, find: Find) -> Counts:
        """Count the tasks, each once, including those that change their state meanwhile."""
        counts = Counts(now=now, by_status=dict.fromkeys(TaskStatus, 0), by_queue={}, oldest={})
        self._files.refresh()
        before = self._files.index.ids()
        ended = self.results()
        self._files.read_unread()
        index = self._files.index
        live = {row.id: row for row in index.ready.rows.values()}
        for task_id in before | index.ids():
            if task_id in live:
                counts.add(live[task_id])
            elif task_id not in ended:
                record = find(task_id)
                if record is not None and (record.is_live or record.finished is not None):
                    counts.add(record.row)
        for task_id, summary in ended.items():
            if summary.expires_at > now and task_id not in live:
                counts.by_status[summary.status] += 1
        counts.dead = len(self.dead_ids())
        counts.waiting = self.count_waiting(find)
        return counts

    def count_waiting(self, find: Find) -> int:
        """The number of live tasks that do not run, without reading the waiting ones."""
        index = self._files.index
        held = [task_id for names in index.held.values() for task_id in names]
        taken = [
            key
            for key, each in index.taken.items()
            if isinstance(each.inner, RowName) and key not in index.rows
        ]
        records = (find(task_id) for task_id in (*held, *taken))
        return index.waiting_count + sum(
            record is not None and record.is_live and record.row.status is not TaskStatus.RUNNING
            for record in records
        )

    def list_rows(self, query: TaskQuery, now: int, find: Find) -> list[Row]:
        """A page of rows, live and ended together, in id order."""
        ids = sorted(task_id for task_id in self._ids(now) if task_id > query.after)
        return list(islice(_matching(ids, query, find), query.limit))

    def read_backwards(
        self, query: ScanQuery, before: str, limit: int, now: int, find: Find
    ) -> tuple[list[Row], str | None]:
        """Read matching rows with ids below `before`, the largest id first.

        The second value is the id at which the bound stopped the scan; None when it did not.
        """
        ids = sorted((task_id for task_id in self._ids(now) if task_id < before), reverse=True)
        rows = list(islice(_matching(ids[: query.max_scanned], query, find), limit))
        is_cut = len(ids) > query.max_scanned and len(rows) < limit
        return rows, ids[query.max_scanned - 1] if is_cut else None

    def _ids(self, now: int) -> set[str]:
        """The ids of all tasks, live and ended."""
        self._files.refresh()
        live = self._files.index.ids()
        ended = self.results()
        return {
            *live,
            *(task_id for task_id, summary in ended.items() if summary.expires_at > now),
            *self._files.index.ids(),
        }

    # Dead letters

    def dead_ids(self) -> list[str]:
        """The ids of all dead letters, in order."""
        ids = (id_of(name, ".dead") for name in self._disk.names("dead"))
        return sorted(task_id for task_id in ids if task_id is not None)

    def list_dead(self, query: DeadQuery) -> list[DeadLetter]:
        """A page of dead letters, in id order."""
        return list(islice(self._letters_of(query), query.limit))

    def _letters_of(self, query: DeadQuery) -> Iterator[DeadLetter]:
        """The letters that the query describes; each file is read once by this process."""
        found = {
            task_id: inode
            for name, inode in self._disk.scan("dead")
            if (task_id := id_of(name, ".dead")) is not None
        }
        self._letters = {key: known for key, known in self._letters.items() if key in found}
        for task_id in sorted(task_id for task_id in found if task_id > query.after):
            known = self._letters.get(task_id)
            if known is None or known[0] != found[task_id]:
                try:
                    ended = self._files.dead(task_id)
                except StorageError:
                    # Of a newer format: left alone.
                    continue
                if ended is None or ended.letter is None:
                    continue
                known = self._letters[task_id] = found[task_id], ended.letter
            if letter_matches(known[1], query):
                yield known[1]

    def delete_dead(self, task_id: str) -> None:
        """Delete a dead letter."""
        self._erase(dead_path(task_id), task_id, result_path(task_id))


def _matching(ids: Iterable[str], query: TaskQuery | ScanQuery, find: Find) -> Iterator[Row]:
    for task_id in ids:
        record = find(task_id)
        if record is None or (not record.is_live and record.finished is None):
            continue
        row = record.row if record.finished is None else record.finished.row
        if row_matches(row, query):
            yield row
