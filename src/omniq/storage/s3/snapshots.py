"""Snapshots as objects: chunks, and a list of the chunks, which is written last and completes the snapshot."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

import msgspec

from omniq.clock import Clock
from omniq.errors import StorageCorrupt
from omniq.storage.s3.connection import S3Connection
from omniq.storage.s3.trimming import numbered

_CHUNK = 4 * 1024 * 1024
_QUICK = 64 * 1024
"""Bytes that are packed or unpacked without a thread: they take less than a millisecond."""

_LOADS = 5
"""Attempts to load, in case other processes replace the snapshot meanwhile."""


class _Contents(msgspec.Struct, array_like=True, frozen=True):
    chunks: list[str]
    size: int


async def save(objects: S3Connection, clock: Clock, number: int, data: bytes) -> None:
    """Store the state after that commit, unless another process has stored it."""
    packed = await _beside_the_loop(len(data), zlib.compress, data, 1)
    # Two processes may save the same number: their chunks must not mix.
    name = f"{numbered(number)}-{clock.new_id()}"
    chunks = [f"{name}-{start}" for start in range(0, len(packed), _CHUNK)]
    for chunk in chunks:
        start = int(chunk.rpartition("-")[2])
        await objects.put(f"chunk/{chunk}", packed[start : start + _CHUNK])
    contents = msgspec.json.encode(_Contents(chunks, len(data)))
    await objects.create(f"snap/{numbered(number)}", contents)


async def load(objects: S3Connection) -> tuple[int, bytes] | None:
    """The newest snapshot, and the number of the last commit in it."""
    for _ in range(_LOADS):
        heads = await objects.list("snap")
        if not heads:
            return None
        newest = heads[-1].name
        head = await objects.get(f"snap/{newest}")
        if head is None:
            continue
        try:
            contents = msgspec.json.decode(head, type=_Contents)
        except msgspec.MsgspecError as error:
            raise StorageCorrupt(f"snap/{newest} is damaged: {error}") from error
        found = [await objects.get(f"chunk/{name}") for name in contents.chunks]
        parts = [part for part in found if part is not None]
        if len(parts) == len(found):
            packed = b"".join(parts)
            return int(newest), await _beside_the_loop(contents.size, _unpack, newest, packed)
    raise StorageCorrupt(
        "the newest snapshot is not complete: objects were deleted from the bucket"
    )


async def _beside_the_loop(size: int, work: Callable[..., bytes], *args: object) -> bytes:
    """Call `work` in a thread, or here if it is quick: then a seed decides the order of a model's steps."""
    return work(*args) if size < _QUICK else await asyncio.to_thread(work, *args)


def _unpack(name: str, packed: bytes) -> bytes:
    try:
        return zlib.decompress(packed)
    except zlib.error as error:
        raise StorageCorrupt(f"snap/{name} is damaged: {error}") from error
