"""Tasks that have ended, and dead letters: counting, listing and forgetting them.

A result's file is read once; after that its name and inode say that it is the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import msgspec

from omniq.clock import to_micros
from omniq.models import DeadLetter, QueueStats, TaskStatus
from omniq.storage.file.encoding import ENDED_IN_BRIEF, Ended, Live, NotARecord
from omniq.storage.file.file_names import committed_of, dead_path, id_of, result_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.listed_records import ListedRecords
from omniq.storage.file.task_files import Ledger
from omniq.storage.inspection import DeadQuery, ScanQuery, TaskQuery, queue_stats
from omniq.storage.row_rules import Row

_STALE_AFTER = 3600 * 10**9
"""Nanoseconds after which a temporary file belongs to nobody."""


class Brief(msgspec.Struct, frozen=True, gc=False):
    """What is remembered of each file, and as little as will do: there may be very many."""

    inode: int
    status: TaskStatus
    finished_at: int
    expires_at: int


class Archive:
    """The folders `results` and `dead`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._disk: Disk = ledger.disk
        self._known: dict[str, Brief] = {}

    # Results

    def results(self) -> dict[str, Brief]:
        """Every task that has ended and is not live again, past its time or not."""
        found: dict[str, Brief] = {}
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
            brief = self._read_brief(result_path(task_id), task_id, inode, listed)
            if brief is not None:
                found[task_id] = brief
        self._known = found
        self._ledger.refresh()
        is_live = self._ledger.index.is_live
        return {task_id: known for task_id, known in found.items() if not is_live(task_id)}

    def _read_brief(
        self, path: str, task_id: str, inode: int, listed: ListedRecords
    ) -> Brief | None:
        try:
            data = listed.read(path, task_id, inode)
            if data is None:
                return None
            ended = ENDED_IN_BRIEF.decode(data)
            if ended.row.id != task_id:
                raise NotARecord(f"the record of another task, {ended.row.id}")
        except NotARecord as error:
            self._disk.quarantine(path, str(error))
            return None
        return Brief(inode, ended.row.status, ended.finished_at, ended.expires_at)

    def purge(self, is_old: Callable[[Brief], bool]) -> int:
        """Forget tasks that have ended; how many."""
        old = [task_id for task_id, brief in self.results().items() if is_old(brief)]
        return sum(self._forget(task_id, is_old) for task_id in old)

    def delete(self, task_id: str, now: int) -> bool:
        """Forget one task that has ended; False when there is no such record."""
        found = self._ledger.find(task_id)
        if not isinstance(found, Ended):
            return False
        return self._forget(task_id, lambda brief: brief.expires_at > now)

    def _forget(self, task_id: str, is_old: Callable[[Brief], bool]) -> bool:
        # Taken away first and looked at then: it may be a newer one than the one we judged.
        path, aside = result_path(task_id), f"tmp/{self._disk.nonce()}.tmp"
        if not self._disk.move(path, aside):
            return False
        brief = self._read_brief(aside, task_id, 0, ListedRecords(self._disk))
        is_gone = brief is not None and is_old(brief)
        if brief is not None and not is_gone:
            self._disk.link(aside, path)
        self._disk.remove_quietly(aside)
        self._known.pop(task_id, None)
        return is_gone

    def sweep(self) -> None:
        """Remove what processes that died have left unfinished, long ago."""
        now = self._disk.disk_time()
        for name in self._disk.names("tmp"):
            if self._is_stale(f"tmp/{name}", now) and not name.endswith(".task.tmp"):
                self._remove_anything(f"tmp/{name}")
        for folder in ("results", "dead"):
            for name in self._disk.names(folder):
                part = committed_of(name, "part")
                # A part whose task may still be changed by it is left alone, however old.
                if part is None or self._ledger.index.is_live(part.id):
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
        """How much of what there is, each task counted once, also those that move on meanwhile."""
        by_status = dict.fromkeys(TaskStatus, 0)
        by_queue: dict[str, int] = {}
        oldest: dict[str, int] = {}
        known = self._live_ids()
        ended = self.results()
        for brief in ended.values():
            if brief.expires_at > now:
                by_status[brief.status] += 1
        live = self._live()
        for task_id in known:
            if task_id in ended or task_id in live:
                continue
            found = self._ledger.find(task_id)
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
        """To be asked for before the results: a task that ends in between is not to be missed."""
        self._ledger.refresh()
        index = self._ledger.index
        return {*index.waiting_ids(), *index.running, *(each.id for each in index.committed())}

    def _live(self) -> dict[str, tuple[TaskStatus, str, int | None]]:
        """Status and queue of every live task; when it became due, of those that wait."""
        ledger = self._ledger
        for committed in ledger.index.committed():
            ledger.carry_out(committed)
        ledger.refresh()
        ledger.learn_order()
        found: dict[str, tuple[TaskStatus, str, int | None]] = {}
        for waiter in ledger.index.ready.items.values():
            found[waiter.id] = waiter.status, waiter.queue, waiter.due
        for claimed in list(ledger.index.running.values()):
            live = ledger.read_claimed(claimed)
            if live is not None:
                found[claimed.id] = live.row.status, live.row.queue, None
        return found

    def page(self, query: TaskQuery, now: int) -> list[Row]:
        """The rows of a page, live and ended together, in id order."""
        ids = sorted(task_id for task_id in self._ids(now) if task_id > query.after)
        found = self._matching(ids, query)
        return list(islice(found, query.limit))

    def back(
        self, query: ScanQuery, before: str, limit: int, now: int
    ) -> tuple[list[Row], str | None]:
        """Rows before that id, the last one first; and the id at which it had to stop."""
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
            *(task_id for task_id, brief in ended.items() if brief.expires_at > now),
            *self._live_ids(),
        }

    def _matching(self, ids: Iterable[str], query: TaskQuery | ScanQuery) -> Iterator[Row]:
        for task_id in ids:
            found = self._ledger.find(task_id)
            if found is not None and _matches(found.row, query):
                yield found.row

    # Dead letters

    def dead_ids(self) -> list[str]:
        """The ids of all dead letters, in order."""
        ids = (id_of(name, ".dead") for name in self._disk.names("dead"))
        return sorted(task_id for task_id in ids if task_id is not None)

    def letters(self, query: DeadQuery) -> list[DeadLetter]:
        """The dead letters of a page."""
        page: list[DeadLetter] = []
        for ended in self._dead_after(query.after):
            if len(page) >= query.limit:
                break
            letter = ended.letter
            if (
                letter is not None
                and query.task_type in (None, letter.task_type)
                and query.reason in (None, letter.failure_reason)
            ):
                page.append(letter)
        return page

    def purge_dead(self, before: int) -> int:
        """Forget dead letters whose last failure is that old; how many."""
        old = [
            ended.row.id
            for ended in self._dead_after("")
            if ended.letter is not None and to_micros(ended.letter.last_failure) < before
        ]
        return sum(self.bury(task_id) for task_id in old)

    def bury(self, task_id: str) -> bool:
        """Forget a dead letter and its checkpoint; False when there is none."""
        if not self._disk.remove(dead_path(task_id)):
            return False
        self._ledger.touch("dead")
        self._ledger.notes.clear(task_id)
        return True

    def _dead_after(self, after: str) -> Iterator[Ended]:
        for task_id in self.dead_ids():
            if task_id > after:
                ended = self._ledger.read_dead(task_id)
                if ended is not None:
                    yield ended


def _matches(row: Row, query: TaskQuery | ScanQuery) -> bool:
    return (
        query.status in (None, row.status)
        and query.queue in (None, row.queue)
        and query.func_path in (None, row.func_path)
    )
