"""With a key, sealed bytes that were stored in one place are refused in every other place.

The attack is generated: every sealed byte string that the store holds is copied over every other one.
A reader with the key then gets what was stored there before, or nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from omniq.errors import OmniqError, SerializationError
from omniq.models import Progress, Schedule
from omniq.outcomes import Failed, Retried, Succeeded
from omniq.serialization import MsgspecSerializer
from omniq.signing import Kind, Seal, SealedSerializer
from omniq.storage import open_storage
from omniq.storage.base import BaseStorage
from omniq.tasks.steps import (
    CheckpointData,
    decode_value,
    encode_checkpoint,
    encode_value,
    read_checkpoint,
    task_key,
)
from omniq.testing.builders import a_result, a_task, an_error, an_output
from tests.security.conftest import raw_store_of
from tests.security.raw_stores import Address, RawStore

KEY = "the key of this store"
KINDS = {b"T", b"R", b"C", b"P", b"S", b"D", b"O"}


class _RecordingSeal(Seal):
    """A seal that remembers all that it has made."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self.made: list[tuple[Kind, bytes]] = []

    def close(self, kind: Kind, record: bytes, *belongs_to: str) -> bytes:
        sealed = super().close(kind, record, *belongs_to)
        self.made.append((kind, sealed))
        return sealed


def _serializer(seal: Seal) -> SealedSerializer:
    return SealedSerializer(MsgspecSerializer(), seal)


async def _fill(storage: BaseStorage) -> None:
    """Two of each kind of record that is sealed."""
    names = [f"{name}-{n}" for n in (1, 2) for name in ("done", "dead", "again")]
    await storage.enqueue_many([a_task(name, priority=9, args=(name,)) for name in names])
    held = {task.id: task for task in await storage.reserve(len(names))}
    for n in (1, 2):
        done, dead, again = (held[f"{name}-{n}"] for name in ("done", "dead", "again"))
        for task in (again, dead):
            data = CheckpointData(steps={"approve": encode_value(storage.serializer, n == 1)})
            stored = encode_checkpoint(storage.serializer, task_key(task), data)
            await storage.save_checkpoint(task.id, task.token, stored)
        await storage.record(
            [
                Succeeded(done.id, done.token, a_result(done, f"value {n}")),
                Failed(dead.id, dead.token, an_error("it is over"), "for good"),
                Retried(again.id, again.token, an_error("not yet"), storage.clock.now()),
            ]
        )
    for task in await storage.reserve(2):
        report = Progress(task_id=task.id, token=task.token, fraction=0.5, message=task.id)
        await storage.report_progress([report])
        assert await storage.append_output([an_output(task.id, task.token, task.id)]) == [True]
    for n in (1, 2):
        template = a_task(f"nightly-{n}", args=(n,))
        await storage.put_schedule(Schedule(id=template.id, task=template, interval=60.0 * n))


async def _read(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except SerializationError:
        return None


async def _state(storage: BaseStorage) -> dict[tuple[str, str], Any]:
    """Everything that a reader with the key gets; None for what is refused."""
    found: dict[tuple[str, str], Any] = {}
    for n in (1, 2):
        for name in (f"done-{n}", f"dead-{n}", f"again-{n}"):
            task = await _read(partial(storage.get_task, name))
            is_readable = task is not None and task.is_verified
            found["call", name] = task.args if is_readable else None
            found["result", name] = await _read(partial(storage.get_result, name))
            found["progress", name] = await _read(partial(storage.get_progress, name))
            found["output", name] = await _read(partial(_output, storage, name))
            found["steps", name] = await _read(partial(_steps, storage, name))
            letter = await _read(partial(storage.get_dead, name))
            is_verified = letter is not None and letter.is_verified
            found["letter", name] = letter.error_details if is_verified else None
        found["schedule", str(n)] = await _read(partial(storage.get_schedule, f"nightly-{n}"))
    return found


async def _output(storage: BaseStorage, task_id: str) -> list[Any] | None:
    page = await storage.read_output(task_id)
    return [chunk.value for chunk in page.chunks] or None if page is not None else None


async def _steps(storage: BaseStorage, task_id: str) -> dict[str, Any] | None:
    letter = await storage.get_dead(task_id)
    stored = await storage.load_checkpoint(task_id) if letter is None else letter.checkpoint
    data = read_checkpoint(storage.serializer, task_key(a_task(task_id)), stored)
    steps = {name: decode_value(storage.serializer, value) for name, value in data.steps.items()}
    return steps or None


def _sealed_in(raw: RawStore, made: list[tuple[Kind, bytes]]) -> dict[Address, tuple[Kind, bytes]]:
    """The places that hold sealed bytes, with these bytes."""
    newest_first = list(reversed(made))
    places: dict[Address, tuple[Kind, bytes]] = {}
    for address in raw.addresses():
        data = raw.read(address)
        for kind, sealed in newest_first:
            if sealed in data:
                places[address] = kind, sealed
                break
    return places


def _replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    """The data with other sealed bytes in it, and with their length where MessagePack says it."""
    before, after = _length(old) + old, _length(new) + new
    return data.replace(before, after) if before in data else data.replace(old, new)


def _length(data: bytes) -> bytes:
    size = len(data)
    return bytes([0xC4, size]) if size < 256 else b"\xc5" + size.to_bytes(2, "big")


@pytest.mark.security("S37")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("method", ["signing_key", "encryption_key"])
async def test_sealed_bytes_are_refused_in_every_other_place(store_url, method):
    """Each place gets the bytes of another record of its kind, and those of one other kind."""
    refused, places = await transplant(store_url, method, others=2)

    assert refused >= places


@pytest.mark.deep
@pytest.mark.security("S37")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["signing_key", "encryption_key"])
async def test_sealed_bytes_of_every_kind_are_refused_in_every_other_place(store_url, method):
    refused, places = await transplant(store_url, method, others=len(KINDS))

    assert refused >= places


async def transplant(store_url: str, method: str, others: int) -> tuple[int, int]:
    """Write sealed bytes of this number of kinds, from other places, to every place.

    Returns how many of them were refused, and the number of places.
    """
    seal = _RecordingSeal(**{method: KEY})
    async with open_storage(store_url, serializer=_serializer(seal)) as storage:
        await _fill(storage)
    raw = raw_store_of(store_url)
    places = _sealed_in(raw, seal.made)
    restore = raw.save()
    reader = _serializer(Seal(**{method: KEY}))

    async with open_storage(store_url, serializer=reader) as storage:
        expected = await _state(storage)
    assert None not in (expected["call", "done-1"], expected["steps", "dead-2"])
    assert expected["letter", "dead-1"] is not None
    assert {kind for kind, _ in places.values()} == KINDS
    refused = 0
    for number, (address, (_, sealed)) in enumerate(places.items()):
        for _, other in _one_of_each(places, address, first=number)[:others]:
            raw.write(address, _replaced(raw.read(address), sealed, other))
            async with open_storage(store_url, serializer=reader) as storage:
                found = await _state(storage)
            changed = {key for key in found if found[key] != expected[key]}
            assert {key: found[key] for key in changed} == dict.fromkeys(changed)
            refused += bool(changed)
            restore()
    raw.close()
    return refused, len(places)


def _one_of_each(
    places: dict[Address, tuple[Kind, bytes]], own: Address, first: int
) -> list[tuple[Kind, bytes]]:
    """Sealed bytes of each kind from other places; of the own kind those of another record.

    Those of the own kind are the first, and `first` chooses the kind that follows.
    """
    own_kind, _ = places[own]
    chosen = {kind: (kind, sealed) for at, (kind, sealed) in places.items() if at != own}
    other_kinds = sorted(chosen.keys() - {own_kind})
    start = first % len(other_kinds)
    kinds = [own_kind, *other_kinds[start:], *other_kinds[:start]]
    return [chosen[kind] for kind in kinds if kind in chosen and chosen[kind] != places[own]]


@pytest.mark.security("S38")
async def test_what_was_stored_without_the_key_is_refused(store_url):
    """Checkpoints, schedules and progress that are not sealed are as if they were not there."""
    async with open_storage(store_url) as storage:
        await _fill(storage)
    async with open_storage(store_url, serializer=_serializer(Seal(KEY))) as storage:
        found = await _state(storage)
        schedules = await storage.list_schedules()

    assert [key for key, value in found.items() if value] == []
    assert schedules == []


@pytest.mark.security("S38")
async def test_a_dead_letter_that_is_not_verified_is_not_signed_with_other_arguments(store_url):
    async with open_storage(store_url) as storage:
        await storage.enqueue(a_task("forged"))
        (task,) = await storage.reserve(1)
        await storage.record([Failed("forged", task.token, an_error("over"), "for good")])
    async with open_storage(store_url, serializer=_serializer(Seal(KEY))) as storage:
        shown = await storage.get_dead_task("forged")
        assert shown is not None
        assert not shown.is_verified
        with pytest.raises(OmniqError, match="its stored call cannot be read"):
            await storage.retry_dead("forged", task=a_task("forged", args=("other",)))
        assert await storage.get_dead("forged") is not None
