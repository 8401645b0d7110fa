"""Finished: reads, finds and deletes the records of ended tasks, and dead letters.

A result's file is read once; after that, an unchanged name and inode number identify it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec

from omniq.errors import StorageError
from omniq.models import StoredLetter, TaskStatus
from omniq.storage.backend import FinishedQuery
from omniq.storage.file import encoding
from omniq.storage.file.encoding import EndedTask, NewerRecord, NotARecord
from omniq.storage.file.file_names import dead_path, id_of, result_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.shared_file import unpack_one
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.file.writes import boot_mark

_STALE_AFTER = 3600 * 10**9
"""Nanoseconds after which a temporary file counts as left behind by a process that died."""

T = TypeVar("T", EndedTask, encoding.EndedSummary)


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
        self._boot = boot_mark(files.clock)
        self._known: dict[str, ResultSummary] = {}
        self._letters: dict[str, tuple[int, StoredLetter]] = {}
        self._listed: list[str] = []
        self._listed_to = ""
        self._read_last: tuple[int, bytes] = (0, b"")

    # Reading

    def has_record(self, task_id: str) -> bool:
        """Whether a task with that id has a result or a dead letter, expired or not."""
        return self._disk.exists(result_path(task_id)) or self._disk.exists(dead_path(task_id))

    def ended(self, task_id: str) -> EndedTask | None:
        """Return the record of a task that has ended, expired or not; None when there is none."""
        return self._read_known(result_path(task_id), task_id)

    def dead(self, task_id: str) -> EndedTask | None:
        """Return the record of a dead letter, or None."""
        ended = self._read_known(dead_path(task_id), task_id)
        if ended is not None and ended.letter is None:
            self._disk.quarantine(dead_path(task_id), "the record has no dead letter")
            return None
        return ended

    def _read_known(self, path: str, task_id: str) -> EndedTask | None:
        try:
            return self._read(path, task_id, encoding.ENDED)
        except NewerRecord as error:
            raise StorageError(f"{task_id} was written by a newer omniq: {error}") from error

    def _read(
        self,
        path: str,
        task_id: str,
        codec: encoding.Codec[T],
        inode: int = 0,
        *,
        is_repeated: bool = False,
    ) -> T | None:
        """Read a record. One file has several: the last one is not read again, if its inode is given."""
        try:
            last, data = self._read_last
            if inode == 0 or inode != last:
                found = self._disk.read(path)
                if found is None:
                    return None
                self._read_last, data = (inode, found), found
            ended = codec.decode(unpack_one(data, task_id))
            if ended.row.id != task_id:
                raise NotARecord(f"the record of another task, {ended.row.id}")
        except NotARecord as error:
            if not is_repeated:
                # Perhaps an earlier record, which was replaced, and overwritten, while it was read.
                return self._read(path, task_id, codec, is_repeated=True)
            self._disk.quarantine(path, str(error))
            return None
        return ended

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
        # Sorted, so that the names of one file follow each other.
        for inode, task_id in sorted(unread):
            with suppress(NewerRecord):
                ended = self._read(result_path(task_id), task_id, encoding.ENDED_SUMMARY, inode)
                if ended is not None:
                    found[task_id] = ResultSummary(
                        inode, ended.row.status, ended.finished_at, ended.expires_at
                    )
        self._known, self._read_last = found, (0, b"")
        self._files.refresh()
        is_live = self._files.index.is_live
        return {task_id: known for task_id, known in found.items() if not is_live(task_id)}

    def list_ids(self, query: FinishedQuery) -> list[str]:
        """The ids of records whose instant is at most that of the query, in order."""
        if not query.after or query.after != self._listed_to:
            if query.by == "expires_at":
                self.remove_leftovers()
            self._listed = [
                task_id
                for task_id, each in sorted(self.results().items(), reverse=True)
                if getattr(each, query.by) <= query.before
            ]
        # The folder is listed once for all pages.
        page = self._listed[: -query.limit - 1 : -1]
        del self._listed[-query.limit :]
        self._listed_to = page[-1] if page else ""
        return page

    def delete(self, task_id: str, finished_before: int | None) -> None:
        """Delete the record of an ended task, unless it is a later one than the caller means."""
        self._known.pop(task_id, None)
        self._delete(task_id, finished_before, result_path(task_id), dead_path(task_id))

    def delete_dead(self, task_id: str, finished_before: int | None) -> None:
        """Delete a dead letter, unless it is a later one than the caller means."""
        self._delete(task_id, finished_before, dead_path(task_id), result_path(task_id))

    def _delete(
        self, task_id: str, finished_before: int | None, path: str, other_path: str
    ) -> None:
        # Asked first, so that a later record does not disappear for a moment; or for good, if this process dies.
        aside = f"tmp/{self._disk.nonce()}.tmp"
        if self._is_later(path, task_id, finished_before) or not self._disk.move(path, aside):
            return
        # Asked again: it may have been replaced meanwhile.
        if self._is_later(aside, task_id, finished_before):
            self._disk.link(aside, path)
            self._disk.remove_quietly(aside)
            return
        self._erase(aside, task_id, other_path)

    def _is_later(self, path: str, task_id: str, finished_before: int | None) -> bool:
        if finished_before is None:
            return False
        with suppress(NewerRecord):
            ended = self._read(path, task_id, encoding.ENDED_SUMMARY)
            return ended is not None and ended.finished_at >= finished_before
        return False

    def _erase(self, path: str, task_id: str, other_path: str) -> None:
        """Remove a record, unless the other path is a name of the same record."""
        facts, other = self._disk.stat(path), self._disk.stat(other_path)
        if facts is not None and other is not None and facts.st_ino == other.st_ino:
            self._disk.remove(path)
        else:
            self._disk.erase(path, task_id)

    def remove_leftovers(self) -> None:
        """Remove old temporary files and parts that were left by processes that died."""
        now = self._disk.disk_time()
        for folder in ("tmp", "parts"):
            for name in self._disk.names(folder):
                path = f"{folder}/{name}"
                if self._disk.is_older(path, _STALE_AFTER, now) and not self._is_needed(name):
                    self._disk.remove_quietly(path)

    def _is_needed(self, part: str) -> bool:
        """Whether a write that is not settled may still need that part, however old it is.

        A write of one name has no marker. Its process may have been suspended for hours before it takes
        that name, and then it commits: so the part stays while the task or document is there.
        """
        index = self._files.index
        key, _, write = part.rpartition(".")[0].rpartition(".")
        if write in index.writes or write in index.markers:
            return True
        return write.startswith(self._boot) and (
            index.current(key) is not None or key in index.taken
        )

    # Dead letters

    def letters(self) -> dict[str, int]:
        """The ids of all dead letters, with the inode numbers of their files."""
        ids = ((id_of(name, ".dead"), inode) for name, inode in self._disk.scan("dead"))
        return {task_id: inode for task_id, inode in ids if task_id is not None}

    def read_letters(self, after: str) -> Iterator[StoredLetter]:
        """The letters in id order, behind that id; each file is read once by this process."""
        found = self.letters()
        self._letters = {key: known for key, known in self._letters.items() if key in found}
        for task_id in sorted(task_id for task_id in found if task_id > after):
            known = self._letters.get(task_id)
            if known is None or known[0] != found[task_id]:
                try:
                    ended = self.dead(task_id)
                except StorageError:
                    # Of a newer format: left alone.
                    continue
                if ended is None or ended.letter is None:
                    continue
                known = self._letters[task_id] = found[task_id], ended.letter
            yield known[1]
