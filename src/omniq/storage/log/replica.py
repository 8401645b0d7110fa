"""A replica: the state of a store in this process, and how far it has followed the log."""

from __future__ import annotations

from omniq.clock import Clock
from omniq.errors import StorageCorrupt, StorageError, StorageRefused
from omniq.failpoints import hit
from omniq.storage.log.append_order import AppendOrder
from omniq.storage.log.encoding import Commit, decode_commit, effects_of, encode_commit, everything
from omniq.storage.log.log import Log, Trimmed
from omniq.storage.log.undoable_tables import UndoableTables

_PAUSES = (0, 0.02, 0.05, 0.1, 0.2, 0.5, *[1.0] * 14)
"""Seconds before each new attempt at an append that the log does not answer."""

_LOADS = 5
"""Attempts at loading a log, while others replace its snapshot."""

SNAPSHOT_BYTES = 4 * 1024 * 1024
"""Bytes of commits, at least, between two snapshots."""

_FENCED_FOR = 24 * 3_600_000_000
"""Microseconds for which snapshots contain a fenced owner, in case it repeats its first renewal."""


class Replica:
    """The state after commit `number` of the log, and changes that are not committed yet.

    `begin`, change the `tables`, then `commit` or `undo`. Everything else is called without changes.
    """

    def __init__(
        self,
        log: Log,
        writer: str,
        clock: Clock,
        snapshot_bytes: int = SNAPSHOT_BYTES,
        commit_bytes: int = 0,
    ) -> None:
        """`commit_bytes`: the least number of bytes that a commit counts as, for the fixed cost of reading one."""
        self._log = log
        self.writer = writer
        self._clock = clock
        self._snapshot_bytes = snapshot_bytes
        self._commit_bytes = commit_bytes
        self._commits = 0
        self._now = 0
        self.competes = False
        self._failure: StorageError | None = None
        self._forget()

    def _forget(self) -> None:
        self.is_loaded = False
        self.needs_snapshot = False
        self.tables = UndoableTables()
        self.append_order = AppendOrder(self.writer)
        self.number = 0
        self._last_id = ""
        self._time = 0
        self._snapshot = 0
        self._snapshot_size = 0
        self._bytes_since = 0

    # Following

    async def load(self) -> None:
        """Read the newest snapshot, and all commits behind it."""
        for _ in range(_LOADS):
            self._forget()
            snapshot = await self._log.load_snapshot()
            if snapshot is not None:
                number, data = snapshot
                commit = decode_commit(data)
                self._apply(commit)
                self._reach(number, commit)
                self._snapshot_size = len(data)
            try:
                self._follow(await self._log.read(self.number + 1))
            except Trimmed:
                # Another process has saved a newer snapshot meanwhile.
                continue
            self.is_loaded = True
            return
        raise StorageCorrupt(
            f"commit {self.number + 1} of the log is missing, and no snapshot has it"
        )

    async def catch_up(self) -> bool:
        """Read the log to its end; returns whether others have committed anything."""
        number = self.number
        try:
            self._follow(await self._log.read(number + 1))
        except Trimmed:
            await self.load()
        return self.number != number

    def _follow(self, records: list[bytes]) -> None:
        for data in records:
            commit = decode_commit(data)
            if commit.previous != self._last_id:
                # The log was cut, or replaced by another one: the next call loads it.
                number = self.number + 1
                self._forget()
                raise StorageCorrupt(f"commit {number} does not follow the commit before it")
            self._apply(commit)
            self._reach(self.number + 1, commit, max(len(data), self._commit_bytes))

    def _apply(self, commit: Commit) -> None:
        commit.effects.apply(self.tables, commit.time)
        self.tables.seq = commit.seq

    def _reach(self, number: int, commit: Commit, size: int = 0) -> None:
        self.number, self._last_id, self._time = number, commit.id, commit.time
        self.append_order.note(commit.writer, competes=commit.competes)
        self._bytes_since += size
        if commit.snapshot > self._snapshot:
            # Another process has saved it.
            self._snapshot, self._bytes_since = commit.snapshot, 0

    # Changing

    def begin(self) -> int:
        """Begin to change the tables; returns the store's time, which never goes back."""
        self._now = max(self._time, self._log.now())
        self.tables.begin()
        return self._now

    @property
    def is_changed(self) -> bool:
        """Whether the tables were changed since `begin`."""
        return bool(self.tables.after)

    def undo(self) -> None:
        """Return to the state at `begin`, if there are changes."""
        tables = self.tables
        before, after = tables.before, tables.after
        tables.end()
        if after:
            tables.seq = tables.seq_before
            effects_of(after, before).apply(tables, self._now)

    async def commit(self) -> bool:
        """Append the changes. If others were first: undo them, apply what others did, return False.

        Raises `StorageError` if the log does not answer; the changes may have been stored.
        """
        commit = self._new_commit()
        data = encode_commit(commit)
        may_be_stored = False
        for pause in _PAUSES:
            is_won = await self._append(data)
            if not is_won:
                # What refuses a later attempt may be the commit of an earlier one.
                may_be_stored = may_be_stored or is_won is None
                is_won = await self._look_for(commit.id, may_be_stored=may_be_stored)
            if is_won:
                self.tables.end()
                self.competes = False
                self._reach_own(commit, max(len(data), self._commit_bytes))
                self._log.committed(commit)
            elif is_won is False:
                self.competes = True
            if is_won is not None:
                return is_won
            await self._clock.sleep(pause * (0.5 + self._clock.random()))
        raise StorageError(
            "the log does not answer; the change may have been stored; it can be repeated"
        ) from self._failure

    def _new_commit(self) -> Commit:
        self._commits += 1
        tables = self.tables
        return Commit(
            id=f"{self.writer}-{self._commits}",
            previous=self._last_id,
            time=self._now,
            seq=tables.seq,
            snapshot=self._snapshot,
            effects=effects_of(tables.before, tables.after),
            competes=self.competes,
        )

    async def _append(self, data: bytes) -> bool | None:
        """Whether the log has stored the data; None if it did not answer."""
        try:
            hit("log.before_append")
            is_won = await self._log.append(self.number + 1, data)
            hit("log.after_append")
            return is_won
        except StorageRefused:
            raise
        except StorageError as error:
            self._failure = error
            return None

    async def _look_for(self, commit_id: str, *, may_be_stored: bool) -> bool | None:
        """Whether the next commit of the log is that one; if it is another, follow it. None for none."""
        try:
            records = await self._log.read(self.number + 1)
        except Trimmed as error:
            # This process was suspended for too long.
            await self.load()
            if may_be_stored:
                raise StorageError(
                    "the log was trimmed; the change may have been stored"
                ) from error
            return False
        except StorageRefused:
            raise
        except StorageError as error:
            self._failure = error
            return None
        if not records:
            return None
        if decode_commit(records[0]).id == commit_id:
            return True
        self.undo()
        self._follow(records)
        return False

    # Snapshots

    def _reach_own(self, commit: Commit, size: int) -> None:
        # Of all processes, the one whose commit makes the log too long saves a snapshot. If it dies,
        # the one that makes the log twice as long does.
        longest = max(self._snapshot_bytes, self._snapshot_size // 2)
        lengths = self._bytes_since // longest
        self._reach(self.number + 1, commit, size)
        self.needs_snapshot = self.needs_snapshot or self._bytes_since // longest > lengths

    def snapshot(self) -> tuple[int, bytes]:
        """The state as it is now, and the number of its last commit."""
        for owner, fence in list(self.tables.fenced.items()):
            if fence.at < self._time - _FENCED_FOR:
                self.tables.put("fenced", owner, None)
        data = encode_commit(
            Commit(
                id=self._last_id,
                previous="",
                time=self._time,
                seq=self.tables.seq,
                snapshot=self.number,
                effects=everything(self.tables),
            )
        )
        self._bytes_since, self._snapshot_size = 0, len(data)
        self.needs_snapshot = False
        return self.number, data

    async def save(self, number: int, data: bytes) -> None:
        """Save a snapshot."""
        await self._log.save_snapshot(number, data)
        self._snapshot = max(self._snapshot, number)
