"""Deletes old commits, and decides which reads and appends of a suspended process are valid.

A deleted number can be created again. A process that was suspended for hours would find the next number missing,
take it for the end of the log, and create a commit there that no other process reads. Three rules prevent this:

1. A commit is deleted only if a snapshot contains it, if it is more than an hour old by the server's times, and
   after `floor/<n>` was written, which says that all numbers up to n may have been deleted.
2. A read or an append in the last 15 minutes proves that a process knows the end of the log. The time is that of
   the boot clock, which also counts while the machine is suspended. Commits after that end are younger than the
   proof, so none of them can have been deleted. Those up to that end may have been, also if the process has not
   followed them: a process that looks only for its own commit is behind what it has read.
3. Without such a proof, the result of a read or an append is valid only if the floor, read afterwards, is below
   its number. This includes an append that began with a proof and completed without one.

The rules depend only on the rates of the two clocks, which may differ by a factor of four. So the server's clock must
not jump ahead by an hour: young commits would look old, and a process with a proof could create their numbers again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from omniq.clock import Clock
from omniq.storage.log import Trimmed
from omniq.storage.s3.connection import Entry

KEPT_FOR = 3600 * 1_000_000
"""The least time for which a commit is kept, in microseconds."""

_DIGITS = 16
_PAGE = 1_000
"""The number of objects that a server lists or deletes with one request."""


class Objects(Protocol):
    """The objects of a store, as far as this module uses them: `S3Connection`."""

    async def put(self, name: str, data: bytes) -> None: ...
    async def list(self, folder: str, *, most: int | None = None) -> list[Entry]: ...
    async def delete(self, names: Sequence[str]) -> None: ...


def numbered(number: int) -> str:
    """The number as the name of an object: names sort like numbers."""
    return f"{number:0{_DIGITS}d}"


class Trimming:
    """The floor of one log, and the proof that this process knows its end."""

    def __init__(self, objects: Objects, clock: Clock, kept_for: int = KEPT_FOR) -> None:
        self._objects = objects
        self._clock = clock
        self._kept_for = kept_for
        self._proof_for = kept_for // 4
        self._proved_at: int | None = None
        self._proved_end = 0
        self._trimmed_at: int | None = None

    # Proof

    def forget(self) -> None:
        """Drop the proof: the state is loaded again."""
        self._proved_at = None

    def prove(self, began_at: int, end: int) -> None:
        """Record that a request has shown the end of the log. It began at `began_at` of the boot clock."""
        self._proved_at, self._proved_end = began_at, end

    async def check(self, number: int) -> None:
        """Call after a request that found or created that number, or did not find it.

        Raises `Trimmed` if the number may have been deleted before.
        """
        if (
            self._proved_at is not None
            and number > self._proved_end
            and self._clock.boot_micros() - self._proved_at <= self._proof_for
        ):
            return
        self._proved_at = None
        if number <= await self.floor():
            raise Trimmed(f"commit {number} was deleted: this process was suspended for too long")

    async def floor(self) -> int:
        """Commits up to this number may have been deleted."""
        floors = await self._objects.list("floor")
        return int(floors[-1].name) if floors else 0

    # Deleting

    async def trim(self) -> None:
        """Delete the commits that are old and in a snapshot, and what belongs to older snapshots.

        Does nothing if this process has done it recently: a list request costs as much as a write.
        """
        began_at = self._clock.boot_micros()
        if self._trimmed_at is not None and began_at - self._trimmed_at < self._kept_for // 6:
            return
        self._trimmed_at = began_at
        snapshots = await self._objects.list("snap")
        if not snapshots:
            return
        newest = int(snapshots[-1].name)
        # The newest snapshot was just written, so its time is about the server's current time.
        old_before = max(each.modified for each in snapshots) - self._kept_for
        while await self._delete_commits(newest, old_before):
            pass
        for folder in ("snap", "chunk", "floor"):
            end = await self.floor() if folder == "floor" else newest
            stale = [
                f"{folder}/{each.name}"
                for each in await self._objects.list(folder)
                if each.modified < old_before and 0 < int(each.name[:_DIGITS]) < end
            ]
            await self._objects.delete(stale)

    async def _delete_commits(self, snapshot: int, old_before: int) -> bool:
        """Raise the floor, and delete a page of commits up to it; returns whether there were any."""
        floor = highest = await self.floor()
        # The first numbers may be below the floor: left over from an earlier deletion, or created by a suspended process.
        commits = await self._objects.list("log", most=_PAGE)
        for entry in commits:
            number = int(entry.name)
            if number > floor and (number > snapshot or entry.modified >= old_before):
                break
            highest = max(highest, number)
        if highest > floor:
            await self._objects.put(f"floor/{numbered(highest)}", b"")
        stale = [f"log/{each.name}" for each in commits if int(each.name) <= highest]
        await self._objects.delete(stale)
        return bool(stale)
