"""Prepares a store when it is opened, and upgrades one that version 1 of the layout has written.

The first worker sets the old keys aside, in one step that also closes them to older workers. Every
worker that then opens the store moves them, piece by piece; each piece is one atomic step, so it does
not matter who moves it, nor where a worker stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from omniq.clock import to_micros
from omniq.errors import SerializationError
from omniq.gate_rules import Gate, GateState
from omniq.models import Attempt, Schedule, StoredLetter
from omniq.serialization import encode_internal, internal_decoder, lenient_decoder
from omniq.storage.backend import ANY, DocumentChange, Ended
from omniq.storage.incarnation import check_reader, decode_record, new_record
from omniq.storage.redis import encoding
from omniq.storage.redis.encoding import STATUSES, instant_of, raw, stamp
from omniq.storage.redis.scripts import Scripts
from omniq.storage.redis.section import document_change
from omniq.storage.row_rules import FinishedRow, Instant, Row

_PIECE = 500
"""Values that one step moves, at most."""

_CLOSED = "this store has a newer format: upgrade omniq"
_STAMP = 18
_UNUSED = (
    *("ids", "suspects", "parked", "delayed", "held", "terms", "letters", "blocked"),
    *("success", "failed", "cancelled", "counts", "nonces", "idle", "awaited", "sequence"),
)
"""Old keys that follow from others."""


class _Fixed(msgspec.Struct, array_like=True, frozen=True):
    priority: int
    created_at: Instant
    result_ttl: int
    body: bytes
    attempts: int = 0
    repeats: bool = False
    unique: str | None = None
    expires: Instant | None = None
    gates: tuple[Gate, ...] = ()


class _State(msgspec.Struct, array_like=True, frozen=True):
    attempts: int
    crashes: int
    releases: int
    settled: int
    started_at: Instant
    history: tuple[Attempt, ...] = ()
    result: bytes = b""


class _StoredDeadLetter(msgspec.Struct, array_like=True, frozen=True):
    letter: StoredLetter
    place: str
    state: _State


_decode_fixed = internal_decoder(_Fixed)
_decode_state = lenient_decoder(_State, None)
_decode_dead = internal_decoder(_StoredDeadLetter)
_decode_gate = internal_decoder(GateState)
_decode_schedule = internal_decoder(tuple[Schedule, bytes])


async def prepare(run: Callable[..., Any], scripts: Scripts, store_id: str) -> None:
    """Make the store ready for use. Raises `StorageRefused` if it needs a newer omniq."""
    _, stored, is_old = await run("prepare", raw(new_record(store_id)), _CLOSED, stamp(0))
    check_reader(decode_record(stored))
    if is_old:
        await _Upgrade(scripts).run()


class _Upgrade:
    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def run(self) -> None:
        """Move everything that was set aside."""
        await self._move("places", self._move_rows)
        await self._move("dead", self._move_dead)
        for name, change in _DOCUMENTS.items():
            await self._move(name, partial(self._move_documents, change))
        for name in (*_UNUSED, *("tasks", "states", "ended")):
            era = "moved" if name in ("tasks", "states", "ended") else "old"
            await self._scripts.command("UNLINK", self._scripts.key(f"{era}_{name}"))

    async def _move(self, name: str, move: Callable[[dict[str, bytes]], Any]) -> None:
        key, cursor = self._scripts.key(f"moved_{name}"), b"0"
        while True:
            cursor, found = await self._scripts.command("HSCAN", key, cursor, "COUNT", _PIECE)
            values = {field.decode(): value for field, value in encoding.pairs(found)}
            if values:
                await move(values)
            if cursor == b"0":
                return

    async def _read(self, name: str, ids: Iterable[str]) -> list[bytes]:
        key = self._scripts.key(f"moved_{name}")
        return [value or b"" for value in await self._scripts.command("HMGET", key, *ids)]

    async def _move_rows(self, found: dict[str, bytes]) -> None:
        records, states, ends = [
            await self._read(name, found) for name in ("tasks", "states", "ended")
        ]
        rows = [
            _row_change(task_id, place, record, ended if place[:1] == b"f" else state)
            for (task_id, place), record, state, ended in zip(
                found.items(), records, states, ends, strict=True
            )
        ]
        await self._scripts.run("upgrade", [row for row in rows if row], [], [])

    async def _move_dead(self, found: dict[str, bytes]) -> None:
        letters = []
        for (task_id, value), record in zip(
            found.items(), await self._read("tasks", found), strict=True
        ):
            with suppress(SerializationError, ValueError, LookupError):
                stored = _decode_dead(value[_STAMP:])
                row = _old_row(task_id, stored.place, record, stored.state)
                finished = FinishedRow(row=row, finished_at=0, expires_at=0, result=b"")
                dead, failed_at = encoding.dead_record(Ended(finished, stored.letter))
                letters.append(
                    (task_id, raw(value), raw(dead), failed_at, raw(encoding.record_of(row)))
                )
        await self._scripts.run("upgrade", [], letters, [])

    async def _move_documents(
        self, change: Callable[[str, bytes], DocumentChange], found: dict[str, bytes]
    ) -> None:
        moved = []
        for field, value in found.items():
            with suppress(SerializationError, ValueError):
                made = change(field, value)
                moved.append((made.kind, field, raw(value), document_change(made)))
        await self._scripts.run("upgrade", [], [], moved)


def _row_change(task_id: str, place: bytes, record: bytes, state: bytes) -> Any:
    """A row as the script `upgrade` takes it; None if it cannot be read, and so is left alone."""
    end = b""
    try:
        text, known = place.decode(), _decode_state(state) if state else None
        row = _old_row(task_id, text, record, known)
        if text[0] == "f":
            at, until = map(int, text.split("/")[2:4])
            result = b"" if known is None else known.result
            ended = Ended(FinishedRow(row=row, finished_at=at, expires_at=until, result=result))
            new_place, end = encoding.ended_place(ended), encoding.end_record(ended)
        else:
            new_place = encoding.place_of(row)
    except (SerializationError, ValueError, LookupError):
        return None
    return (task_id, raw(place), new_place, raw(encoding.record_of(row)), "", raw(end))


def _old_row(task_id: str, place: str, record: bytes, state: _State | None) -> Row:
    """A row of version 1: its place is `<kind><queue>/<order><flags><token>/<tail>`."""
    queue, core, *tail = place.split("/", 4)
    func_path, size, rest = record.split(b" ", 2)
    nonce, fixed = rest[: int(size)], _decode_fixed(rest[int(size) :])
    due = instant_of(core[20:38])
    row = Row(
        id=task_id,
        seq=int(core[38:54]),
        nonce=nonce.decode("utf-8", "surrogatepass"),
        queue=queue[1:],
        priority=fixed.priority,
        func_path=func_path.decode(),
        body=fixed.body,
        due=due,
        turn=due,
        visible=due if core[55] == "1" else 0,
        created_at=fixed.created_at,
        stored_at=fixed.created_at,
        status=STATUSES[core[54]],
        attempts=fixed.attempts,
        token=int(core[60:]),
        cancel_requested=core[58] == "1",
        repeats=fixed.repeats,
        unique=fixed.unique,
        expires=fixed.expires,
        result_ttl=fixed.result_ttl,
        gates=fixed.gates,
    )
    # Once it has run, it may have a checkpoint, progress or a newest result.
    row.attached = row.token > 0
    if state is not None:
        row.attempts, row.crashes, row.releases = state.attempts, state.crashes, state.releases
        row.settled, row.started_at, row.history = state.settled, state.started_at, state.history
    if place[0] == "h":
        row.owner, row.started_at = tail[0], int(tail[1])
    # A parked task returns to the ready order: the next claim asks its gates again.
    return row


def _checkpoint(task_id: str, value: bytes) -> DocumentChange:
    saved_at = instant_of(value[:_STAMP].decode())
    data = encode_internal((saved_at, value[_STAMP:]))
    return DocumentChange("checkpoint", task_id, ANY, data, due=saved_at)


def _as_it_is(kind: str, key: str, value: bytes) -> DocumentChange:
    return DocumentChange(kind, key, ANY, value)


def _gate(key: str, value: bytes) -> DocumentChange:
    state = msgspec.structs.replace(_decode_gate(value), has_parked=False)
    return DocumentChange("gate", key, ANY, encode_internal(state))


def _schedule(schedule_id: str, value: bytes) -> DocumentChange:
    version, _, rest = value.split(b"/", 2)
    schedule, task = _decode_schedule(rest)
    data = encode_internal((int(version), schedule, task))
    due = None if schedule.next_at is None else to_micros(schedule.next_at)
    return DocumentChange("schedule", schedule_id, ANY, data, due=due)


_DOCUMENTS: dict[str, Callable[[str, bytes], DocumentChange]] = {
    "unique": partial(_as_it_is, "unique"),
    "checkpoints": _checkpoint,
    "progress": partial(_as_it_is, "progress"),
    "newest": partial(_as_it_is, "newest"),
    "gates": _gate,
    "schedules": _schedule,
}
