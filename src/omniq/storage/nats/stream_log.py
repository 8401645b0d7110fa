"""The log: commits are messages of a stream, and snapshots are messages of a second one.

    stream OQ_<store>    oq.<store>.log         a commit; stored only after the last one of the subject
                         oq.<store>.part        a piece of a commit that is larger than a message may be
    stream OQK_<store>   oq.<store>.snapshots   the newest snapshots
                         oq.<store>.chunk.*     the pieces of one of them
                         oq.<store>.host        the process that runs the calls of all others
    not stored           oq.<store>.work, oq.<store>.ended    notifications
                         oq.<store>.call.*, oq.<store>.hosts  calls to the host, and its name

The pieces of a commit are stored after the previous commit and before the commit itself. If another commit is
stored between them, that one has won the race.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from hashlib import blake2b
from typing import Any

import msgspec

from omniq.clock import Clock, to_micros
from omniq.errors import StorageClosed
from omniq.storage.log.encoding import Commit
from omniq.storage.log.log import Log, Trimmed
from omniq.storage.nats.address import Address
from omniq.storage.nats.api_errors import EXISTS, NOT_FOUND, WRONG_SEQUENCE, ApiError, Unanswered
from omniq.storage.nats.connection import ServerConnection
from omniq.storage.nats.server_check import (
    StreamInfo,
    check_server,
    check_stream,
    read_durability,
    report,
)
from omniq.storage.store_clock import observe
from omniq.storage.types import Capabilities
from omniq.storage.wakeups import LocalWakeups

CAPABILITIES = Capabilities(name="nats", durability="os", reach="fleet")

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_PARTS = "Omniq-Parts"
_READS = 3
_MARGIN = 4_096
"""Bytes of a message that are reserved for its headers."""

_SURE_FOR = 1_000_000
"""Microseconds after a reply within which no server can have restarted and recovered."""

_SAFE_AFTER = 150_000_000
"""Microseconds after which a server has synced a snapshot to disk: the default `sync_interval` is 2 minutes."""

_IDS = 1_000
"""The most ids of ended tasks in one message."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a commit is stored, and what distinguishes it from another at the same place."""

    sequence: int
    digest: bytes = b""


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot whose pieces are all stored."""

    number: int
    place: Place
    id: str
    chunks: int
    saved_at: int


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """The snapshots of a log, oldest first."""

    log: str = ""
    snapshots: list[Snapshot] = []


class _Stored(msgspec.Struct):
    data: bytes = b""
    seq: int = 0


class _Got(msgspec.Struct):
    message: _Stored


_START = Place(0)
_decode_manifest = msgspec.msgpack.Decoder(Manifest).decode
_decode_ids = msgspec.msgpack.Decoder(list[str]).decode


class StreamLog(Log):
    """A log in the streams of one store."""

    def __init__(self, address: Address, clock: Clock, wakeups: LocalWakeups) -> None:
        self._address = address
        self._clock = clock
        self._wakeups = wakeups
        self._connection: ServerConnection | None = None
        self._log = f"OQ_{address.store}"
        self._keep = f"OQK_{address.store}"
        self.subject = f"oq.{address.store}"
        self._id = ""
        # The places of the newest commits, by their numbers.
        self._places: dict[int, Place] = {0: _START}
        # When and on which connection the place of the last commit was confirmed.
        self._confirmed = (0, 0)
        self.capabilities = CAPABILITIES

    def now(self) -> int:
        return self._clock.micros()

    @property
    def connection(self) -> ServerConnection:
        """The connection to the server. Raises `StorageClosed` after a close, also during a call."""
        if self._connection is None:
            raise StorageClosed("the storage was closed")
        return self._connection

    async def open(self) -> None:
        if self._connection is not None:
            return
        connection = ServerConnection(self._address, name=f"omniq-{self._address.store}")
        try:
            await connection.connect()
            await check_server(connection)
            self._connection = connection
            self._id = (await self._create()).id
            durability = await read_durability(self._address)
            self.capabilities = msgspec.structs.replace(CAPABILITIES, durability=durability)
            await connection.subscribe(f"{self.subject}.work", self._on_work)
            await connection.subscribe(f"{self.subject}.ended", self._on_ended)
        except BaseException:
            self._connection = None
            await connection.close()
            raise
        # Earlier messages may have been missed.
        connection.on_connect = self._wakeups.notify_work

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _create(self) -> StreamInfo:
        """Create the streams, unless they exist; returns the stream of the log."""
        found = []
        for name, subjects in (
            (self._log, [f"{self.subject}.log", f"{self.subject}.part"]),
            (self._keep, [f"{self.subject}.{name}" for name in ("snapshots", "chunk.*", "host")]),
        ):
            try:
                info = await self._info(name)
            except ApiError as error:
                if error.kind != NOT_FOUND:
                    raise
                await self._create_stream(name, subjects)
                info = await self._info(name)
            check_stream(info.config, subjects)
            found.append(info)
        return found[0]

    async def _create_stream(self, name: str, subjects: list[str]) -> None:
        try:
            await self.connection.api(
                f"STREAM.CREATE.{name}",
                dict[str, Any],
                name=name,
                subjects=subjects,
                retention="limits",
                discard="new",
                storage="file",
                num_replicas=self._address.replicas,
                max_msgs=-1,
                max_msgs_per_subject=-1,
                max_bytes=-1,
                max_age=0,
                deny_delete=True,
                metadata={"omniq": self._clock.new_id()},
            )
        except ApiError as error:
            # Another process was first: its id is in the stream.
            if error.kind != EXISTS:
                raise

    async def _info(self, stream: str, **arguments: Any) -> StreamInfo:
        sent_at = self._clock.boot_micros()
        info = await self.connection.api(f"STREAM.INFO.{stream}", StreamInfo, **arguments)
        if info.ts:
            # The time has nanoseconds; Python reads only six digits.
            observe(self._clock, to_micros(datetime.fromisoformat(info.ts)), sent_at=sent_at)
        return info

    async def read_clock(self) -> None:
        """Read the server's time."""
        await self._info(self._log)

    async def report(self) -> list[tuple[str, str, str]]:
        """The settings of the server for `omniq doctor`."""
        streams = [await self._info(self._log), await self._info(self._keep)]
        return await report(self.connection, self._address, streams)

    # The host

    async def read_host(self) -> tuple[str, int]:
        """The name of the host, and the sequence number of the message that contains it."""
        got = await self._last("host")
        return (got.data.decode(), got.seq) if got is not None else ("", 0)

    async def write_host(self, host: str, sequence: int) -> bool:
        """Store the name of the host; False if another process was first."""
        try:
            await self.connection.store(
                f"{self.subject}.host", host.encode(), {_EXPECTED: str(sequence)}
            )
        except ApiError as error:
            if error.kind != WRONG_SEQUENCE:
                raise
            return False
        await self._purge(self._keep, filter=f"{self.subject}.host", keep=1)
        return True

    async def _last(self, name: str) -> _Stored | None:
        """The last message of a subject, in the stream of snapshots."""
        try:
            got = await self.connection.api(
                f"STREAM.MSG.GET.{self._keep}", _Got, last_by_subj=f"{self.subject}.{name}"
            )
        except ApiError as error:
            if error.kind != NOT_FOUND:
                raise
            return None
        return got.message

    # Commits

    async def append(self, number: int, data: bytes) -> bool:
        before = self._places.get(number - 1)
        if before is None or number in self._places or not await self._is_at(before):
            return False
        body, headers = data, {_EXPECTED: str(before.sequence)}
        largest = self.connection.max_payload - _MARGIN
        if len(data) > largest:
            pieces = [data[begin : begin + largest] for begin in range(0, len(data), largest)]
            body = self._clock.new_id().encode()
            for piece in pieces:
                await self.connection.store(f"{self.subject}.part", piece, {_PARTS: body.decode()})
            headers[_PARTS] = str(len(pieces))
        try:
            sequence = await self.connection.store(f"{self.subject}.log", body, headers)
        except ApiError as error:
            if error.kind == WRONG_SEQUENCE:
                return False
            raise
        self._places[number] = Place(sequence, _digest(body))
        self._confirm()
        return True

    async def read(self, first: int) -> list[bytes]:
        for _ in range(_READS - 1):
            # The next attempt connects again.
            with suppress(Unanswered):
                return await self._read(first)
        return await self._read(first)

    async def _read(self, first: int) -> list[bytes]:
        before = self._places.get(first - 1)
        info = await self._stream()
        state = info.state
        if (
            before is None
            or info.id != self._id
            or state.last_seq < before.sequence
            or state.first_seq > before.sequence + 1
            or (before.sequence and not state.messages)
            or not await self._is_at(before)
        ):
            # It was trimmed; or the stream was deleted, created again or restored to an earlier state.
            self._id, self._places = info.id, {}
            raise Trimmed(f"commit {first} of {self._log} was deleted")
        self._places = {number: at for number, at in self._places.items() if number >= first - 1}
        records: list[bytes] = []
        pieces: dict[str, list[bytes]] = {}
        if state.last_seq > before.sequence:
            async for message in self.connection.messages(
                self._log, before.sequence + 1, state.last_seq
            ):
                data, parts = message.data, message.headers.get(_PARTS)
                if message.subject.endswith(".part"):
                    pieces.setdefault(parts or "", []).append(data)
                    continue
                if parts is not None:
                    found = pieces.get(data.decode(), [])
                    if len(found) != int(parts):
                        raise Trimmed(f"pieces of commit {first + len(records)} were deleted")
                    data = b"".join(found)
                pieces.clear()
                self._places[first + len(records)] = Place(message.sequence, _digest(message.data))
                records.append(data)
        self._confirm()
        return records

    async def _stream(self) -> StreamInfo:
        try:
            return await self._info(self._log)
        except ApiError as error:
            if error.kind != NOT_FOUND:
                raise
        # It was deleted: start with an empty store, as on other servers.
        return await self._create()

    async def _is_at(self, place: Place) -> bool:
        """Whether the commit at that place is the one that this process knows.

        Only a server that was restarted can have lost it, so it is read again only after some time or an error.
        """
        now, session = self._clock.boot_micros(), self.connection.sessions
        is_sure = self._confirmed[1] == session and now - self._confirmed[0] < _SURE_FOR
        if is_sure or not place.sequence:
            return True
        try:
            got = await self.connection.api(f"STREAM.MSG.GET.{self._log}", _Got, seq=place.sequence)
        except ApiError as error:
            if error.kind != NOT_FOUND:
                raise
            return False
        if _digest(got.message.data) != place.digest:
            return False
        self._confirm()
        return True

    def _confirm(self) -> None:
        self._confirmed = (self._clock.boot_micros(), self.connection.sessions)

    # Snapshots

    async def load_snapshot(self) -> tuple[int, bytes] | None:
        self._id = (await self._stream()).id
        manifest, _ = await self._manifest()
        for snapshot in reversed(manifest.snapshots):
            state = (await self._info(self._keep)).state
            pieces = [
                message.data
                async for message in self.connection.messages(
                    self._keep, 1, state.last_seq, f"{self.subject}.chunk.{snapshot.id}"
                )
            ]
            # A power cut may have lost the newest snapshot; the log after the previous one is still stored.
            if len(pieces) == snapshot.chunks:
                self._places = {snapshot.number: snapshot.place}
                return snapshot.number, b"".join(pieces)
        self._places = {0: _START}
        return None

    async def save_snapshot(self, number: int, data: bytes) -> None:
        place = self._places.get(number)
        if place is None:
            return
        try:
            await self._save(number, place, data)
        except ApiError as error:
            if error.kind == NOT_FOUND:
                await self._create()
            raise

    async def _save(self, number: int, place: Place, data: bytes) -> None:
        log, size = self._id, self.connection.max_payload - _MARGIN
        name = f"{number}-{self._clock.new_id()}"
        chunks = range(0, len(data), size)
        for begin in chunks:
            await self.connection.store(f"{self.subject}.chunk.{name}", data[begin : begin + size])
        manifest, sequence = await self._manifest()
        now = self.now()
        kept = _retained(manifest.snapshots, now)
        if kept and kept[-1].number >= number:
            await self._purge(self._keep, filter=f"{self.subject}.chunk.{name}")
            return
        kept.append(Snapshot(number, place, name, len(chunks), now))
        await self.connection.store(
            f"{self.subject}.snapshots",
            msgspec.msgpack.encode(Manifest(log, kept)),
            {_EXPECTED: str(sequence)},
        )
        await self._trim(kept, now)

    async def _trim(self, kept: list[Snapshot], now: int) -> None:
        """Delete messages that no snapshot needs, including those of a process that died while saving one."""
        if len(kept) > 1 or now - kept[0].saved_at > _SAFE_AFTER:
            # Delete all earlier messages; the commit itself stays, so that the subject has a last message.
            await self._purge(self._log, seq=kept[0].place.sequence)
        await self._purge(self._keep, filter=f"{self.subject}.snapshots", keep=2)
        used = {snapshot.id for snapshot in kept}
        chunks = f"{self.subject}.chunk."
        state = (await self._info(self._keep, subjects_filter=f"{chunks}*")).state
        for subject in state.subjects:
            name = subject.removeprefix(chunks)
            if name not in used and int(name.partition("-")[0]) < kept[-1].number:
                await self._purge(self._keep, filter=subject)

    async def _manifest(self) -> tuple[Manifest, int]:
        """The snapshots of this log, and the sequence number of the message that names them."""
        got = await self._last("snapshots")
        if got is None:
            return Manifest(), 0
        manifest = _decode_manifest(got.data)
        # Snapshots of a deleted log are useless.
        return manifest if manifest.log == self._id else Manifest(), got.seq

    async def _purge(self, stream: str, **arguments: Any) -> None:
        await self.connection.api(f"STREAM.PURGE.{stream}", dict[str, Any], **arguments)

    # Wake-ups

    def committed(self, commit: Commit) -> None:
        effects = commit.effects
        if any(row.owner is None for row in effects.rows):
            self._wakeups.notify_work()
            self.connection.publish(f"{self.subject}.work", b"")
        ended = [each.row.id for each in effects.finished] + [each.row.id for each in effects.dead]
        self._wakeups.notify_results(ended)
        for begin in range(0, len(ended), _IDS):
            ids = msgspec.msgpack.encode(ended[begin : begin + _IDS])
            self.connection.publish(f"{self.subject}.ended", ids)

    def _on_work(self, data: bytes, reply: str) -> None:
        self._wakeups.notify_work()

    def _on_ended(self, data: bytes, reply: str) -> None:
        with suppress(msgspec.MsgspecError):
            self._wakeups.notify_results(_decode_ids(data))


def _retained(snapshots: list[Snapshot], now: int) -> list[Snapshot]:
    """The newest snapshot that is certainly on disk, and the oldest one after it."""
    safe = [each for each in snapshots if now - each.saved_at > _SAFE_AFTER]
    others = [each for each in snapshots if now - each.saved_at <= _SAFE_AFTER]
    return safe[-1:] + others[:1]


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()
