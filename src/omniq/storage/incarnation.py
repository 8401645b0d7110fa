"""Incarnation: notices when a store has gone back to an earlier state, and begins a new epoch then.

A restored backup, a promoted replica or a log that was cut short forgets claims, and would give their tokens
a second time. So every store has an epoch, and every lease a beat, which each renewal raises. An owner
notices that its store went back when it meets

- a lower epoch than before,
- a lower beat of its lease, or no trace of a lease it has had, or
- a row with a lower token than this owner was given for it.

It then raises the epoch. No row is rewritten: the tokens of later claims begin at a floor that follows from
the epoch, above all earlier ones. Owners with a lease of an earlier epoch count as fenced. A new store has
epoch 0, so that tokens count from 1 until a store goes back.

The numbers stay below 2^53, because Lua and JSON have no larger integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from omniq.errors import StorageRefused
from omniq.serialization import encode_internal, lenient_decoder
from omniq.storage.row_rules import FORMAT, Row, first_token
from omniq.storage.types import Holder, LeaseReply, Witness

STORE = "store"
"""The kind and the key of the document in which a store describes itself. Its `due` is the epoch."""

_LATEST = 2**32 - 2**20
"""The highest epoch that a clock gives: in the year 2106."""

_REMEMBERED = 8_192
"""Tokens that an owner remembers at least, if it was given that many."""


class StoreRecord(msgspec.Struct, array_like=True, frozen=True):
    """What a store says of itself. `oldest_reader`: the lowest format that a reader must know.

    `epoch` was raised at `raised_at`, in microseconds. SQLite's stores also have `leases`, the id of the
    lease file, and `path`, that of the database when it was last opened with another lease file.
    """

    id: str
    epoch: int = 0
    format: int = FORMAT
    oldest_reader: int = FORMAT
    raised_at: int = 0
    leases: str = ""
    path: str = ""


_decode = lenient_decoder(StoreRecord, None)


def decode_record(data: bytes | None) -> StoreRecord | None:
    """The record; None if there is none, or a damaged one."""
    return _decode(data) if data else None


def new_record(store_id: str) -> bytes:
    """The encoded record of a new store."""
    return encode_internal(StoreRecord(store_id))


def check_reader(record: StoreRecord | None) -> None:
    """Raise `StorageRefused` if the store needs a newer omniq."""
    if record is not None and record.oldest_reader > FORMAT:
        raise StorageRefused(
            f"the store has records of format {record.format}, which needs a newer version of omniq; "
            f"this one reads format {FORMAT}: upgrade omniq"
        )


def went_back(holder: Holder, reply: LeaseReply) -> bool:
    """Whether the store, which refuses the owner, knows less than the owner does."""
    if reply.epoch != holder.epoch:
        return reply.epoch < holder.epoch
    return reply.beat < holder.beat


def raised(record: StoreRecord, met: int, now: int) -> StoreRecord:
    """The record with the next epoch, for an owner that has met the epoch `met`."""
    # The clock, because no living owner may remember the epoch before a second restore. One that is wrong
    # by centuries must not use up the numbers below 2^53.
    epoch = max(record.epoch, met, min(now // 1_000_000, _LATEST)) + 1
    return msgspec.structs.replace(record, epoch=epoch, raised_at=now)


_Given = tuple[int, int, int, int, str]
"""A token, when it was given, and what distinguishes the row from one that was enqueued later under its id."""


class GivenTokens:
    """The tokens that an owner was given for its newest claims."""

    def __init__(self) -> None:
        self._newer: dict[str, _Given] = {}
        self._older: dict[str, _Given] = {}
        self._newest: Row | None = None

    def add(self, rows: Sequence[Row]) -> bool:
        """Note the tokens of claimed rows; returns whether one of them is not above an earlier one."""
        ids = [row.id for row in rows]
        is_new = self._newer.keys().isdisjoint(ids) and self._older.keys().isdisjoint(ids)
        is_below = not is_new and any(map(self._is_below, rows))
        newer = self._newer
        newer.update(
            {row.id: (row.token, row.started_at, row.seq, row.stored_at, row.nonce) for row in rows}
        )
        if rows:
            self._newest = rows[-1]
        if len(newer) > _REMEMBERED:
            self._newer, self._older = {}, newer
        return is_below

    def _is_below(self, row: Row) -> bool:
        known = self._newer.get(row.id) or self._older.get(row.id)
        if known is None or known[2:] != (row.seq, row.stored_at, row.nonce):
            return False
        # Both equal: the reply to a repeated call.
        return known[0] >= row.token and known[:2] != (row.token, row.started_at)

    def is_above(self, row: Row, epoch: int) -> bool:
        """Whether a higher token of that epoch was given for the row than it has."""
        known = self._newer.get(row.id) or self._older.get(row.id)
        return (
            known is not None
            and known[2:] == (row.seq, row.stored_at, row.nonce)
            and known[0] > row.token
            and known[0] >= first_token(epoch)
        )

    def forget_newest(self) -> None:
        """Have no witness until the next claim."""
        self._newest = None

    def witness(self, epoch: int) -> Witness | None:
        """The newest claim of that epoch."""
        row = self._newest
        if row is None or row.token < first_token(epoch):
            return None
        return Witness(row.id, row.seq, row.nonce, row.token)
