"""Tasks of the tests of flows."""

from __future__ import annotations

from datetime import timedelta

from omniq import ChildrenFailed, Results, TaskContext, WaitTimeout, task

UNDONE: list[str] = []
RUNS: list[str] = []


@task
async def numbers(count: int) -> list[int]:
    return list(range(count))


@task
def double(number: int) -> int:
    return 2 * number


@task
async def add(first: int, second: int) -> int:
    return first + second


@task
async def total(values: list[int]) -> int:
    return sum(values)


@task
async def add_pages(values: Results[int], start: int = 0) -> int:
    return start + sum([value async for value in values])


@task
def add_pages_in_thread(values: Results[int], start: int = 0) -> int:
    return start + sum(values)


@task(executor="process")
def add_pages_in_process(values: Results[int], start: int = 0) -> int:
    return start + sum(values)


@task
async def days(values: Results[timedelta]) -> list[int]:
    return [value.days async for value in values]


@task
async def a_day(number: int) -> timedelta:
    return timedelta(days=number)


@task
async def listed(values: list[int], *, label: str = "") -> str:
    return f"{label}{values}"


@task(max_retries=0)
async def fail(message: str) -> int:
    raise ValueError(message)


@task(max_retries=0)
async def fail_once(ctx: TaskContext, value: int) -> int:
    RUNS.append(f"once {ctx.task_id.rpartition('.')[2]}")
    if len(RUNS) == 1:
        raise ValueError("the first time")
    return value


@task
async def note(word: str) -> str:
    RUNS.append(word)
    return word


@task
async def undo(word: str) -> None:
    UNDONE.append(word)


@task(executor="async")
async def parent_on_loop(ctx: TaskContext, number: int) -> str:
    called = await ctx.call("called", double, number)
    mapped = await ctx.map("mapped", double, [1, 2, 3])
    first, second = ctx.spawn("first", double, 10), ctx.spawn("second", double, 20)
    waited = await ctx.wait(first, second)
    return f"{called} {mapped} {waited}"


def _parent(ctx: TaskContext, number: int) -> str:
    called = ctx.call("called", double, number)
    mapped = ctx.map("mapped", double, [1, 2, 3])
    first, second = ctx.spawn("first", double, 10), ctx.spawn("second", double, 20)
    waited = ctx.wait(first, second)
    return f"{called} {mapped} {waited}"


@task(executor="thread")
def parent_in_thread(ctx: TaskContext, number: int) -> str:
    return _parent(ctx, number)


@task(executor="process")
def parent_in_process(ctx: TaskContext, number: int) -> str:
    return _parent(ctx, number)


PARENTS = (parent_on_loop, parent_in_thread, parent_in_process)


@task
async def approve(ctx: TaskContext, days: int) -> str:
    try:
        answer = await ctx.wait_for("approved", bool, timeout=timedelta(days=days), prompt="Go on?")
    except WaitTimeout:
        return "too late"
    return "yes" if answer else "no"


@task
async def first_of(ctx: TaskContext) -> list[int]:
    quick, never = ctx.spawn("quick", double, 4), ctx.spawn("never", approve, 9)
    done = await ctx.wait(quick, never, enough=1)
    return [result.result for result in done]


@task(max_retries=0)
async def of_failing(ctx: TaskContext, catches: bool) -> str:
    try:
        await ctx.map("part", fail, ["a", "b"])
    except ChildrenFailed as error:
        if not catches:
            raise
        first = error.failures[0].error
        return f"{len(error.failures)} {'' if first is None else first.message}"
    return "not reached"


@task
async def spawns_only(ctx: TaskContext) -> str:
    ctx.spawn("left", double, 1)
    return "returned"


@task
async def waits_for_fact(ctx: TaskContext, name: str) -> int:
    return await ctx.wait_for(name, int)


@task
async def waits_for_other(ctx: TaskContext, task_id: str) -> int:
    value: int = await ctx.wait(task_id)
    return value + 1


@task(retry=[0.001])
async def saga_on_loop(ctx: TaskContext) -> None:
    await ctx.step("hotel", booked, "hotel", undo=undo)
    await ctx.step("flight", booked, "flight", undo=undo)
    raise ValueError("no money")


@task(executor="thread", retry=[0.001])
def saga_in_thread(ctx: TaskContext) -> None:
    ctx.step("hotel", booked_now, "hotel", undo=undone_now)
    ctx.step("flight", booked_now, "flight", undo=undone_now)
    raise ValueError("no money")


@task(executor="process", max_retries=0)
def saga_in_process(ctx: TaskContext) -> None:
    ctx.step("hotel", booked_now, "hotel", undo=undone_now)


async def booked(what: str) -> str:
    return booked_now(what)


def booked_now(what: str) -> str:
    RUNS.append(what)
    return what


def undone_now(what: str) -> None:
    UNDONE.append(what)
