"""Tasks that enqueue others, in each place where a task can run."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from typing import Any

from omniq import (
    AsyncTaskQueue,
    OmniqError,
    Snooze,
    TaskContext,
    TaskNotWaiting,
    TaskQueue,
    current_task,
    task,
)

NUMBERS: list[int] = []
"""What `list_numbers` returns; a test changes it between runs."""


@task
async def leaf(number: int) -> int:
    return number * 2


@task
def other_leaf(ctx: TaskContext, number: int, *, text: str = "") -> str:
    return f"{text}{number}"


@task
def text_leaf(text: str) -> None: ...


def fail_before(ctx: TaskContext, attempt: int) -> None:
    if ctx.attempt < attempt:
        raise ValueError("again")


@task
async def in_loop(ctx: TaskContext, numbers: list[int], good_attempt: int = 1) -> list[str]:
    handles = await ctx.enqueue_many(leaf, numbers)
    one = await ctx.enqueue(other_leaf, 1, text="one")
    named = await ctx.options(name="named", priority=3).enqueue(leaf, 1000 + ctx.attempt)
    fail_before(ctx, good_attempt)
    return [*(handle.id for handle in handles), one.id, named.id]


@task
def in_thread(ctx: TaskContext, numbers: list[int], good_attempt: int = 1) -> list[str]:
    handles = ctx.enqueue_many(leaf, numbers)
    one = ctx.enqueue(other_leaf, 1, text="one")
    named = ctx.options(name="named", priority=3).enqueue(leaf, 1000 + ctx.attempt)
    fail_before(ctx, good_attempt)
    return [*(handle.id for handle in handles), one.id, named.id]


@task(executor="thread")
async def in_loop_of_thread(
    ctx: TaskContext, numbers: list[int], good_attempt: int = 1
) -> list[str]:
    return await in_loop(ctx, numbers, good_attempt)


@task(executor="process")
def in_process(ctx: TaskContext, numbers: list[int], good_attempt: int = 1) -> list[str]:
    return in_thread(ctx, numbers, good_attempt)


@task(executor="process")
async def in_loop_of_process(
    ctx: TaskContext, numbers: list[int], good_attempt: int = 1
) -> list[str]:
    return await in_loop(ctx, numbers, good_attempt)


PLACES = [in_loop, in_thread, in_loop_of_thread, in_process, in_loop_of_process]


@task
async def gathers(ctx: TaskContext, numbers: list[int]) -> list[int]:
    """Holds no slot while it waits."""
    handles = await ctx.enqueue_many(leaf, numbers)
    statuses = [await handle.status() for handle in handles]
    if not all(status.is_final for status in statuses):
        raise Snooze(0.02)
    return [await handle.result() for handle in handles]


@task
async def uses_its_handles(ctx: TaskContext) -> list[Any]:
    handle = await ctx.enqueue(leaf, 21)
    later = await ctx.options(delay=3600).enqueue(leaf, 1)
    progress = await handle.progress()
    result = await handle.result(timeout=20)
    cancelled = await later.cancel()
    status = (await later.status()).value
    return [result, cancelled, status, progress]


@task
def uses_its_handles_in_thread(ctx: TaskContext) -> list[Any]:
    handle = ctx.enqueue(leaf, 21)
    later = ctx.options(delay=3600).enqueue(leaf, 1)
    progress = handle.progress()
    result = handle.result(timeout=20)
    cancelled = later.cancel()
    return [result, cancelled, later.status().value, progress]


@task(executor="thread")
async def uses_its_handles_in_loop_of_thread(ctx: TaskContext) -> list[Any]:
    return await uses_its_handles(ctx)


@task(executor="process")
def uses_its_handles_in_process(ctx: TaskContext) -> list[Any]:
    return uses_its_handles_in_thread(ctx)


@task(executor="process")
async def uses_its_handles_in_loop_of_process(ctx: TaskContext) -> list[Any]:
    return await uses_its_handles(ctx)


USERS = [
    uses_its_handles,
    uses_its_handles_in_thread,
    uses_its_handles_in_loop_of_thread,
    uses_its_handles_in_process,
    uses_its_handles_in_loop_of_process,
]


@task(executor="thread")
async def changes_its_handles(ctx: TaskContext) -> list[Any]:
    handle = await ctx.options(delay=3600).enqueue(leaf, 21)
    changed = await handle.change(priority=5)
    await handle.run_now()
    result = await handle.result(timeout=20)
    try:
        await handle.change(priority=6)
    except TaskNotWaiting as error:
        return [changed.priority, result, error.status]
    return []


@task
def changes_its_handles_in_thread(ctx: TaskContext) -> list[Any]:
    handle = ctx.options(delay=3600).enqueue(leaf, 21)
    changed = handle.change(priority=5)
    handle.run_now()
    result = handle.result(timeout=20)
    try:
        handle.change(priority=6)
    except TaskNotWaiting as error:
        return [changed.priority, result, error.status]
    return []


@task(executor="process")
def changes_its_handles_in_process(ctx: TaskContext) -> list[Any]:
    return changes_its_handles_in_thread(ctx)


CHANGERS = [
    changes_its_handles,
    changes_its_handles_in_thread,
    changes_its_handles_in_process,
]


@task(executor="process")
async def gives_up_waiting(ctx: TaskContext) -> str:
    handle = await ctx.options(delay=3600).enqueue(leaf, 1)
    try:
        await asyncio.wait_for(handle.result(), 0.1)
    except TimeoutError:
        return "gave up"
    return "waited"


@task(executor="process")
def leaves_a_thread_that_waits(ctx: TaskContext, number: int) -> int:
    handle = ctx.options(delay=3600).enqueue(leaf, number)

    def wait() -> None:
        with suppress(OmniqError):
            handle.result()

    threading.Thread(target=wait, daemon=True).start()
    return os.getpid()


async def _enqueue_seven(ctx: TaskContext) -> None:
    await ctx.enqueue(leaf, 7)


def _enqueue_seven_blocking(ctx: TaskContext) -> None:
    ctx.enqueue(leaf, 7)


@task
async def in_steps(ctx: TaskContext) -> None:
    """Each run begins after the steps of the one before."""
    await ctx.step("first", _enqueue_seven, ctx)
    await ctx.sleep(0.01)
    in_thread_of_the_worker: Any = ctx.step("second", _enqueue_seven_blocking, ctx)
    await in_thread_of_the_worker
    await ctx.sleep(0.01)
    await ctx.enqueue(leaf, 7)


@task
def in_steps_in_thread(ctx: TaskContext) -> None:
    ctx.step("first", _enqueue_seven_blocking, ctx)
    ctx.sleep(0.01)
    ctx.step("second", _enqueue_seven_blocking, ctx)
    ctx.sleep(0.01)
    ctx.enqueue(leaf, 7)


@task(executor="process")
def in_steps_in_process(ctx: TaskContext) -> None:
    in_steps_in_thread(ctx)


STEPPERS = [in_steps, in_steps_in_thread, in_steps_in_process]


@task
async def with_a_cursor(ctx: TaskContext) -> None:
    """The second run begins at the third item."""
    async for number in ctx.cursor("numbers", [7, 7, 7, 7]):
        await ctx.enqueue(leaf, number)
        NUMBERS.append(number)
        if len(NUMBERS) == 3:
            raise ValueError("again")
    await ctx.enqueue(leaf, 7)


@task
def with_a_cursor_in_thread(ctx: TaskContext) -> None:
    for number in ctx.cursor("numbers", [7, 7, 7, 7]):
        ctx.enqueue(leaf, number)
        NUMBERS.append(number)
        if len(NUMBERS) == 3:
            raise ValueError("again")
    ctx.enqueue(leaf, 7)


@task
async def lists(ctx: TaskContext, good_attempt: int) -> None:
    """Enqueues one task for each item of a list that is another one in the next run."""
    for number in NUMBERS[:]:
        await ctx.enqueue(leaf, number)
    NUMBERS.insert(0, -ctx.attempt)
    NUMBERS.reverse()
    fail_before(ctx, good_attempt)


@task
async def equal_calls(ctx: TaskContext, count: int, good_attempt: int) -> None:
    await asyncio.gather(*[ctx.enqueue(leaf, 7) for _ in range(count)])
    fail_before(ctx, good_attempt)


@task
def from_many_threads(ctx: TaskContext, count: int, good_attempt: int) -> None:
    def enqueue(number: int) -> None:
        ctx.enqueue(leaf, number)

    threads = [threading.Thread(target=enqueue, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fail_before(ctx, good_attempt)


@task
async def same_name_twice(ctx: TaskContext) -> None:
    await ctx.options(name="x").enqueue(leaf, 1)
    await ctx.options(name="x").enqueue(leaf, 2)


@task(executor="process")
def same_name_twice_in_process(ctx: TaskContext) -> None:
    ctx.options(name="x").enqueue(leaf, 1)
    ctx.options(name="x").enqueue(leaf, 2)


@task
async def with_task_id(ctx: TaskContext, task_id: str, good_attempt: int = 1) -> str:
    handle = await ctx.options(task_id=task_id).enqueue(leaf, 1)
    fail_before(ctx, good_attempt)
    return handle.id


@task
async def with_unique(ctx: TaskContext, key: str, good_attempt: int = 1) -> str:
    handle = await ctx.options(unique=key, delay=3600).enqueue(leaf, 1)
    fail_before(ctx, good_attempt)
    return handle.id


@task
async def repeats(ctx: TaskContext, failing_attempts: int) -> None:
    await ctx.enqueue(leaf, 5)
    if ctx.attempt <= failing_attempts:
        raise ValueError("again")


@task
async def without_a_context(number: int) -> None:
    await current_task().enqueue(leaf, number)


@task
async def ignores_its_cancellation(ctx: TaskContext) -> None:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await ctx.enqueue(leaf, 1)


@task(executor="process")
def too_much_at_once(ctx: TaskContext, size: int, count: int) -> None:
    ctx.enqueue_many(text_leaf, ["x" * size for _ in range(count)])


@task
async def in_transaction(ctx: TaskContext, failures: int = 0) -> None:
    for number in range(failures + 1):
        try:
            async with ctx.transaction():
                await ctx.options(name="x").enqueue(leaf, number)
                await ctx.enqueue_many(leaf, [1, 2])
                if number < failures:
                    raise ValueError("rolled back")
        except ValueError:
            continue


@task
def in_transaction_in_thread(ctx: TaskContext, failures: int = 0) -> None:
    for number in range(failures + 1):
        try:
            with ctx.transaction():
                ctx.options(name="x").enqueue(leaf, number)
                ctx.enqueue_many(leaf, [1, 2])
                if number < failures:
                    raise ValueError("rolled back")
        except ValueError:
            continue


@task
async def at_once_in_transaction(ctx: TaskContext) -> None:
    """Also while the transaction is being opened."""
    opening = asyncio.ensure_future(_enqueue_while_opening(ctx))
    async with ctx.transaction():
        await asyncio.gather(*[ctx.enqueue(leaf, number) for number in range(4)], opening)


async def _enqueue_while_opening(ctx: TaskContext) -> None:
    while not ctx.in_transaction:  # noqa: ASYNC110 - no event says so
        await asyncio.sleep(0)
    await ctx.enqueue(leaf, 4)


@task
def at_once_in_transaction_in_thread(ctx: TaskContext) -> None:
    with ctx.transaction():
        from_many_threads(ctx, 5, 1)


@task
async def only_rolled_back(ctx: TaskContext) -> None:
    async with ctx.transaction():
        await ctx.enqueue(leaf, 1)
        raise ValueError("rolled back")


@task
async def after_the_commit(ctx: TaskContext) -> None:
    async with ctx.transaction():
        pass
    try:
        await ctx.enqueue(leaf, 1)
    except ValueError as error:
        ERRORS.append(str(error))


ERRORS: list[str] = []

POOL: Any = None


@task(max_retries=0)
def drains_its_own_pool() -> None:
    POOL.run_until_empty()


@task(max_retries=0)
async def stops_its_own_pool() -> None:
    await POOL.stop()


@task(max_retries=0)
async def stops_its_own_pool_later() -> None:
    LATER.append(asyncio.create_task(POOL.stop()))


LATER: list[asyncio.Task[None]] = []


@task
async def opens_the_default_queue() -> str:
    async with AsyncTaskQueue() as queue:
        return (await queue.enqueue(leaf, 1)).id


@task(executor="process", max_retries=0)
def opens_the_default_queue_in_process() -> None:
    TaskQueue()
