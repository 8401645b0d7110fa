"""Tasks that log and stream, on the event loop, in a thread and in a child process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from omniq import TaskContext, current_task, task
from tests.worker.recorder import RECORDER, until

SPOKEN: list[Any] = ["one ✓", b"\0two\xff", {"three": [3, None, 1.5]}]


@task
async def talks(ctx: TaskContext) -> str:
    ctx.log("begins", level="debug", size=3)
    for chunk in SPOKEN:
        await ctx.stream(chunk)
    return "said"


@task
def talks_in_thread(ctx: TaskContext) -> str:
    ctx.log("begins", level="debug", size=3)
    for chunk in SPOKEN:
        ctx.stream(chunk)
    return "said"


@task(executor="process")
def talks_in_process(ctx: TaskContext) -> str:
    ctx.log("begins", level="debug", size=3)
    for chunk in SPOKEN:
        ctx.stream(chunk)
    return "said"


@task(executor="thread")
async def talks_on_own_loop() -> str:
    ctx = current_task()
    ctx.log("begins", level="debug", size=3)
    for chunk in SPOKEN:
        await ctx.stream(chunk)
    return "said"


PLACES = (talks, talks_in_thread, talks_in_process, talks_on_own_loop)


@task
async def fails_first(ctx: TaskContext) -> None:
    for word in ("a", "b"):
        await ctx.stream(f"{word}{ctx.attempt}")
    if ctx.attempt == 1:
        raise ConnectionError("once")


@task
async def says_and_waits(ctx: TaskContext, word: str) -> None:
    await ctx.stream(word)
    await until(RECORDER.gate("go on").is_set)
    await ctx.stream("end")


@task
async def floods(ctx: TaskContext, count: int) -> None:
    for number in range(1, count + 1):
        await ctx.stream(number)


@task
def floods_in_thread(ctx: TaskContext, count: int) -> None:
    for number in range(1, count + 1):
        ctx.stream(number)


@task(executor="process")
def floods_in_process(ctx: TaskContext, count: int) -> None:
    for number in range(1, count + 1):
        ctx.stream(number)


@task
async def says_what_is_refused(ctx: TaskContext) -> list[str]:
    refused = []
    bad: tuple[Any, ...] = (
        {1: 2},
        object(),
        [{"at": 1j}],
        "\udcff",
        2**70,
        "x" * 70_000,
        b"x" * 70_000,
    )
    for value in bad:
        try:
            await ctx.stream(value)
        except Exception as error:
            refused.append(f"{type(error).__name__}: {error}")
    ctx.log("file \udcff")
    lines: tuple[dict[str, Any], ...] = ({"level": "loud"}, {"at": object()})
    for line in lines:
        try:
            ctx.log("x", **line)
        except Exception as error:
            refused.append(f"{type(error).__name__}: {error}")
    return refused


@task
async def says_in_transaction(ctx: TaskContext) -> None:
    await ctx.stream("before")
    async with ctx.transaction():
        ctx.result = None
    await ctx.stream("after")


@task
async def says_while_it_is_stopped(ctx: TaskContext) -> None:
    await ctx.stream("begun")
    try:
        await asyncio.sleep(100)
    finally:
        ctx.log("stopped")


@task(executor="process")
def leaves_a_thread(ctx: TaskContext, folder: str) -> None:
    import threading

    def talk() -> None:
        while not (Path(folder) / "enough").exists():
            ctx.stream("of the first")

    threading.Thread(target=talk, daemon=True).start()


@task
async def follows(ctx: TaskContext) -> list[Any]:
    handle = await ctx.enqueue(talks)
    return [chunk.value async for chunk in handle.stream()]


@task
def follows_in_thread(ctx: TaskContext) -> list[Any]:
    return [chunk.value for chunk in ctx.enqueue(talks).stream()]
