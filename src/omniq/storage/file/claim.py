"""Claim: claims due tasks; a claim is the rename of a task's file in the queue folder."""

from __future__ import annotations

from contextlib import suppress

from omniq.failpoints import hit
from omniq.gate_rules import Gate
from omniq.storage import row_rules
from omniq.storage.file.encoding import IndexEntry, Live
from omniq.storage.file.file_names import Claimed, task_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.gates import Gates
from omniq.storage.file.record import Held, HeldTasks, Recorder
from omniq.storage.file.task_files import TaskFiles
from omniq.storage.ready_queue import ClaimFilter
from omniq.storage.row_rules import Row
from omniq.storage.types import Claim


class Claimer:
    """Claims tasks for an owner.

    The index only suggests candidates, and may be out of date. The record in the renamed file
    decides.
    """

    def __init__(
        self, task_files: TaskFiles, gates: Gates, held_tasks: HeldTasks, recorder: Recorder
    ) -> None:
        self._task_files = task_files
        self._disk: Disk = task_files.disk
        self._gates = gates
        self._held_tasks = held_tasks
        self._recorder = recorder
        self.expired: list[str] = []
        """Ids of tasks whose `expires` had passed when a claim reached them, and that it ended."""

    def claim(self, owner: str, claim: Claim, now: int) -> list[Row]:
        """Claim up to `claim.limit` tasks.

        When a file cannot be read or moved, returns the tasks claimed so far, or raises the error
        if there are none.
        """
        due_by = now if claim.now is None else claim.now
        ready = self._task_files.index.ready
        self._task_files.read_arrivals()
        ready.promote(due_by, now)
        groups = ready.groups_with_room(lambda gate: self._gates.room(gate, now))
        holds_suspect = any(held.live.row.is_suspect for held in self._held_tasks.of(owner))
        claim_filter = ClaimFilter(claim.queues, self.paused(), suspects=not holds_suspect)
        claimed: list[Row] = []
        skipped: list[IndexEntry] = []
        entry: IndexEntry | None = None

        def known_room(gate: Gate) -> int:
            return self._gates.known_room(gate, now)

        try:
            while len(claimed) < claim.limit:
                entry = ready.take_next(claim_filter, groups, known_room)
                if entry is None:
                    break
                row = self._try_claim(entry, owner, due_by, now, skipped)
                if row is not None:
                    claim_filter.suspects = claim_filter.suspects and not row.is_suspect
                    claimed.append(row)
        except OSError:
            if entry is not None:
                skipped.append(entry)
            # The claims made so far are valid. If the error persists, the next claim raises it.
            if not claimed:
                raise
        finally:
            for each in skipped:
                self._task_files.index.put_back(each, now)
        return claimed

    def paused(self) -> frozenset[str]:
        """The paused queues."""
        names = self._disk.names("paused")
        return frozenset(name[: -len(".paused")] for name in names if name.endswith(".paused"))

    def _try_claim(
        self, entry: IndexEntry, owner: str, due_by: int, now: int, skipped: list[IndexEntry]
    ) -> Row | None:
        if entry.visible > due_by:
            skipped.append(entry)
            return None
        if entry.expires is not None and entry.expires <= due_by:
            self._expire(entry.id, now)
            return None
        if entry.gates:
            gate = self._gates.blocking(entry.gates, now)
            if gate is not None:
                entry.parked = gate.key
                self._task_files.index.put_back(entry, now)
                return None
        claimed = Claimed(entry.id, entry.token + 1, owner, now)
        if not self._disk.move(task_path(entry.id), claimed.path):
            return None
        self._task_files.mark_unsynced("queue")
        self._task_files.index.hold(claimed)
        hit("file.claim.after_rename")
        return self._verify(claimed, due_by, now, skipped)

    def _verify(
        self, claimed: Claimed, due_by: int, now: int, skipped: list[IndexEntry]
    ) -> Row | None:
        """Read the claimed record; undo the claim if the index was out of date."""
        try:
            live = self._read(claimed)
            if live is None:
                return None
            row = live.row
            if row.visible > due_by or row_rules.is_expired(row, due_by):
                self._undo_claim(claimed, live, now)
                return None
            if row.gates:
                gate = self._gates.enter(row.gates, row.id, claimed.token, now)
                if gate is not None:
                    self._undo_claim(claimed, live, now, parked=gate.key)
                    return None
        except OSError:
            with suppress(OSError):
                self._undo_claim(claimed, None, now)
            raise
        row_rules.claim(row, claimed.owner, now)
        self._held_tasks.held[row.id] = Held(claimed, live)
        return row

    def _read(self, claimed: Claimed) -> Live | None:
        live = self._task_files.read_just_claimed(claimed)
        if live is None:
            self._recorder.end_cancelled(claimed, claimed.started)
        elif live.row.token + 1 != claimed.token:
            # It was claimed and released since the index read it, so the name has an old token.
            self._undo_claim(claimed, live, claimed.started)
            return None
        return live

    def _undo_claim(
        self, claimed: Claimed, live: Live | None, now: int, parked: str | None = None
    ) -> None:
        """Undo a claim that was not returned to a caller. Its token is used again."""
        if not self._disk.move(claimed.path, task_path(claimed.id)):
            self._recorder.end_cancelled(claimed, now)
            return
        if live is None:
            self._task_files.index.add_unread(claimed.id)
            return
        self._task_files.index.drop(claimed.id)
        entry = IndexEntry.of(live.row)
        entry.parked = parked
        self._task_files.index.put(entry, now)

    def undo_claims(self, rows: list[Row], now: int) -> None:
        """Undo claims whose caller was cancelled before they were returned to it."""
        for row in rows:
            held = self._held_tasks.held.pop(row.id, None)
            if held is not None and held.claimed.token == row.token:
                if row.gates:
                    self._gates.leave(row.gates, row.id, row.token, "neither", now)
                self._undo_claim(held.claimed, None, now)

    def _expire(self, task_id: str, now: int) -> None:
        live = self._task_files.read_waiting(task_id)
        if live is not None and self._recorder.end_waiting(live, "expired", now):
            self.expired.append(task_id)
