"""A hostile Redis server: what it sends must end in typed errors, never in a hang or a leak.

    python -m tests.faults.redis_fuzz --streams 100000
    python -m tests.faults.redis_fuzz --seed 17 --streams 1     # one of them again

Each stream is one connection. Its seed decides what the server sends for each request: valid replies of any
shape, errors of every kind, pieces, several replies together, none, replies before the request, pushes, huge and
nested values, garbage, and an end in the middle. On some streams the client is a bare connection with several
calls under way, on others it is a storage with its verbs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from unittest import mock

import hiredis
import msgspec

from omniq.errors import OmniqError
from omniq.models import Progress, TaskStatus
from omniq.outcomes import Failed, Released, Succeeded
from omniq.storage.redis import RedisStorage, connection, error_replies, scripts
from omniq.storage.redis.connection import ServerConnection, pack
from omniq.testing.builders import a_result, a_task, an_error

_TOGETHER = 60

LONGEST = 20.0
"""Seconds after which a stream counts as a hang; the time limits of the client are far below."""

_LIMITS = {"_REPLY_SECONDS": 0.3, "_CONNECT_SECONDS": 1.0, "_CONNECT_WAIT_SECONDS": 1.5}
_CODES = (*error_replies._CODES, "MOVED 1 127.0.0.1:1", "ASK 1 :0", "ERR unknown command 'EVALSHA'")


def a_value(draw: random.Random, depth: int = 0) -> bytes:
    """A valid reply."""
    kind = draw.randrange(12 if depth < 6 else 7)
    match kind:
        case 0:
            return b"+%b\r\n" % draw.choice((b"OK", b"PONG", b"", b"moved", b"lost", b"full"))
        case 1:
            return b":%d\r\n" % draw.choice((0, 1, -1, 2**53, -(2**63), 2**63 - 1))
        case 2:
            return b"$-1\r\n"
        case 3:
            return b"-%b\r\n" % draw.choice(_CODES).encode()
        case 4 | 5 | 6:
            data = draw.choice(
                (b"", b"0", b"1700000000000000", b"\xff\xfe", b"{p}:2:wake", draw.randbytes(9))
            )
            return b"$%d\r\n%b\r\n" % (len(data), data)
        case 7:
            return b"*-1\r\n"
        case _:
            parts = [
                a_value(draw, depth + 1) for _ in range(draw.choice((0, 1, 2, 3, 4, 5, 7, 12)))
            ]
            return b"*%d\r\n%b" % (len(parts), b"".join(parts))


def a_push(draw: random.Random) -> bytes:
    names = (b"message", b"subscribe", b"invalidate", b"pmessage")
    head = draw.choice((b">3", b"*3", b">2"))
    return head + b"\r\n$7\r\n" + draw.choice(names)[:7].ljust(7) + b"\r\n" + a_value(draw) * 2


def garbage(draw: random.Random) -> bytes:
    return draw.choice(
        (
            draw.randbytes(draw.randrange(1, 200)),
            b"*1\r\n" * draw.choice((8, 10, 5_000)) + b":1\r\n",
            b"$%d\r\n" % draw.choice((10**9, 2**31, 2**63, 10**30, -2)),
            b"*%d\r\n" % draw.choice((-2, 2**33, 2**63, 10**30)),
            b"$100000\r\n" + b"x" * 100_000 + b"\r\n",
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            b"\r\n" * 50,
            b":1x\r\n",
            b"%1\r\n+a\r\n+b\r\n",
            b"~2\r\n+a\r\n+a\r\n",
            b"#t\r\n,1.5\r\n(99999999999999999999\r\n_\r\n=7\r\ntxt:abc\r\n",
            b",nan\r\n,inf\r\n#x\r\n",
            b"|1\r\n+k\r\n+v\r\n:1\r\n",
            b"$3\r\nabcdef\r\n",
            b"-" + draw.randbytes(40).replace(b"\r", b"").replace(b"\n", b"") + b"\r\n",
        )
    )


class HostileServer:
    """Plays one stream on each connection; the next connection gets the stream of the next seed."""

    def __init__(self, seed: int, *, greets: bool) -> None:
        self._draw = random.Random(seed)
        self._greets = greets
        self._usual = dict(_USUAL)
        self._waiting: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests = hiredis.Reader()
        draw = self._draw
        try:
            if not self._greets and draw.random() < 0.1:
                writer.write(a_value(draw))
            while data := await reader.read(1 << 16):
                requests.feed(data)
                while (request := requests.gets()) is not False:
                    if not await self._answer(request, writer):
                        return
        except (OSError, hiredis.ProtocolError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, request: list[bytes], writer: asyncio.StreamWriter) -> bool:
        """Answer one request, or not; returns whether the connection stays."""
        draw, name = self._draw, request[0].upper()
        if self._greets and (usual := self._usual.get(name)) is not None:
            writer.write(usual)
            if name == b"EVALSHA":
                # The store is opened; what follows are the verbs.
                del self._usual[name]
            return True
        kind = draw.random()
        if kind < 0.45:
            self._waiting.append(a_value(draw))
        elif kind < 0.55:
            self._waiting += [a_value(draw) for _ in range(draw.randrange(3))]
        elif kind < 0.65:
            self._waiting.append(a_push(draw))
        elif kind < 0.8:
            self._waiting.append(garbage(draw))
        elif kind < 0.85:
            return True
        elif kind < 0.9:
            return False
        if draw.random() < 0.15:
            # Held back until the next request, whose reply then may come first.
            draw.shuffle(self._waiting)
            return True
        for answer in self._waiting:
            if draw.random() < 0.3 and len(answer) < 2_000:
                cut = draw.randrange(len(answer) + 1)
                writer.write(answer[:cut])
                await asyncio.sleep(0)
                answer = answer[cut:] if draw.random() < 0.8 else b""
            writer.write(answer)
        self._waiting.clear()
        return draw.random() < 0.97


_INFO = b"redis_version:7.0.0\r\nredis_mode:standalone\r\nrole:master\r\nmaxmemory_policy:noeviction\r\n"
_USUAL = {
    b"PING": b"+PONG\r\n",
    b"CLIENT": b"+OK\r\n",
    b"SCRIPT": b"+OK\r\n",
    b"INFO": b"$%d\r\n%b\r\n" % (len(_INFO), _INFO),
    b"CONFIG": b"*0\r\n",
    b"EVALSHA": b"*3\r\n$16\r\n1700000000000000\r\n$-1\r\n$-1\r\n",
}


async def use_a_connection(url: str, draw: random.Random, seen: Counter[str]) -> None:
    """Several calls under way on one connection, some of which are dropped, and a subscription."""
    client = ServerConnection(url, name="fuzz", hash_tag="p")
    calls: list[Awaitable[object]] = [
        asyncio.ensure_future(client.command("GET", str(number)))
        for number in range(draw.randrange(1, 6))
    ]
    if draw.random() < 0.3:
        calls.append(
            asyncio.ensure_future(client.send(pack("EVALSHA", "x", 0), after=pack("SCRIPT")))
        )
    if draw.random() < 0.3:
        calls.append(asyncio.ensure_future(client.listen(["a", "b"], lambda *_: None)))
    if draw.random() < 0.2:
        asyncio.ensure_future(calls[0]).cancel()
    done, late = await asyncio.wait(list(map(asyncio.ensure_future, calls)), timeout=2.0)
    for call in late:
        # Only a subscription has no time limit.
        call.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for call in done:
        note(None if call.cancelled() else call.exception(), seen)
    await client.close()


def verbs(storage: RedisStorage) -> list[Callable[[], Awaitable[object]]]:
    task = a_task("a")
    return [
        lambda: storage.enqueue(task),
        lambda: storage.enqueue_many([task, a_task("b", unique="k")]),
        lambda: storage.reserve(3),
        lambda: storage.record([Succeeded("a", 1, a_result(task)), Failed("b", 1, an_error())]),
        lambda: storage.record_and_reserve([Released("a", 1)], 2),
        lambda: storage.renew(),
        lambda: storage.stats(),
        lambda: storage.list_tasks(),
        lambda: storage.list_tasks(status=TaskStatus.FAILED),
        lambda: storage.list_dead(),
        lambda: storage.workers(),
        lambda: storage.gates(),
        lambda: storage.get_task("a"),
        lambda: storage.get_result("a"),
        lambda: storage.cancel("a"),
        lambda: storage.retry_dead("a"),
        lambda: storage.pause_queue("q"),
        lambda: storage.list_schedules(),
        lambda: storage.give_back_abandoned(),
        lambda: storage.save_checkpoint("a", 1, b"x"),
        lambda: storage.report_progress([Progress(task_id="a", token=1, fraction=0.5)]),
        lambda: storage.purge_expired(),
        lambda: storage.count_waiting(),
        lambda: storage._backend.read_clock(),
        lambda: storage.wait_for_work(0.01),
        lambda: storage.server_report(),
    ]


async def use_a_storage(url: str, draw: random.Random, seen: Counter[str]) -> None:
    """Some verbs of a storage, one after the other."""
    storage = RedisStorage(url, prefix="p")
    try:
        await storage.open()
    except OmniqError as error:
        note(error, seen)
        return
    for verb in draw.sample(verbs(storage), 3):
        try:
            await verb()
            note(None, seen)
        except Exception as error:
            note(error, seen)
    try:
        await storage.close()
    except Exception as error:
        note(error, seen)


def note(error: BaseException | None, seen: Counter[str]) -> None:
    """Count how a call ended. Raises what no caller may meet."""
    if error is not None and not isinstance(error, OmniqError):
        raise error
    seen["answered" if error is None else type(error).__name__] += 1


@asynccontextmanager
async def serving(seed: int, path: str, *, greets: bool) -> AsyncIterator[None]:
    """A hostile server at that socket."""
    server = HostileServer(seed, greets=greets)
    handlers: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
    is_over = False

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_over:
            # Accepted before the listener was closed.
            writer.transport.abort()
            return
        handlers[writer] = asyncio.create_task(server.serve(reader, writer))

    listener = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        is_over = True
        # asyncio on Python 3.11 leaks a connection that is accepted while its listener is closed. So the
        # listener accepts nothing any more, and what it has accepted is served, before it is closed.
        for socket in listener.sockets:
            asyncio.get_running_loop().remove_reader(socket.fileno())
        for _ in range(3):
            await asyncio.sleep(0)
        listener.close()
        for writer, handler in handlers.items():
            handler.cancel()
            writer.transport.abort()
        await asyncio.gather(*handlers.values(), return_exceptions=True)
        os.unlink(path)


async def play(seed: int, seen: Counter[str], folder: str) -> None:
    """One stream."""
    draw = random.Random(f"client {seed}")
    greets = seed % 4 == 0
    path = f"{folder}/{seed}.sock"
    use = use_a_storage if greets else use_a_connection
    async with serving(seed, path, greets=greets):
        async with asyncio.timeout(LONGEST):
            await use(f"unix://{path}", draw, seen)


class Report(msgspec.Struct):
    """What the streams have shown."""

    streams: int
    seconds: float
    seen: dict[str, int]
    files_before: int
    files_after: int
    tasks_after: int
    kibibytes: int
    """What Python has allocated after the streams, beyond what it had after the first tenth of them."""


async def run(first: int, streams: int) -> Report:
    """Play that many streams, several at a time. Raises the first error that is no typed one."""
    seen: Counter[str] = Counter()
    files = len(os.listdir("/proc/self/fd"))
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: problems.append(repr(context))
    )
    began, settled = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        seeds = iter(range(first, first + streams))

        async def play_some() -> None:
            nonlocal settled
            for seed in seeds:
                try:
                    await play(seed, seen, folder)
                except BaseException as error:
                    error.add_note(f"python -m tests.faults.redis_fuzz --seed {seed} --streams 1")
                    raise
                if not settled and seed - first >= streams // 10:
                    settled = _allocated()

        async with asyncio.TaskGroup() as group:
            for _ in range(_TOGETHER):
                group.create_task(play_some())
    await asyncio.sleep(0.1)
    gc.collect()
    if problems:
        raise AssertionError(f"the event loop reported: {problems[:3]}")
    return Report(
        streams,
        time.monotonic() - began,
        dict(seen.most_common()),
        files,
        len(os.listdir("/proc/self/fd")),
        len(asyncio.all_tasks()) - 1,
        max(0, _allocated() - settled) // 1024,
    )


def _allocated() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 1


def fuzz(first: int, streams: int) -> Report:
    """Play the streams with short time limits."""
    limits = [mock.patch.object(connection, name, value) for name, value in _LIMITS.items()]
    limits.append(mock.patch.object(scripts, "RETRY_SECONDS", 0.1))
    for limit in limits:
        limit.start()
    try:
        return asyncio.run(run(first, streams))
    finally:
        for limit in limits:
            limit.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tracemalloc.start()
    report = fuzz(options.seed, options.streams)
    print(msgspec.json.format(msgspec.json.encode(report)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
