"""Finished: counts, lists and deletes ended tasks and dead letters.

A result's file is read once; after that, an unchanged name and inode number identify it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import msgspec

from omniq.clock import to_micros
from omniq.models import DeadLetter, QueueStats, TaskStatus
from omniq.storage.file.encoding import ENDED_SUMMARY, Ended, Live, NotARecord
from omniq.storage.file.file_names import committed_of, dead_path, id_of, result_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.listed_records import ListedRecords
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.inspection import DeadQuery, ScanQuery, TaskQuery, queue_stats
from omniq.storage.row_rules import Row

_STALE_AFTER = 3600 * 10**9
"""Nanoseconds after which a temporary file counts as left behind by a process that died."""


class ResultSummary(msgspec.Struct, frozen=True, gc=False):
    """The fields of a result that stay in memory: few, because there may be millions."""

    inode: int
    status: TaskStatus
    finished_at: int
    expires_at: int


class FinishedTasks:
    """The folders `results` and `dead`."""

    def __init__(self, task_files: TaskFiles) -> None:
        self._task_files = task_files
        self._disk: Disk = task_files.disk
        self._known: dict[str, ResultSummary] = {}

    # Results

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
        listed = ListedRecords(self._disk)
        for inode, task_id in sorted(unread):
            summary = self._read_summary(result_path(task_id), task_id, inode, listed)
            if summary is not None:
                found[task_id] = summary
        self._known = found
        self._task_files.refresh()
        is_live = self._task_files.index.is_live
        return {task_id: known for task_id, known in found.items() if not is_live(task_id)}

    def _read_summary(
        self, path: str, task_id: str, inode: int, listed: ListedRecords
    ) -> ResultSummary | None:
        try:
            data = listed.read(path, task_id, inode)
            if data is None:
                return None
            ended = ENDED_SUMMARY.decode(data)
            if ended.row.id != task_id:
                raise NotARecord(f"the record of another task, {ended.row.id}")
        except NotARecord as error:
            self._disk.quarantine(path, str(error))
            return None
        return ResultSummary(inode, ended.row.status, ended.finished_at, ended.expires_at)

    def purge(self, is_old: Callable[[ResultSummary], bool]) -> int:
        """Delete the records of ended tasks for which `is_old` holds; returns how many."""
        old = [task_id for task_id, summary in self.results().items() if is_old(summary)]
        return sum(self._delete_if_old(task_id, is_old) for task_id in old)

    def delete(self, task_id: str, now: int) -> bool:
        """Delete the record of one ended task; False when there is no such record."""
        found = self._task_files.find(task_id)
        if not isinstance(found, Ended):
            return False
        return self._delete_if_old(task_id, lambda summary: summary.expires_at > now)

    def _delete_if_old(self, task_id: str, is_old: Callable[[ResultSummary], bool]) -> bool:
        # Move it first and read it then: it may have been replaced since it was found to be old.
        path, aside = result_path(task_id), f"tmp/{self._disk.nonce()}.tmp"
        if not self._disk.move(path, aside):
            return False
        summary = self._read_summary(aside, task_id, 0, ListedRecords(self._disk))
        is_deleted = summary is not None and is_old(summary)
        if summary is not None and not is_deleted:
            self._disk.link(aside, path)
        self._disk.remove_quietly(aside)
        self._known.pop(task_id, None)
        return is_deleted

    def remove_leftovers(self) -> None:
        """Remove old temporary files and parts that were left by processes that died."""
        now = self._disk.disk_time()
        for name in self._disk.names("tmp"):
            if self._is_stale(f"tmp/{name}", now) and not name.endswith(".task.tmp"):
                self._remove_anything(f"tmp/{name}")
        for folder in ("results", "dead"):
            for name in self._disk.names(folder):
                part = committed_of(name, "part")
                # A part that a change of its task may still need stays, however old it is.
                if part is None or self._task_files.index.is_live(part.id):
                    continue
                if self._disk.exists(dead_path(part.id)):
                    continue
                if self._is_stale(f"{folder}/{name}", now):
                    self._disk.remove_quietly(f"{folder}/{name}")

    def _is_stale(self, path: str, now: int) -> bool:
        try:
            return now - self._disk.changed_at(path) > _STALE_AFTER
        except FileNotFoundError:
            return False

    def _remove_anything(self, path: str) -> None:
        if path.endswith(".cell"):
            self._disk.remove_folder(path)
        else:
            self._disk.remove_quietly(path)

    # Listing

    def stats(self, now: int) -> QueueStats:
        """Count the tasks, each once, including those that change their state meanwhile."""
        by_status = dict.fromkeys(TaskStatus, 0)
        by_queue: dict[str, int] = {}
        oldest: dict[str, int] = {}
        known = self._live_ids()
        ended = self.results()
        for summary in ended.values():
            if summary.expires_at > now:
                by_status[summary.status] += 1
        live = self._live_tasks()
        for task_id in known:
            if task_id in ended or task_id in live:
                continue
            found = self._task_files.find(task_id)
            if isinstance(found, Live):
                live[task_id] = found.row.status, found.row.queue, None
            elif found is not None:
                by_status[found.row.status] += 1
        for task_id, (status, queue, due) in live.items():
            if task_id in ended:
                continue
            by_status[status] += 1
            by_queue[queue] = by_queue.get(queue, 0) + 1
            if due is not None:
                oldest[queue] = min(due, oldest.get(queue, due))
        return queue_stats(by_status, by_queue, oldest, now=now, dead=len(self.dead_ids()))

    def _live_ids(self) -> set[str]:
        """The ids of all live tasks. Read before the results, to miss no task that ends."""
        self._task_files.refresh()
        index = self._task_files.index
        return {*index.waiting_ids(), *index.running, *(each.id for each in index.committed())}

    def _live_tasks(self) -> dict[str, tuple[TaskStatus, str, int | None]]:
        """The status and queue of every live task, and for waiting tasks the time they are due."""
        task_files = self._task_files
        for committed in task_files.index.committed():
            task_files.finish_change(committed)
        task_files.refresh()
        task_files.read_unread()
        found: dict[str, tuple[TaskStatus, str, int | None]] = {}
        for entry in task_files.index.ready.items.values():
            found[entry.id] = entry.status, entry.queue, entry.due
        for claimed in list(task_files.index.running.values()):
            live = task_files.read_claimed(claimed)
            if live is not None:
                found[claimed.id] = live.row.status, live.row.queue, None
        return found

    def list_rows(self, query: TaskQuery, now: int) -> list[Row]:
        """A page of rows, live and ended together, in id order."""
        ids = sorted(task_id for task_id in self._ids(now) if task_id > query.after)
        found = self._matching(ids, query)
        return list(islice(found, query.limit))

    def read_backwards(
        self, query: ScanQuery, before: str, limit: int, now: int
    ) -> tuple[list[Row], str | None]:
        """Read matching rows with ids below `before`, the largest id first.

        The second value is the id at which the bound stopped the scan; None when it did not.
        """
        ids = sorted((task_id for task_id in self._ids(now) if task_id < before), reverse=True)
        rows = list(islice(self._matching(ids[: query.max_scanned], query), limit))
        is_cut = len(ids) > query.max_scanned and len(rows) < limit
        return rows, ids[query.max_scanned - 1] if is_cut else None

    def _ids(self, now: int) -> set[str]:
        """The ids of all tasks, live and ended."""
        live = self._live_ids()
        ended = self.results()
        return {
            *live,
            *(task_id for task_id, summary in ended.items() if summary.expires_at > now),
            *self._live_ids(),
        }

    def _matching(self, ids: Iterable[str], query: TaskQuery | ScanQuery) -> Iterator[Row]:
        for task_id in ids:
            found = self._task_files.find(task_id)
            if found is not None and _matches(found.row, query):
                yield found.row

    # Dead letters

    def dead_ids(self) -> list[str]:
        """The ids of all dead letters, in order."""
        ids = (id_of(name, ".dead") for name in self._disk.names("dead"))
        return sorted(task_id for task_id in ids if task_id is not None)

    def list_dead(self, query: DeadQuery) -> list[DeadLetter]:
        """A page of dead letters, in id order."""
        page: list[DeadLetter] = []
        for ended in self._dead_after(query.after):
            if len(page) >= query.limit:
                break
            letter = ended.letter
            if (
                letter is not None
                and query.func_path in (None, letter.func_path)
                and query.reason in (None, letter.failure_reason)
            ):
                page.append(letter)
        return page

    def purge_dead(self, before: int) -> int:
        """Delete dead letters whose last failure is older than `before`; returns how many."""
        old = [
            ended.row.id
            for ended in self._dead_after("")
            if ended.letter is not None and to_micros(ended.letter.last_failure) < before
        ]
        return sum(self.delete_dead(task_id) for task_id in old)

    def delete_dead(self, task_id: str) -> bool:
        """Delete a dead letter and its checkpoint; False when there is no such dead letter."""
        if not self._disk.remove(dead_path(task_id)):
            return False
        self._task_files.mark_unsynced("dead")
        self._task_files.checkpoints.clear(task_id)
        return True

    def _dead_after(self, after: str) -> Iterator[Ended]:
        for task_id in self.dead_ids():
            if task_id > after:
                ended = self._task_files.read_dead(task_id)
                if ended is not None:
                    yield ended


def _matches(row: Row, query: TaskQuery | ScanQuery) -> bool:
    return (
        query.status in (None, row.status)
        and query.queue in (None, row.queue)
        and query.func_path in (None, row.func_path)
    )
