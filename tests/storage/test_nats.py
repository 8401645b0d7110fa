"""What only the NATS backend has: streams, parts, snapshots in pieces, and servers that it refuses."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from contextlib import asynccontextmanager, suppress

import nats
import pytest

from omniq.errors import (
    QueueFull,
    SettingsError,
    StorageCorrupt,
    StorageError,
    StorageRefused,
)
from omniq.storage import open_storage
from omniq.storage.nats import NatsStorage, stream_log
from omniq.testing.builders import a_result, a_task, some_tasks
from omniq.testing.servers import NatsServer


@asynccontextmanager
async def connected(url):
    client = await nats.connect(url.rpartition("/")[0])
    try:
        yield client
    finally:
        await client.close()


async def api(url, verb, **arguments):
    """JetStream's reply to a request."""
    async with connected(url) as client:
        data = json.dumps(arguments).encode() if arguments else b""
        return json.loads((await client.request(f"$JS.API.{verb}", data, timeout=5)).data)


def store_of(url):
    return url.rpartition("/")[2]


async def state_of(url, prefix="OQ"):
    return (await api(url, f"STREAM.INFO.{prefix}_{store_of(url)}"))["state"]


@pytest.fixture
def safe_snapshots(monkeypatch):
    """A snapshot is surely on the disk as soon as it is saved."""
    monkeypatch.setattr(stream_log, "_SAFE_AFTER", -1)


async def saved(storage, url, number):
    """Wait until a snapshot of that commit, or a later one, is stored."""
    async with asyncio.timeout(10):
        while True:
            reply = await api(
                url,
                f"STREAM.MSG.GET.OQK_{store_of(url)}",
                last_by_subj=f"oq.{store_of(url)}.snapshots",
            )
            if "message" in reply:
                data = base64.b64decode(reply["message"]["data"])
                manifest = stream_log._decode_manifest(data)
                if manifest.snapshots[-1].number >= number:
                    return manifest
            # A snapshot begins after a call, unless another one is being saved.
            await storage.count_waiting()
            await asyncio.sleep(0.02)


# Commits


async def test_a_commit_that_is_larger_than_a_message_is_stored_in_parts(nats_url):
    async with open_storage(nats_url) as storage:
        tasks = some_tasks([f"t{number}" for number in range(40)], args=("x" * 100_000,))
        await storage.enqueue_many(tasks)
        state = await state_of(nats_url)

        assert state["messages"] == 5
        async with open_storage(nats_url) as other:
            [task] = await other.list_tasks(after="t38", limit=1)
            assert task.args == ("x" * 100_000,)
            await other.enqueue(a_task("later"))
        assert await storage.get_task("later") is not None


async def test_parts_of_a_commit_that_lost_the_race_are_ignored(nats_url):
    async with open_storage(nats_url) as storage:
        await storage.enqueue(a_task("first"))
        async with connected(nats_url) as client:
            await client.request(
                f"oq.{store_of(nats_url)}.part", b"lost", headers={"Omniq-Parts": "other"}
            )
        await storage.enqueue(a_task("second"))

        async with open_storage(nats_url) as other:
            assert {task.id for task in await other.list_tasks()} == {"first", "second"}


async def test_a_process_that_was_idle_follows_the_others(nats_url):
    async with open_storage(nats_url) as one, open_storage(nats_url) as two:
        for number in range(600):
            await one.enqueue(a_task(f"t{number}"))

        assert await two.count_waiting() == 600


# Wake-ups


async def test_an_enqueue_elsewhere_wakes_a_waiting_worker(nats_url):
    async with open_storage(nats_url) as one, open_storage(nats_url) as two:
        waiter = asyncio.create_task(two.wait_for_work(20))
        await asyncio.sleep(0.1)
        assert not waiter.done()
        await one.enqueue(a_task("a"))

        await asyncio.wait_for(waiter, 2)


async def test_the_end_of_a_task_elsewhere_wakes_its_caller(nats_url, monkeypatch):
    monkeypatch.setattr("omniq.storage.nats.backend._NOTIFIED_PAUSE", 30.0)
    async with open_storage(nats_url) as one, open_storage(nats_url) as two:
        await one.enqueue(a_task("a"))
        waiter = asyncio.create_task(one.wait_for_result("a", 20))
        [task] = await two.reserve(1)
        await asyncio.sleep(0.1)
        await two.mark_done("a", a_result(task))

        assert (await asyncio.wait_for(waiter, 2)) is not None


# Snapshots


async def test_a_snapshot_in_pieces_replaces_the_log_before_it(nats_url, safe_snapshots):
    async with NatsStorage(nats_url, snapshot_bytes=1) as storage:
        for number, size in enumerate((4, 12, 40)):
            ids = [f"t{number}-{each:02}" for each in range(size)]
            await storage.enqueue_many(some_tasks(ids, args=("x" * 50_000,)))
            manifest = await saved(storage, nats_url, number + 1)
        await asyncio.sleep(0.2)

        assert manifest.snapshots[-1].chunks == 3
        assert (await state_of(nats_url))["first_seq"] > 1
        async with open_storage(nats_url) as other:
            assert await other.count_waiting() == 56
            [task] = await other.list_tasks(after="t2-06", limit=1)
            assert task.args == ("x" * 50_000,)


async def test_the_snapshot_before_is_used_if_the_newest_is_incomplete(nats_url):
    async with NatsStorage(nats_url, snapshot_bytes=1) as storage:
        for number in range(3):
            await storage.enqueue(a_task(f"t{number}", args=("x" * 4_000 * 3**number,)))
            manifest = await saved(storage, nats_url, number + 1)
    assert len(manifest.snapshots) == 2
    await api(
        nats_url,
        f"STREAM.PURGE.OQK_{store_of(nats_url)}",
        filter=f"oq.{store_of(nats_url)}.chunk.{manifest.snapshots[-1].id}",
    )

    async with NatsStorage(nats_url, snapshot_bytes=1) as storage:
        assert await storage.count_waiting() == 3


async def test_what_a_process_left_that_died_while_saving_is_deleted(nats_url, safe_snapshots):
    chunks = f"oq.{store_of(nats_url)}.chunk."
    async with NatsStorage(nats_url, snapshot_bytes=1) as storage:
        await storage.enqueue(a_task("a"))
        await saved(storage, nats_url, 1)
        async with connected(nats_url) as client:
            await client.request(f"{chunks}0-left", b"half")
        await storage.enqueue(a_task("b"))
        await saved(storage, nats_url, 2)
        await asyncio.sleep(0.2)

    found = await api(
        nats_url, f"STREAM.INFO.OQK_{store_of(nats_url)}", subjects_filter=f"{chunks}*"
    )
    assert f"{chunks}0-left" not in found["state"]["subjects"]


# Streams that were changed by others


@pytest.mark.fault("F46")
async def test_streams_that_were_deleted_begin_an_empty_store(nats_url):
    async with open_storage(nats_url) as storage:
        await storage.enqueue_many(some_tasks(["a", "b"]))
        await storage.renew()
        await storage.reserve(1)
        for prefix in ("OQ", "OQK"):
            await api(nats_url, f"STREAM.DELETE.{prefix}_{store_of(nats_url)}")

        for _ in range(20):
            try:
                await storage.enqueue(a_task("c"))
                break
            except StorageError:
                await asyncio.sleep(0.05)
        assert [task.id for task in await storage.list_tasks()] == ["c"]
        assert (await storage.store_record()).epoch == 0


async def test_a_log_that_was_deleted_alone_does_not_get_the_old_snapshot(nats_url, safe_snapshots):
    async with NatsStorage(nats_url, snapshot_bytes=1) as storage:
        await storage.enqueue(a_task("a"))
        await saved(storage, nats_url, 1)
    await api(nats_url, f"STREAM.DELETE.OQ_{store_of(nats_url)}")

    async with open_storage(nats_url) as storage:
        assert await storage.list_tasks() == []
        await storage.enqueue(a_task("b"))
    async with open_storage(nats_url) as storage:
        assert [task.id for task in await storage.list_tasks()] == ["b"]


async def test_a_log_that_was_purged_is_reported_as_damaged(nats_url):
    async with open_storage(nats_url) as storage:
        await storage.enqueue(a_task("a"))
        await api(nats_url, f"STREAM.PURGE.OQ_{store_of(nats_url)}")

        with pytest.raises(StorageCorrupt, match="commit 1 of the log is missing"):
            await storage.enqueue(a_task("b"))
    with pytest.raises(StorageCorrupt):
        await open_storage(nats_url).open()


async def test_a_worker_notices_that_the_log_went_back(nats_url, monkeypatch):
    monkeypatch.setattr(stream_log, "_SURE_FOR", 0)
    async with NatsStorage(nats_url) as storage:
        await storage.enqueue_many(some_tasks(["a", "b", "c"]))
        await storage.renew()
        log = storage._backend._streams.log
        assert log is not None
        place = log._places
        number = max(place)
        # The same place, another commit: as after a power cut, when another process went on.
        place[number] = stream_log.Place(place[number].sequence, b"another!")

        assert len(await storage.reserve(3)) == 3
        assert max(log._places) == number + 1


# Limits


@pytest.mark.fault("F46")
async def test_a_full_stream_refuses_an_enqueue_with_queue_full():
    with NatsServer(options={"max_payload": "1MB"}) as server:
        url = f"{server.url}/full"
        async with open_storage(url) as storage:
            await storage.enqueue(a_task("a"))
            info = await api(url, "STREAM.INFO.OQ_full")
            await api(url, "STREAM.UPDATE.OQ_full", **{**info["config"], "max_bytes": 20_000})

            with pytest.raises(QueueFull):
                await storage.enqueue(a_task("b", args=("x" * 30_000,)))
            await storage.enqueue(a_task("c"))
            assert {task.id for task in await storage.list_tasks()} == {"a", "c"}


# Refused at opening


@pytest.mark.fault("F46")
async def test_a_server_without_jetstream_is_refused():
    with (
        NatsServer(options={"jetstream": "disabled"}) as server,
        pytest.raises(StorageRefused, match="start the server with -js"),
    ):
        await open_storage(server.url).open()


@pytest.mark.fault("F46")
async def test_a_stream_with_other_settings_is_refused(nats_url):
    store = store_of(nats_url)
    await api(
        nats_url,
        f"STREAM.CREATE.OQ_{store}",
        name=f"OQ_{store}",
        subjects=[f"oq.{store}.log", f"oq.{store}.part"],
        retention="workqueue",
    )

    with pytest.raises(
        StorageRefused, match="has retention 'workqueue', and a store needs 'limits'"
    ):
        await open_storage(nats_url).open()


async def test_subjects_of_another_stream_are_refused(nats_url):
    store = store_of(nats_url)
    await api(nats_url, "STREAM.CREATE.other", name=f"other_{store}", subjects=[f"oq.{store}.>"])
    await api(
        nats_url, f"STREAM.CREATE.other_{store}", name=f"other_{store}", subjects=[f"oq.{store}.>"]
    )

    with pytest.raises(StorageRefused, match="name another store in the URL"):
        await open_storage(nats_url).open()
    await api(nats_url, f"STREAM.DELETE.other_{store}")


async def test_a_user_without_rights_is_refused_with_what_to_allow():
    users = (
        '{ users: [{user: omniq, password: "{password}"}, '
        '{user: weak, password: weak, permissions: {publish: "none", subscribe: "_INBOX.>"}}] }'
    )
    server = NatsServer()
    server._options["authorization"] = users.replace("{password}", server.password)
    with server, pytest.raises(StorageRefused, match=r"allow this user \$JS.API.>"):
        await open_storage(f"nats://weak:weak@127.0.0.1:{server.port}/s").open()


async def test_a_wrong_password_is_refused_and_not_shown(nats_server_url):
    address = nats_server_url.rpartition("@")[2]

    with pytest.raises(StorageRefused, match="give the right user and password") as refused:
        await open_storage(f"nats://omniq:geheim@{address}").open()
    assert "geheim" not in str(refused.value)


class TokenServer(NatsServer):
    """A server that takes a token in place of a user and a password."""

    def __init__(self):
        super().__init__(options={"authorization": '{ token: "s3cret" }'})

    def _answers(self):
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        return False


async def test_a_token_is_accepted():
    with TokenServer() as server:
        async with open_storage(f"nats://s3cret@127.0.0.1:{server.port}/s") as storage:
            await storage.enqueue(a_task("a"))
        async with open_storage(f"nats://127.0.0.1:{server.port}/s?token=s3cret") as storage:
            assert await storage.count_waiting() == 1


async def test_a_server_that_is_not_there_is_an_error_that_says_so():
    with pytest.raises(StorageError, match="nothing listens there"):
        await open_storage("nats://127.0.0.1:1/s").open()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("nats://h/a.b", "1 to 64 letters, digits, _ or -"),
        (f"nats://h/{'x' * 65}", "1 to 64 letters"),
        ("nats://h:x/s", "is each port a number"),
        ("nats://h/s?speed=9", "unknown option 'speed'; known: replicas, monitor"),
        ("nats://h/s?replicas=9", "replicas is a number from 1 to 5"),
        ("nats://h/s?monitor=h:1", "such as http://host:8222"),
        ("nats://h/s?creds=/no/file", "creds: there is no file /no/file"),
        ("nats://h/s?tls=maybe", "tls is true or false"),
        ("nats://h/s?host=maybe", "host is auto, never or only"),
    ],
)
def test_a_wrong_url_is_refused_with_what_to_write(url, text):
    with pytest.raises(SettingsError, match=text.replace("?", r"\?")):
        open_storage(url)


def test_secrets_of_a_url_are_masked():
    with pytest.raises(SettingsError) as refused:
        open_storage("nats://me:geheim@h/s?token=auch&speed=9")

    assert "geheim" not in str(refused.value)
    assert "auch" not in str(refused.value)


# Durability


async def test_durability_is_power_only_where_the_server_shows_that_it_syncs():
    for durable, promised in ((True, "power"), (False, "os")):
        with NatsServer(durable=durable, options={"http": '"127.0.0.1:-1"'}) as server:
            monitor = server._log.read_text().partition("Starting http monitor on ")[2].split()[0]
            async with NatsStorage(f"{server.url}/s?monitor=http://{monitor}") as storage:
                assert storage.capabilities.durability == promised
                lines = {name: verdict for name, _, verdict in await storage.server_report()}
                assert lines["sync_interval"].startswith("ok" if durable else "warn")
            async with open_storage(f"{server.url}/s") as storage:
                assert storage.capabilities.durability == "os"


async def test_storages_that_open_a_new_store_together_share_it(nats_url):
    storages = [open_storage(nats_url) for _ in range(8)]
    await asyncio.gather(*(storage.open() for storage in storages))
    try:
        for storage in storages:
            await storage.enqueue(a_task())

        assert [await storage.count_waiting() for storage in storages] == [8] * 8
    finally:
        await asyncio.gather(*(storage.close() for storage in storages))


async def test_a_lost_server_is_tried_again_with_growing_pauses():
    """A lost connection begins one loop of attempts, and an attempt that fails begins no other."""
    attempts = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()

    # Durable: the task is read after the kill.
    with NatsServer(durable=True) as server:
        async with open_storage(server.url) as storage:
            waiting = asyncio.ensure_future(storage.wait_for_work(60))
            await storage.enqueue(a_task("a"))
            server.kill()
            async with await asyncio.start_server(hang_up, "127.0.0.1", server.port):
                await asyncio.sleep(1.5)
            server.start()
            waiting.cancel()
            assert await storage.get_task("a") is not None

    assert 0 < attempts <= 40
