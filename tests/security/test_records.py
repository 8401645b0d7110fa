"""Stored bytes are data: they are read or refused, never run, and never stop a worker."""

from __future__ import annotations

import asyncio
import pickle
import random
import resource
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omniq.clock import SYSTEM_CLOCK
from omniq.errors import OmniqError, SerializationError
from omniq.models import Task
from omniq.serialization import CloudpickleSerializer, MsgspecSerializer, Serializer
from omniq.signing import Seal, SealedSerializer
from omniq.storage import open_storage
from omniq.testing.builders import a_result, a_task
from tests.security.audit_hook import audited
from tests.security.conftest import raw_store_of
from tests.security.mutator import mutated
from tests.security.raw_stores import fill, use, use_all

KEY = "a key of sixteen bytes and more"

SERIALIZERS: dict[str, Callable[[], Serializer]] = {
    "plain": MsgspecSerializer,
    "signed": lambda: SealedSerializer(MsgspecSerializer(), Seal(KEY)),
    "encrypted": lambda: SealedSerializer(MsgspecSerializer(), Seal(encryption_key=KEY)),
    "pickled": lambda: CloudpickleSerializer(KEY),
}


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (self.path, "it went off"))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.security("S01")
async def test_pickles_in_every_field_of_a_store_are_never_unpickled(store_url, tmp_path):
    async with open_storage(store_url) as storage:
        await fill(storage)
    raw_store = raw_store_of(store_url)
    restore, fuse = raw_store.save(), tmp_path / "fuse"
    bombs = [pickle.dumps(Bomb(fuse), protocol=protocol) for protocol in (0, 2, 5)]
    addresses = raw_store.addresses()

    with audited() as events:
        for number in range(5):
            # A few at a time: a damaged value may make others unreadable.
            for address in addresses[number::5]:
                raw_store.write(address, bombs[number % 3])
            with suppress(OmniqError):
                async with open_storage(store_url) as storage:
                    await use(storage)
            restore()
    raw_store.close()

    assert len(addresses) >= 12
    assert [event for event in events if event.startswith("pickle")] == []
    assert not fuse.exists()


def test_the_audit_hook_records_dangerous_events(tmp_path):
    with audited() as events:
        pickle.loads(pickle.dumps(Bomb(tmp_path / "fuse")))

    assert [event for event in events if event.startswith("pickle.find_class")]
    assert (tmp_path / "fuse").exists()


@pytest.mark.security("S01")
@pytest.mark.parametrize("name", ["plain", "signed", "encrypted"])
def test_no_other_serializer_unpickles_the_records_of_cloudpickle(name, tmp_path):
    serializer: Serializer = SERIALIZERS[name]()
    record = CloudpickleSerializer(KEY).encode_task(a_task("a", args=(Bomb(tmp_path / "fuse"),)))

    with audited() as events:
        # The same key: the signature is valid, and the record still is not unpickled.
        try:
            decoded = serializer.decode_task(record)
        except SerializationError:
            pass
        else:
            assert isinstance(decoded.args[0], bytes)

    assert events == []
    assert not (tmp_path / "fuse").exists()


def fuzz(serializer: Serializer, count: int, seed: int) -> tuple[int, int, float]:
    """Returns how many were refused, how many were read, and the longest time that one took."""
    draw = random.Random(seed)
    task = a_task(
        "a",
        args=(1, "x", (2.5, None), {3}, Decimal("1"), UUID(int=1), timedelta(1), 2**70, b"\0"),
        kwargs={"k": [{"deep": [[[]]]}]},
        metadata={"m": "é"},
    )
    whole = serializer.encode_task(task), serializer.encode_result(a_result(task, task.kwargs))
    refused = read = 0
    longest = 0.0
    for number in range(count):
        data = mutated(whole[number % 2], draw)
        for decode in (serializer.decode_task, serializer.decode_result):
            began = SYSTEM_CLOCK.monotonic()
            try:
                decode(data)
                read += 1
            except SerializationError:
                refused += 1
            longest = max(longest, SYSTEM_CLOCK.monotonic() - began)
    return refused, read, longest


@pytest.mark.security("S04")
@pytest.mark.parametrize("name", SERIALIZERS)
def test_fuzzed_records_of_every_codec_are_read_or_refused(name):
    refused, _, _ = fuzz(SERIALIZERS[name](), 2_000, seed=1)

    assert refused > 1_000


@pytest.mark.deep
@pytest.mark.timeout(240)
@pytest.mark.security("S04")
@pytest.mark.parametrize("name", SERIALIZERS)
def test_20000_fuzzed_records_of_every_codec_are_read_or_refused(name):
    before = peak_kilobytes()
    refused, read, longest = fuzz(SERIALIZERS[name](), 20_000, seed=2)
    grown = peak_kilobytes() - before

    assert refused + read == 40_000
    assert longest < 1.0
    assert grown < 64 * 1024


async def fuzz_store(url: str, rounds: int, seed: int) -> int:
    """Damage half of the values of a store and use it, repeatedly; returns the number of refusals.

    The storage is opened anew each time, as by a worker that starts.
    """
    async with open_storage(url) as storage:
        await fill(storage)
    raw_store = raw_store_of(url)
    restore, addresses, draw = raw_store.save(), raw_store.addresses(), random.Random(seed)
    refused = 0
    for _ in range(rounds):
        for address in draw.sample(addresses, len(addresses) // 2):
            raw_store.write(address, mutated(raw_store.read(address), draw))
        try:
            async with open_storage(url) as storage:
                refused += await use(storage)
        except OmniqError:
            # Opening or closing was refused.
            refused += 1
        restore()
    raw_store.close()
    return refused


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.security("S04")
@pytest.mark.fault("F73")
async def test_a_store_with_a_fuzzed_value_is_used_or_refuses_but_never_crashes(store_url):
    assert await fuzz_store(store_url, 20, seed=1) > 0


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.security("S04")
async def test_20000_fuzzed_values_of_every_store_are_read_or_refused(store_url):
    """Half of a store with a hundred records of each kind is damaged at a time, and all are read."""
    copies = [f"-{number}" for number in range(100)]
    async with open_storage(store_url) as storage:
        await fill(storage, copies)
    raw_store = raw_store_of(store_url)
    restore, addresses, draw = raw_store.save(), raw_store.addresses(), random.Random(4)
    whole = {address: raw_store.read(address) for address in addresses}

    fuzzed = refused = 0
    while fuzzed < 20_000:
        damaged = draw.sample(addresses, len(addresses) // 2)
        raw_store.write_many({address: mutated(whole[address], draw) for address in damaged})
        fuzzed += len(damaged)
        with suppress(OmniqError):
            async with open_storage(store_url) as storage:
                refused += await use_all(storage, copies)
        restore()
    raw_store.close()

    assert refused > 100


@pytest.mark.security("S04")
@pytest.mark.fault("F58", "F73")
async def test_a_damaged_task_becomes_a_dead_letter_and_blocks_no_other_task(store_url):
    async with open_storage(store_url) as storage:
        await storage.enqueue_many([a_task(name, args=("mark-" + name,)) for name in "abc"])
    raw_store = raw_store_of(store_url)
    (where,) = [each for each in raw_store.addresses() if b"mark-b" in raw_store.read(each)]
    whole = raw_store.read(where)
    body = whole.index(b"\xa9func_path")
    raw_store.write(where, whole[:body] + b"\xa9func_hath" + whole[body + 10 :])
    raw_store.close()

    async with open_storage(store_url) as storage:
        claimed = [task.id for task in await storage.reserve(10)]
        letter = await storage.get_dead("b")

    assert claimed == ["a", "c"]
    if not store_url.startswith("file"):
        # A damaged file is moved aside as a whole.
        assert letter is not None
        assert letter.failure_reason == "undecodable"


@pytest.mark.deep_on("file", "sqlite")
@pytest.mark.security("S04")
@pytest.mark.timeout(60)
async def test_a_verb_ends_when_a_value_of_its_task_is_empty(store_url):
    """It answers or refuses. It must not read and write again and again, as after a race."""
    async with open_storage(store_url) as storage:
        await fill(storage)
    raw_store = raw_store_of(store_url)
    restore = raw_store.save()
    for address in raw_store.addresses():
        raw_store.write(address, b"")
        with suppress(OmniqError):
            async with open_storage(store_url) as storage, asyncio.timeout(20):
                await use(storage)
        restore()
    raw_store.close()


@pytest.mark.fault("F58", "F73")
async def test_a_task_whose_history_is_damaged_blocks_no_other_task(store_url):
    async with open_storage(store_url) as storage:
        await fill(storage)
    raw_store = raw_store_of(store_url)
    damaged = [each for each in raw_store.addresses() if b"not yet" in raw_store.read(each)]
    for address in damaged:
        raw_store.write(address, b"\xc1 not a history")
    raw_store.close()

    async with open_storage(store_url) as storage:
        claimed = {task.id for task in await storage.reserve(20)}
        listed = {task.id for task in await storage.list_tasks()}
        await storage.list_schedules()

    assert damaged
    assert {"waiting-0", "waiting-1", "waiting-2", "only", "beat"} <= claimed
    assert claimed <= listed


BOMBS = {
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "text of four gigabytes": b"\xdb\xff\xff\xff\xff",
    "an extension of four gigabytes": b"\xc9\xff\xff\xff\xff\x01",
    "nested a hundred thousand deep": b"\x91" * 100_000 + b"\x00",
    "maps in maps": b"\x81\xa1a" * 100_000 + b"\x00",
    "tuples in tuples": b"",
    "compressed zeros": zlib.compress(bytes(10_000_000)),
}


def _bomb(name: str) -> bytes:
    if name == "tuples in tuples":
        inner = msgspec.msgpack.encode(1)
        for _ in range(2_000):
            inner = msgspec.msgpack.encode([msgspec.msgpack.Ext(1, inner)])
        return inner
    return BOMBS[name]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_kilobytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.security("S05")
@pytest.mark.fault("F66", "F67")
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_cost_bounded_time_and_memory(name):
    task = msgspec.msgpack.encode({"id": "a", "func_path": "m.f", "args": msgspec.Raw(_bomb(name))})
    seconds, before = cpu_seconds(), peak_kilobytes()

    with pytest.raises(SerializationError):
        MsgspecSerializer().decode_task(task)
    assert cpu_seconds() - seconds < 2
    assert peak_kilobytes() - before < 64 * 1024


@pytest.mark.security("S05")
def test_as_many_containers_as_a_payload_can_hold_are_read_within_bounds():
    many = b"\xdd\x00\x0f\x42\x40" + b"\x90" * 1_000_000
    task = msgspec.msgpack.encode({"id": "a", "func_path": "m.f", "args": msgspec.Raw(many)})
    seconds, before = cpu_seconds(), peak_kilobytes()

    assert len(MsgspecSerializer().decode_task(task).args) == 1_000_000
    assert cpu_seconds() - seconds < 5
    assert peak_kilobytes() - before < 192 * 1024


@pytest.mark.security("S05")
def test_colliding_keys_take_linear_time():
    # Integers that are equal modulo large powers of two share one slot of a dictionary.
    keys = {n << 40: None for n in range(20_000)}
    task = a_task("a", kwargs={"k": keys})
    serializer = MsgspecSerializer()
    data = serializer.encode_task(task)
    seconds = cpu_seconds()
    decoded = serializer.decode_task(data)

    assert len(decoded.kwargs["k"]) == 20_000
    assert cpu_seconds() - seconds < 2


_PRIME = 2**61 - 1
"""Numbers that are equal modulo this have the same hash."""

_COLLIDING: dict[str, Callable[[int], Any]] = {
    "UUIDs": lambda n: UUID(int=n * _PRIME),
    "decimals": lambda n: Decimal(n * _PRIME),
    "integers": lambda n: 2**64 * _PRIME + n * _PRIME,
    "tuples": lambda n: (1, 2**64 * _PRIME + n * _PRIME),
    "sets": lambda n: frozenset({2**64 * _PRIME + n * _PRIME}),
}


@pytest.mark.security("S05")
@pytest.mark.parametrize("place", ["set", "frozenset", "keys", "nested keys"])
@pytest.mark.parametrize("kind", _COLLIDING)
def test_values_with_equal_hashes_are_refused_in_linear_time(kind, place):
    serializer = MsgspecSerializer()
    items = [_COLLIDING[kind](n + 1) for n in range(15_000)]
    assert len(set(map(hash, items))) == 1
    (encoded,) = msgspec.msgpack.decode(
        serializer.encode_task(a_task("a", args=(items,))), type=_Encoded
    ).args
    head = struct.pack(">BI", 0xDF, len(encoded))
    if place.endswith("keys"):
        # Each item as a key, with the value None.
        data = head + b"".join(msgspec.msgpack.encode(item) + b"\xc0" for item in encoded)
        data = data if place == "keys" else b"\x91" * 20 + data
    else:
        code = 2 if place == "set" else 3
        data = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(encoded)))
    task = msgspec.msgpack.encode({"id": "a", "func_path": "m.f", "args": [msgspec.Raw(data)]})
    result = {"task_id": "a", "status": "success", "result": msgspec.Raw(data)}
    assert len(task) < 2**20
    seconds = cpu_seconds()

    with pytest.raises(SerializationError):
        serializer.decode_task(task)
    with pytest.raises(SerializationError):
        serializer.decode_result(msgspec.msgpack.encode(result))
    assert cpu_seconds() - seconds < 2


class _Encoded(msgspec.Struct):
    args: tuple[list[Any], ...]


@pytest.mark.security("S05")
def test_a_set_whose_items_have_equal_hashes_is_refused_when_it_is_enqueued():
    items = {_COLLIDING["integers"](n) for n in range(200)}

    with pytest.raises(SerializationError, match="200 items of a set, or keys, have the same hash"):
        MsgspecSerializer().encode_task(a_task("a", args=(items,)))


def test_values_with_equal_hashes_in_a_list_are_values_like_others():
    items = [_COLLIDING[kind](n) for kind in _COLLIDING for n in range(200)]
    serializer = MsgspecSerializer()
    task = a_task("a", args=(items, {"k": items}), kwargs={"k": [(items,)]})

    assert serializer.decode_task(serializer.encode_task(task)) == task


@pytest.mark.security("S05")
@pytest.mark.fault("F58")
async def test_a_file_whose_header_claims_a_huge_size_is_not_read(tmp_path):
    url = f"file://{tmp_path}/store?durability=os"
    async with open_storage(url) as storage:
        await storage.enqueue(a_task("a"))
    header = struct.pack(">4sBBHI", b"omnq", 1, 1, 0, 16)
    with (tmp_path / "store" / "tasks" / "b.c-1.0.task").open("wb") as file:
        file.write(header + b"\0\0\0\0")
        file.truncate(8 << 30)
    before = peak_kilobytes()

    async with open_storage(url) as storage:
        assert [task.id for task in await storage.reserve(5)] == ["a"]
    assert peak_kilobytes() - before < 64 * 1024


def test_decoding_fuzzed_bytes_does_not_affect_later_tasks():
    """The decoder retains nothing of a record that it refused halfway."""
    serializer = MsgspecSerializer()
    fuzz(serializer, 200, seed=5)
    task = a_task("a", args=((1, (2, (3,))),))

    assert serializer.decode_task(serializer.encode_task(task)) == task
    assert isinstance(task, Task)
