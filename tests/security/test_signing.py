"""With a key, an attacker who can write to a store cannot change, forge, move or read its records."""

from __future__ import annotations

import hmac
from datetime import timedelta
from typing import Any

import pytest

from omniq import AsyncTaskQueue
from omniq.errors import SerializationError, SettingsError
from omniq.models import TaskStatus
from omniq.serialization import CloudpickleSerializer, MsgspecSerializer, serializer_for
from omniq.settings import Settings
from omniq.signing import CHECKPOINT, RESULT, TASK, Seal, SealedSerializer
from omniq.storage import open_storage
from omniq.testing.builders import a_result, a_task
from tests.security import sample_tasks
from tests.security.conftest import raw_store_of

KEY, OTHER, OLD = "the key of this store", "the key of another one", "the key of last year"

SEALS = {"signed": lambda *keys, **more: Seal(*keys, **more),
         "encrypted": lambda key, **more: Seal(encryption_key=key, **more)}  # fmt: skip


def sealed(kind: str, key: str = KEY, **more: object) -> SealedSerializer:
    return SealedSerializer(MsgspecSerializer(), SEALS[kind](key, **more))


@pytest.fixture(params=SEALS)
def kind(request) -> str:
    return str(request.param)


@pytest.mark.security("S22")
def test_a_record_that_was_changed_in_any_bit_is_refused(kind):
    serializer = sealed(kind)
    data = serializer.encode_task(a_task("a", args=("x",)))
    assert serializer.decode_task(data).args == ("x",)

    for place in range(len(data)):
        for bit in (0, 3, 7):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            with pytest.raises(SerializationError, match="the signature is wrong"):
                serializer.decode_task(bytes(changed))
    for cut in range(len(data)):
        with pytest.raises(SerializationError, match="the signature is wrong"):
            serializer.decode_task(data[:cut])


@pytest.mark.security("S22")
def test_a_record_of_another_key_or_of_none_is_refused(kind):
    serializer = sealed(kind)
    for forged in (
        sealed(kind, OTHER).encode_task(a_task("a")),
        MsgspecSerializer().encode_task(a_task("a")),
        b"",
    ):
        with pytest.raises(SerializationError, match="the signature is wrong"):
            serializer.decode_task(forged)


@pytest.mark.security("S22")
def test_a_task_is_not_taken_for_a_result_nor_a_result_for_a_task(kind):
    seal = SEALS[kind](KEY)

    assert seal.open(TASK, seal.close(TASK, b"record")) == b"record"
    for made, asked in ((TASK, RESULT), (RESULT, TASK)):
        with pytest.raises(SerializationError):
            seal.open(asked, seal.close(made, b"record"))


def test_a_signature_is_the_hmac_of_header_kind_places_and_record():
    """As the standard library computes it."""
    data = Seal(KEY).close(CHECKPOINT, b"record", "a", "tasks.work")
    key = hmac.digest(KEY.encode(), b"omniq sign", "sha256")
    places = b"\0\0\0\1a" + b"\0\0\0\x0atasks.work"

    assert data[10:42] == hmac.digest(key, data[:10] + b"C" + places + b"record", "sha256")


@pytest.mark.security("S22")
def test_a_signed_record_is_not_taken_for_an_encrypted_one_of_the_same_key():
    signed, encrypted = sealed("signed"), sealed("encrypted")
    record = signed.encode_task(a_task("a"))

    assert encrypted.decode_task(record).id == "a"
    forged = record[:1] + b"\x02" + record[2:]
    with pytest.raises(SerializationError):
        encrypted.decode_task(forged)


@pytest.mark.security("S22")
def test_a_key_can_be_replaced_while_workers_run(kind):
    before, after = sealed(kind, OLD), sealed(kind, KEY, old_keys=[OLD])
    between = sealed(kind, OLD, old_keys=[KEY])
    task = a_task("a", args=("kept",))

    assert after.decode_task(before.encode_task(task)) == task
    assert between.decode_task(after.encode_task(task)) == task
    with pytest.raises(SerializationError):
        before.decode_task(after.encode_task(task))
    # Without the old key, the records that it sealed are refused as if forged.
    with pytest.raises(SerializationError):
        sealed(kind, KEY).decode_task(before.encode_task(task))


def test_signing_can_be_replaced_by_encryption_while_workers_run():
    signed = sealed("signed")
    both = SealedSerializer(MsgspecSerializer(), Seal(KEY, encryption_key=OTHER))
    task = a_task("a")

    assert both.decode_task(signed.encode_task(task)) == task
    assert both.decode_task(both.encode_task(task)) == task


def test_encrypted_records_are_unreadable_and_differ_each_time():
    serializer = sealed("encrypted")
    task = a_task("a", args=("canary-1234",), kwargs={"k": "canary-5678"})
    first, second = serializer.encode_task(task), serializer.encode_task(task)

    assert first != second
    assert b"canary" not in first + second
    assert serializer.decode_task(first) == serializer.decode_task(second) == task


@pytest.mark.parametrize("bad", ["", "short", "fifteen letters"])
def test_a_key_that_can_be_guessed_is_refused(bad):
    for make in (
        lambda: Seal(bad),
        lambda: Seal(encryption_key=bad),
        lambda: Seal(KEY, old_keys=[bad]),
    ):
        with pytest.raises(SettingsError, match="at least 16 bytes"):
            make()
    with pytest.raises(SettingsError, match="needs a signing key"):
        Seal()


def test_the_settings_choose_signing_or_encryption():
    def began(**settings: str) -> bytes:
        return serializer_for(Settings(**settings)).encode_task(a_task("a"))[:2]  # type: ignore[arg-type]

    assert began()[0] != 0xC1
    assert began(signing_key=KEY) == b"\xc1\x01"
    assert began(encryption_key=KEY) == b"\xc1\x02"
    assert began(encryption_key=KEY, signing_key=OTHER) == b"\xc1\x02"
    assert began(serializer="cloudpickle", encryption_key=KEY) == b"\xc1\x02"
    old = serializer_for(Settings(signing_key="0" * 16)).encode_task(a_task("a"))
    new = Settings(signing_key=KEY, old_keys=f"{'0' * 16} {'1' * 16}")
    assert serializer_for(new).decode_task(old).id == "a"


def test_pickles_are_signed_and_encrypted_alike():
    encrypted = CloudpickleSerializer(None, encryption_key=KEY)
    record = encrypted.encode_result(a_result(a_task("a"), {"canary"}))

    assert b"canary" not in record
    assert encrypted.decode_result(record).result == {"canary"}
    with pytest.raises(SerializationError):
        CloudpickleSerializer(KEY).decode_task(record)


# In a store


@pytest.fixture(params=["signing_key", "encryption_key"])
def settings(request) -> Settings:
    keys: dict[str, Any] = {request.param: KEY}
    return Settings(durability="os", **keys)


@pytest.mark.security("S22")
async def test_a_signed_call_does_not_run_under_another_id(store_url, settings):
    """The bytes of one task, stored in place of those of another, end as a dead letter."""
    plain = Settings(durability="os", signing_key=KEY)
    async with open_storage(store_url, settings=plain) as storage:
        await storage.enqueue_many(
            [a_task("aaaa", args=("pay 1",)), a_task("bbbb", args=("pay 9",))]
        )
    raw_store = raw_store_of(store_url)
    (cheap,) = [each for each in raw_store.addresses() if b"pay 1" in raw_store.read(each)]
    (dear,) = [each for each in raw_store.addresses() if b"pay 9" in raw_store.read(each)]
    whole, other = raw_store.read(cheap), raw_store.read(dear)
    # The body has the same length in both; the bytes before it belong to the row.
    start = whole.index(b"\xc1\x01")
    length = whole.index(b"pay 1") + 5 - start
    raw_store.write(dear, other.replace(_body(other, length), _body(whole, length)))
    raw_store.close()

    async with open_storage(store_url, settings=plain) as storage:
        claimed = [task.id for task in await storage.reserve(5)]
        letter = await storage.get_dead("bbbb")
    assert claimed == ["aaaa"]
    assert letter is not None
    assert (
        "its stored body belongs to" in letter.error_details or "signature" in letter.error_details
    )


def _body(record: bytes, length: int) -> bytes:
    start = record.index(b"\xc1\x01")
    return record[start : start + length]


@pytest.mark.security("S22")
async def test_a_signed_call_does_not_run_from_another_queue_or_after_it_expired(postgres_url):
    """Cross-queue transplant and replay: the row must match what was signed."""
    chosen = Settings(durability="os", signing_key=KEY)
    async with open_storage(postgres_url, settings=chosen) as storage:
        now = storage.clock.now()
        await storage.enqueue_many(
            [
                a_task("moved", queue="slow"),
                a_task("renamed"),
                a_task("late", expires=now + timedelta(milliseconds=1)),
                a_task("whole", expires=now + timedelta(hours=1)),
            ]
        )
    raw_store = raw_store_of(postgres_url)
    for change in (
        "SET queue = 'default' WHERE id = 'moved'",
        "SET func_path = 'tasks.other' WHERE id = 'renamed'",
        "SET expires = NULL WHERE id = 'late'",
    ):
        raw_store._db.execute(f'UPDATE "{raw_store.schema}".live {change}'.encode())  # type: ignore[attr-defined]
    raw_store.close()

    async with open_storage(postgres_url, settings=chosen) as storage:
        claimed = [task.id for task in await storage.reserve(5)]
        letters = {letter.task_id: letter.failure_reason for letter in await storage.list_dead()}

    assert claimed == ["whole"]
    assert letters == dict.fromkeys(["moved", "renamed", "late"], "undecodable")


@pytest.mark.security("S22")
async def test_the_result_of_one_task_is_not_returned_for_another(store_url):
    chosen = Settings(durability="os", signing_key=KEY)
    async with open_storage(store_url, settings=chosen) as storage:
        for name in ("aaaa", "bbbb"):
            await storage.enqueue(a_task(name))
            (task,) = await storage.reserve(1)
            await storage.mark_done(name, a_result(task, f"value of {name}"))
    raw_store = raw_store_of(store_url)
    changed = 0
    for address in raw_store.addresses():
        record = raw_store.read(address)
        place = record.find(b"value of bbbb")
        if place > 0 and (start := record.rfind(b"\xc1\x01", 0, place)) >= 0:
            other = next(
                data
                for each in raw_store.addresses()
                if b"value of aaaa" in (data := raw_store.read(each))
            )
            at = other.rfind(b"\xc1\x01", 0, other.index(b"value of aaaa"))
            size = record.index(b"value of bbbb") + 13 - start
            raw_store.write(
                address, record[:start] + other[at : at + size] + record[start + size :]
            )
            changed += 1
    raw_store.close()

    assert changed == 1
    async with open_storage(store_url, settings=chosen) as storage:
        with pytest.raises(SerializationError):
            await storage.get_result("bbbb")
        result = await storage.get_result("aaaa")
    assert result is not None
    assert result.result == "value of aaaa"


@pytest.mark.security("S22")
async def test_a_worker_with_a_key_runs_no_task_that_was_enqueued_without_it(store_url, settings):
    async with AsyncTaskQueue(store_url, settings=Settings(durability="os")) as stranger:
        forged = await stranger.enqueue(sample_tasks.good, 1)
    async with AsyncTaskQueue(store_url, settings=settings) as queue:
        honest = await queue.enqueue(sample_tasks.good, 2)
        async with queue.worker() as pool:
            await pool.run_until_empty()
        result = await honest.result(timeout=30)
        dead = await queue.get_task(forged.id)

    assert result == 3
    assert dead is not None
    assert dead.status is TaskStatus.FAILED


@pytest.mark.security("S22")
async def test_arguments_and_results_are_unreadable_in_an_encrypted_store(store_url):
    chosen = Settings(durability="os", encryption_key=KEY)
    async with AsyncTaskQueue(store_url, settings=chosen) as queue:
        handle = await queue.options(metadata={"m": "canary-m"}).enqueue(
            "tests.security.secret_tasks.echo", "canary-a", word="canary-k"
        )
        await queue.schedules.add(
            "daily", "tests.security.secret_tasks.echo", args=("canary-s",), interval=3600
        )
        async with queue.worker() as pool:
            await pool.run_until_empty()
        result = await handle.result(timeout=30)
    raw_store = raw_store_of(store_url)
    everything = b"".join(raw_store.read(address) for address in raw_store.addresses())
    raw_store.close()

    assert result == ["canary-a", "canary-k"]
    assert everything
    assert b"canary-" not in everything


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_process_with_steps_resumes_under_encryption(tmp_path):
    """The child has no key of the store, and its steps are stored all the same."""
    chosen = Settings(durability="os", encryption_key=KEY, base_retry_delay=0.0)
    url = f"sqlite:///{tmp_path}/store.db"
    async with AsyncTaskQueue(url, settings=chosen) as queue:
        handle = await queue.enqueue("tests.security.secret_tasks.in_steps", str(tmp_path / "runs"))
        async with queue.worker(poll_interval=0.05):
            result = await handle.result(timeout=40)

    assert result == "step value"
    assert (tmp_path / "runs").read_text() == "step\n"
