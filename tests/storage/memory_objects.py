"""The objects of a store in memory, where a test decides when each request and each reply arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TypeVar

from omniq.errors import StorageError
from omniq.storage.s3.connection import Entry
from omniq.testing.clock import ManualClock

_T = TypeVar("_T")

SECOND = 1_000_000


class Bucket:
    """What the server holds, its time, and the steps that wait: requests, replies and pauses of processes."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.time = 1_700_000_000 * SECOND
        self.objects: dict[str, tuple[bytes, int]] = {}
        self._waiting: list[tuple[Process, asyncio.Future[None]]] = []

    async def turn(self, process: Process) -> None:
        """Wait until the test lets this process take its next step."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((process, future))
        await future

    async def step(self) -> bool:
        """Let one process that does not stand still take a step; False if there is none."""
        # Everything that can run without a step has run.
        for _ in range(20):
            await asyncio.sleep(0)
        ready = [each for each in self._waiting if not each[0].is_stopped]
        if not ready:
            return False
        chosen = self.random.choice(ready)
        self._waiting.remove(chosen)
        chosen[1].set_result(None)
        return True


class Process(ManualClock):
    """A process: its boot clock runs a little too fast or too slow, and goes on while it stands still."""

    def __init__(self, bucket: Bucket, number: int, rate: float) -> None:
        super().__init__(seed=number)
        self._bucket = bucket
        self._number = number
        self._rate = rate
        self.is_stopped = False

    def micros(self) -> int:
        return self._bucket.time

    def boot_micros(self) -> int:
        return round(self._bucket.time * self._rate)

    def monotonic(self) -> float:
        return self.boot_micros() / SECOND

    def new_id(self) -> str:
        self._ids += 1
        return f"p{self._number}x{self._ids}"

    async def sleep(self, seconds: float) -> None:
        await self._bucket.turn(self)


class MemoryObjects:
    """The requests of one process: what `S3Connection` does. Some creates get no answer."""

    def __init__(self, bucket: Bucket, process: Process, lost: float = 0) -> None:
        self._bucket = bucket
        self._process = process
        self._lost = lost

    async def _request(self, effect: Callable[[], _T]) -> _T:
        await self._bucket.turn(self._process)
        answer = effect()
        await self._bucket.turn(self._process)
        return answer

    async def create(self, name: str, data: bytes) -> bool:
        def create() -> bool:
            if name in self._bucket.objects:
                return False
            self._bucket.objects[name] = data, self._stamp()
            return True

        is_created = await self._request(create)
        if self._bucket.random.random() < self._lost:
            raise StorageError("the reply was lost")
        return is_created

    async def put(self, name: str, data: bytes) -> None:
        def put() -> None:
            self._bucket.objects[name] = data, self._stamp()

        await self._request(put)

    async def get(self, name: str) -> bytes | None:
        found = await self._request(lambda: self._bucket.objects.get(name))
        return None if found is None else found[0]

    async def modified(self, name: str) -> int | None:
        found = await self._request(lambda: self._bucket.objects.get(name))
        return None if found is None else found[1]

    async def list(self, folder: str, *, most: int | None = None) -> list[Entry]:
        def read() -> list[Entry]:
            begin = f"{folder}/"
            return [
                Entry(name.removeprefix(begin), modified, len(data))
                for name, (data, modified) in sorted(self._bucket.objects.items())
                if name.startswith(begin)
            ][:most]

        return await self._request(read)

    async def delete(self, names: Sequence[str]) -> None:
        # One by one, and in any order, as servers do.
        for name in self._bucket.random.sample(names, len(names)):
            await self._request(partial(self._bucket.objects.pop, name, None))

    def _stamp(self) -> int:
        return self._bucket.time // SECOND * SECOND
