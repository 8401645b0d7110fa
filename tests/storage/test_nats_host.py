"""The host of a NATS store: who it is, what is noticed when it is gone, and repeated calls."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from omniq.errors import StorageError
from omniq.models import TaskStatus
from omniq.serialization import encode_internal
from omniq.storage.nats import NatsStorage, calls, host
from omniq.storage.nats.replies import decode_reply, raise_error
from omniq.testing.builders import a_result, a_task, some_tasks


def hosts(storage):
    """Whether the process of this storage is the host, as far as it knows."""
    return storage._backend._streams.is_host


@contextmanager
def host_process(url):
    """`omniq host` in a process."""
    command = [sys.executable, "-m", "omniq", "host", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert b"hosting nats://" in process.stdout.readline()
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()


# Who is the host


async def test_the_first_process_is_the_host_and_others_call_it(nats_url):
    async with NatsStorage(nats_url) as one, NatsStorage(nats_url) as two:
        await two.enqueue(a_task("a"))

        assert (hosts(one), hosts(two)) == (True, False)
        assert await one.count_waiting() == 1


async def test_another_process_hosts_when_the_host_closes(nats_url):
    one = NatsStorage(nats_url)
    await one.open()
    async with NatsStorage(nats_url) as two:
        assert hosts(one)
        await one.close()
        await two.enqueue(a_task("a"))

        assert hosts(two)


async def test_of_many_callers_one_becomes_the_host(nats_url):
    first = NatsStorage(nats_url)
    await first.open()
    others = [NatsStorage(nats_url) for _ in range(5)]
    for other in others:
        await other.open()
    await first.close()
    await asyncio.gather(*(other.enqueue(a_task()) for other in others))

    assert sum(map(hosts, others)) == 1
    assert await others[0].count_waiting() == 5
    for other in others:
        await other.close()


async def test_a_process_that_only_hosts_takes_the_store_from_a_worker(nats_url):
    async with NatsStorage(nats_url) as worker:
        await worker.enqueue(a_task("a"))
        assert hosts(worker)
        async with NatsStorage(f"{nats_url}?host=only") as dedicated:
            await asyncio.sleep(0.2)
            await worker.enqueue(a_task("b"))

            assert (hosts(worker), hosts(dedicated)) == (False, True)
            async with NatsStorage(f"{nats_url}?host=only") as standby:
                assert not hosts(standby)
                await dedicated.close()
                assert await standby.count_waiting() == 2
                assert await worker.count_waiting() == 2
            await dedicated.open()


async def test_a_process_that_never_hosts_says_what_to_start(nats_url, monkeypatch):
    monkeypatch.setattr(host, "_TRY_SECONDS", 0.3)

    with pytest.raises(StorageError, match="start a worker, or `omniq host`"):
        await NatsStorage(f"{nats_url}?host=never").open()


# Large calls


async def test_calls_and_answers_may_be_larger_than_a_message(nats_url):
    async with NatsStorage(nats_url), NatsStorage(nats_url) as other:
        tasks = some_tasks([f"t{number:02}" for number in range(30)], args=("x" * 100_000,))
        await other.enqueue_many(tasks)
        claimed = await other.reserve(30)

        assert [task.args for task in claimed] == [("x" * 100_000,)] * 30


# A host that is gone


async def test_a_killed_host_is_replaced_within_a_second(nats_url):
    with host_process(nats_url) as process:
        async with NatsStorage(nats_url) as storage:
            await storage.enqueue(a_task("a"))
            assert not hosts(storage)
            process.kill()
            await storage.enqueue(a_task("b"))

            assert hosts(storage)
            assert await storage.count_waiting() == 2


@pytest.mark.slow
async def test_a_host_that_stands_still_is_replaced(nats_url):
    with host_process(nats_url) as process:
        async with NatsStorage(nats_url) as storage:
            await storage.enqueue(a_task("a"))
            os.kill(process.pid, signal.SIGSTOP)
            await storage.enqueue(a_task("b"))
            assert hosts(storage)
            os.kill(process.pid, signal.SIGCONT)
            # It takes the store again, since it does nothing else.
            async with asyncio.timeout(10):
                while hosts(storage):  # noqa: ASYNC110 -- another process decides
                    await asyncio.sleep(0.05)
            await storage.enqueue(a_task("c"))

            assert await storage.count_waiting() == 3


async def test_claims_survive_the_end_of_the_host(nats_url):
    with host_process(nats_url) as process:
        async with NatsStorage(nats_url) as storage:
            await storage.enqueue_many(some_tasks(["a", "b"]))
            await storage.renew()
            first, second = await storage.reserve(2)
            process.kill()
            await storage.mark_done("a", a_result(first))
            await storage.renew()
            await storage.mark_done("b", a_result(second))

            assert (await storage.stats()).by_status[TaskStatus.SUCCESS] == 2


# Repeated calls


async def test_a_repeated_call_gets_the_answer_of_the_first(nats_url):
    async with NatsStorage(nats_url) as one, NatsStorage(nats_url) as two:
        await two.enqueue(a_task("a"))
        streams = two._backend._streams
        thread = two._backend._thread
        assert thread is not None
        assert streams.host is not None
        data = encode_internal(calls.Fence(id="same", owner="somebody", retires=False))
        first = await thread.run(streams.host.call(data))
        second = await thread.run(streams.host.call(data))

        assert first == second
        assert one._backend._streams.host is not None
        assert "same" in one._backend._streams.host._answers


async def test_a_call_of_an_unknown_kind_is_refused(nats_url):
    async with NatsStorage(nats_url), NatsStorage(nats_url) as two:
        thread, streams = two._backend._thread, two._backend._streams
        assert thread is not None
        assert streams.host is not None
        answer = await thread.run(streams.host.call(b"\x92\xa4What\x01"))

        assert answer is not None
        with pytest.raises(StorageError):
            raise_error(decode_reply(answer))
