"""S3: refusals, outages, lost replies, forks, the server's time, and races on a server with a disk."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import uuid4

import pytest

from omniq.clock import SYSTEM_CLOCK
from omniq.errors import SettingsError, StorageError, StorageRefused
from omniq.models import TaskStatus
from omniq.outcomes import Succeeded
from omniq.storage import open_storage
from omniq.storage.s3 import S3Storage
from omniq.storage.s3.address import parse
from omniq.storage.s3.connection import S3Connection
from omniq.testing.builders import a_result, a_task, some_tasks
from omniq.testing.fault_proxy import FaultProxy
from omniq.testing.s3_servers import MiniStackServer, SeaweedServer


def success(task):
    return Succeeded(task.id, task.token, a_result(task))


def endpoint_of(url):
    return parse(url).endpoint


def objects_of(url):
    return S3Connection(parse(url), SYSTEM_CLOCK)


# Refusals


def test_an_option_that_s3_does_not_have_is_refused(s3_url):
    with pytest.raises(SettingsError, match="unknown option 'pool_size'"):
        open_storage(f"{s3_url}&pool_size=3")


async def test_a_missing_bucket_is_refused_with_what_to_do(s3_url):
    url = s3_url.replace("s3://omniq/", "s3://missing-bucket/")
    with pytest.raises(StorageRefused, match="there is no such bucket; create it"):
        await open_storage(url).open()


async def test_a_server_that_cannot_be_reached_is_an_error_without_a_long_wait():
    with pytest.raises(StorageError, match="s3://omniq/jobs"):
        async with asyncio.timeout(8):
            await open_storage("s3://omniq/jobs?endpoint=http://127.0.0.1:9").open()


class CarelessServer(BaseHTTPRequestHandler):
    """An S3 server that ignores If-None-Match."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def careless_endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), CarelessServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_server_that_ignores_the_condition_is_refused(careless_endpoint, s3_url):
    with pytest.raises(StorageRefused, match="ignores If-None-Match"):
        await open_storage(f"s3://omniq/jobs?endpoint={careless_endpoint}").open()


class BusyServer(BaseHTTPRequestHandler):
    """Asks callers to slow down at every third request; passes the others to `endpoint`.

    Of the conditional writes among those, every third was made, and is answered with a conflict.
    """

    protocol_version = "HTTP/1.1"
    endpoint = ""
    answers: dict[int, int]

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answers[503] += self.answers[200]
        if self.answers[503] % 3 == 2:
            return self._answer(503, b"<Error><Code>SlowDown</Code></Error>", ())
        target = HTTPConnection(self.endpoint.removeprefix("http://"), timeout=30)
        # With the host that the caller has signed.
        target.request(self.command, self.path, body, dict(self.headers))
        reply = target.getresponse()
        data = reply.read()
        target.close()
        if self.command == "PUT" and self.headers.get("If-None-Match"):
            self.answers[409] += self.answers[200]
            if self.answers[409] % 3 == 2:
                return self._answer(409, b"<Error><Code>ConditionalRequestConflict</Code></Error>")
        return self._answer(reply.status, data, reply.getheaders())

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _answer(self, status: int, data: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def busy_server(s3_url) -> Iterator[tuple[str, dict[int, int]]]:
    answers = {200: 0, 503: 0, 409: 0}
    busy = type("Busy", (BusyServer,), {"endpoint": endpoint_of(s3_url), "answers": answers})
    server = ThreadingHTTPServer(("127.0.0.1", 0), busy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.fault("F47")
async def test_on_a_server_that_throttles_and_answers_with_conflicts_each_task_is_claimed_once(
    s3_url, busy_server
):
    endpoint, answers = busy_server
    url = s3_url.replace(endpoint_of(s3_url), endpoint)
    claimed: list[str] = []

    async def drain(storage: Any) -> None:
        while True:
            try:
                tasks = await storage.reserve(1)
            except StorageError:
                continue
            if not tasks:
                return
            claimed.extend(task.id for task in tasks)
            recorded = False
            while not recorded:
                with suppress(StorageError):
                    recorded = all(await storage.record([success(task) for task in tasks]))

    async with open_storage(s3_url) as producer:
        await producer.enqueue_many(some_tasks("abcdef"))
        async with open_storage(url) as first, open_storage(url) as second:
            # A store that cannot be opened is an error, and a worker tries again.
            answers[200] = 1
            await asyncio.gather(drain(first), drain(second))
            answers[200] = 0
        tasks = await producer.list_tasks()

    assert sorted(claimed) == list("abcdef")
    assert {(task.status, task.token) for task in tasks} == {(TaskStatus.SUCCESS, 1)}
    assert answers[503] >= 6
    assert answers[409] >= 3


@pytest.mark.deep
async def test_wrong_credentials_are_refused_with_the_rights_that_are_needed(
    seaweed_server, monkeypatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageRefused, match="s3:PutObject") as raised:
        await open_storage(seaweed_server.store_url("refused")).open()

    assert "wrong" not in str(raised.value)


# Outages and lost replies


async def on_proxy(url):
    proxy = FaultProxy(endpoint_of(url))
    await proxy.start()
    return proxy, url.replace(endpoint_of(url), proxy.url)


@pytest.mark.parametrize("where", ["before_request", "before_reply", "after_reply"])
async def test_a_request_whose_connection_is_cut_is_settled(s3_url, where):
    proxy, url = await on_proxy(s3_url)
    async with open_storage(url) as storage:
        await storage.enqueue(a_task("a"))
        for number in range(6):
            proxy.cut(where)
            await storage.enqueue(a_task(f"t{number}"))
            (task,) = await storage.reserve(1)
            proxy.cut(where)
            await storage.mark_done(task.id, a_result(task))
            proxy.cancel_cuts()

        assert await storage.count_waiting() == 1
    await proxy.close()


async def test_after_an_outage_the_storage_goes_on(s3_url, monkeypatch):
    monkeypatch.setattr("omniq.storage.s3.connection.PATIENCE", 0.3)
    monkeypatch.setattr("omniq.storage.log.replica._PAUSES", (0, 0))
    proxy, url = await on_proxy(s3_url)
    async with open_storage(url) as storage:
        await storage.enqueue(a_task("a"))
        await proxy.refuse()
        proxy.cut_all()
        with pytest.raises(StorageError):
            await storage.enqueue(a_task("b"))
        await proxy.heal()
        await storage.enqueue(a_task("c"))

        assert await storage.get_task("a") is not None
        assert await storage.get_task("c") is not None
    await proxy.close()


# Forks

OPEN_IN_A_CHILD = """
import asyncio, os, sys
from omniq.errors import StorageError
from omniq.storage import open_storage

async def use():
    async with open_storage({url!r}) as storage:
        await storage.count_waiting()

asyncio.run(use())
if os.fork() == 0:
    try:
        asyncio.run(use())
    except StorageError as error:
        print(error)
        sys.stdout.flush()
        os._exit(7)
    os._exit(0)
_, status = os.wait()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_fork_of_a_process_that_has_used_s3_gets_an_error_and_does_not_hang(s3_url):
    ran = subprocess.run(
        [sys.executable, "-c", OPEN_IN_A_CHILD.format(url=s3_url)],
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert ran.returncode == 7, ran.stderr
    assert "the driver does not work after a fork; fork first" in ran.stdout


# Snapshots, time, doctor


async def test_a_process_that_opens_loads_the_snapshot_and_what_follows(s3_url, monkeypatch):
    monkeypatch.setattr("omniq.storage.s3.snapshots._CHUNK", 500)
    make = lambda: S3Storage(s3_url, snapshot_bytes=3_000, kept_for=0)  # noqa: E731
    async with make() as storage:
        for number in range(30):
            await storage.enqueue(a_task(f"t{number}"))
            await asyncio.sleep(0.02)
    objects = objects_of(s3_url)
    snapshots, chunks = await objects.list("snap"), await objects.list("chunk")
    assert snapshots
    assert len(chunks) > 1

    async with make() as storage:
        assert await storage.count_waiting() == 30


async def test_the_time_is_that_of_the_server(s3_url):
    async with open_storage(s3_url) as storage:
        await storage.enqueue(a_task("a"))

        assert abs(storage.clock.micros() - SYSTEM_CLOCK.micros()) < 2_500_000


async def test_a_lease_lasts_longer_than_its_owner_believes_as_clocks_may_differ(s3_url):
    async with S3Storage(s3_url) as storage:
        await storage.renew(lease=10)
        thread = storage._backend._thread
        assert thread is not None
        (lease,) = thread._replica.tables.leases.values()

        assert lease.until - storage.clock.micros() > 11_000_000


async def test_doctor_proves_conditional_writes_and_estimates_the_price(s3_url):
    async with S3Storage(s3_url) as storage:
        await storage.enqueue(a_task("a"))
        report = await storage.server_report()

    found = {name: (value, verdict) for name, value, verdict in report}
    assert found["conditional writes"] == ("1 of 8 concurrent creates won", "ok")
    assert found["commits"][0].startswith("1 objects")
    assert found["latency"][0].startswith("PUT ")
    assert "an idle worker" in found["price"][0]
    assert await objects_of(s3_url).list("doctor") == []


# Races, on a server that stores its objects on a disk


def race(url: str, writer: int, numbers: int, results: Any) -> None:
    async def create() -> list[int]:
        objects = objects_of(url)
        won = []
        for number in range(numbers):
            if await objects.create(f"race/{number:06d}", str(writer).encode()):
                won.append(number)
        return won

    results.put((writer, asyncio.run(create())))


async def test_of_sixteen_creates_of_one_object_one_wins(s3_url):
    writers = [objects_of(s3_url) for _ in range(16)]
    for number in range(20):
        created = await asyncio.gather(*(each.create(f"race/{number}", b"") for each in writers))
        assert sum(created) == 1


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("numbers", [1_000])
def test_of_sixteen_processes_that_create_one_object_one_wins(seaweed_server, numbers):
    url = seaweed_server.store_url(f"race-{uuid4().hex}")
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=race, args=(url, writer, numbers, results)) for writer in range(16)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert {process.exitcode for process in processes} == {0}
    won = dict(results.get() for _ in processes)

    winners = [number for numbers_won in won.values() for number in numbers_won]
    assert sorted(winners) == list(range(numbers))


@pytest.mark.deep
@pytest.mark.timeout(120)
async def test_what_was_acknowledged_survives_a_kill_of_the_server(monkeypatch):
    with SeaweedServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        async with open_storage(server.url) as storage:
            await storage.enqueue_many(some_tasks("abc"))
        server.kill()
        await asyncio.to_thread(server.start)
        async with open_storage(server.url) as storage:
            assert await storage.count_waiting() == 3


def test_a_missing_server_program_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    from omniq.testing.server_programs import ServerMissing

    with pytest.raises(ServerMissing, match="pip install ministack"), MiniStackServer():
        pass


def test_the_keys_are_in_the_environment(s3_server_url):
    assert "AWS_ACCESS_KEY_ID" in os.environ
