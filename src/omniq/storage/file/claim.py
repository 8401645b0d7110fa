"""Takes due tasks out of the queue folder: a claim is the rename of a task's file."""

from __future__ import annotations

from contextlib import suppress

from omniq.failpoints import hit
from omniq.gate_rules import Gate
from omniq.storage import row_rules
from omniq.storage.file.encoding import Live, Waiter
from omniq.storage.file.file_names import Claimed, task_path
from omniq.storage.file.filesystem import Disk
from omniq.storage.file.gates import Gatekeeper
from omniq.storage.file.record import Held, Holdings, Recorder
from omniq.storage.file.task_files import Ledger
from omniq.storage.ready_queue import ClaimFilter
from omniq.storage.row_rules import Row
from omniq.storage.types import Claim


class Claimer:
    """Claims for an owner. What the index says is a guess; the file that was renamed is the truth."""

    def __init__(
        self, ledger: Ledger, gatekeeper: Gatekeeper, holdings: Holdings, recorder: Recorder
    ) -> None:
        self._ledger = ledger
        self._disk: Disk = ledger.disk
        self._gatekeeper = gatekeeper
        self._holdings = holdings
        self._recorder = recorder
        self.expired: list[str] = []
        """Ids of tasks that a claim has found past their `expires`, and ended."""

    def claim(self, owner: str, claim: Claim, now: int) -> list[Row]:
        """Claim up to the limit; fewer when a file cannot be read or moved, an error when none can."""
        due_by = now if claim.now is None else claim.now
        ready = self._ledger.index.ready
        self._ledger.meet_arrivals()
        ready.promote(due_by, now)
        groups = ready.groups_with_room(lambda gate: self._gatekeeper.room(gate, now))
        holds_suspect = any(held.live.row.is_suspect for held in self._holdings.of(owner))
        wanted = ClaimFilter(claim.queues, self.paused(), suspects=not holds_suspect)
        claimed: list[Row] = []
        aside: list[Waiter] = []
        waiter: Waiter | None = None

        def known_room(gate: Gate) -> int:
            return self._gatekeeper.known_room(gate, now)

        try:
            while len(claimed) < claim.limit:
                waiter = ready.take_next(wanted, groups, known_room)
                if waiter is None:
                    break
                row = self._try(waiter, owner, due_by, now, aside)
                if row is not None:
                    wanted.suspects = wanted.suspects and not row.is_suspect
                    claimed.append(row)
        except OSError:
            if waiter is not None:
                aside.append(waiter)
            # What is claimed is claimed; whatever is wrong will be met again by the next claim.
            if not claimed:
                raise
        finally:
            for each in aside:
                self._ledger.index.put_back(each, now)
        return claimed

    def paused(self) -> frozenset[str]:
        """The queues from which nothing is claimed."""
        names = self._disk.names("paused")
        return frozenset(name[: -len(".paused")] for name in names if name.endswith(".paused"))

    def _try(
        self, waiter: Waiter, owner: str, due_by: int, now: int, aside: list[Waiter]
    ) -> Row | None:
        if waiter.visible > due_by:
            aside.append(waiter)
            return None
        if waiter.expires is not None and waiter.expires <= due_by:
            self._expire(waiter.id, now)
            return None
        if waiter.gates:
            gate = self._gatekeeper.blocking(waiter.gates, now)
            if gate is not None:
                waiter.parked = gate.key
                self._ledger.index.put_back(waiter, now)
                return None
        claimed = Claimed(waiter.id, waiter.token + 1, owner, now)
        if not self._disk.move(task_path(waiter.id), claimed.path):
            return None
        self._ledger.touch("queue")
        self._ledger.index.hold(claimed)
        hit("file.claim.after_rename")
        return self._verify(claimed, due_by, now, aside)

    def _verify(self, claimed: Claimed, due_by: int, now: int, aside: list[Waiter]) -> Row | None:
        """Read what was claimed, and give it up again if the index was wrong about it."""
        try:
            live = self._read(claimed)
            if live is None:
                return None
            row = live.row
            if row.visible > due_by or row_rules.is_expired(row, due_by):
                self._give_up(claimed, live, now)
                return None
            if row.gates:
                gate = self._gatekeeper.enter(row.gates, row.id, claimed.token, now)
                if gate is not None:
                    self._give_up(claimed, live, now, parked=gate.key)
                    return None
        except OSError:
            with suppress(OSError):
                self._give_up(claimed, None, now)
            raise
        row_rules.claim(row, claimed.owner, now)
        self._holdings.held[row.id] = Held(claimed, live)
        return row

    def _read(self, claimed: Claimed) -> Live | None:
        live = self._ledger.read_held_waiter(claimed)
        if live is None:
            self._recorder.end_cancelled(claimed, claimed.started)
        elif live.row.token + 1 != claimed.token:
            # It went round once more since the index read it. Its name must tell its own token.
            self._give_up(claimed, live, claimed.started)
            return None
        return live

    def _give_up(
        self, claimed: Claimed, live: Live | None, now: int, parked: str | None = None
    ) -> None:
        """Undo a claim that nobody has seen. The token was not given out, and is used again."""
        if not self._disk.move(claimed.path, task_path(claimed.id)):
            self._recorder.end_cancelled(claimed, now)
            return
        if live is None:
            self._ledger.index.arrive(claimed.id)
            return
        self._ledger.index.drop(claimed.id)
        waiter = Waiter.of(live.row)
        waiter.parked = parked
        self._ledger.index.put(waiter, now)

    def give_up_unseen(self, rows: list[Row], now: int) -> None:
        """Undo claims whose caller has gone away before it was told of them."""
        for row in rows:
            held = self._holdings.held.pop(row.id, None)
            if held is not None and held.claimed.token == row.token:
                if row.gates:
                    self._gatekeeper.leave(row.gates, row.id, row.token, "neither", now)
                self._give_up(held.claimed, None, now)

    def _expire(self, task_id: str, now: int) -> None:
        live = self._ledger.read_waiting(task_id)
        if live is not None and self._recorder.end_waiting(live, "expired", now):
            self.expired.append(task_id)
