"""Tasks with steps, for the tests of durable steps. They write what they do into a folder."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

from omniq import (
    Discard,
    ErrorRules,
    PermanentError,
    Retry,
    TaskContext,
    TransientError,
    current_task,
    task,
)
from tests.worker.recorder import RECORDER, until

STEPS = ("update", "index", "move", "mark", "comment")


def effect(folder: str, step: str) -> str:
    """Record that the step was done; fails as often as `plan_failures` requires."""
    with open(Path(folder, "effects"), "a") as effects:
        effects.write(f"{step}\n")
    plan = Path(folder, f"{step}.fails")
    if plan.exists():
        kind, left = plan.read_text().split()
        if int(left) > 1:
            plan.write_text(f"{kind} {int(left) - 1}")
        else:
            plan.unlink()
        raise ERRORS[kind](f"{step} is not to be had")
    return f"{step} done"


async def effect_later(folder: str, step: str) -> str:
    await asyncio.sleep(0)
    return effect(folder, step)


class Refused(Exception):
    """An error that a rule classifies as permanent."""


class Busy(Exception):
    """An error that a rule classifies as transient."""


ERRORS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "PermanentError": PermanentError,
    "TransientError": TransientError,
    "Refused": Refused,
    "Busy": Busy,
}


def plan_failures(folder: Path, step: str, times: int = 1, kind: str = "ValueError") -> None:
    (folder / f"{step}.fails").write_text(f"{kind} {times}")


def effects(folder: Path) -> list[str]:
    path = folder / "effects"
    return path.read_text().split() if path.exists() else []


@task
async def publish_async(ctx: TaskContext, folder: str) -> list[str | None]:
    first = [await ctx.step(step, effect_later, folder, step) for step in STEPS[:3]]
    last = [await ctx.step(step, effect_later, folder, step, critical=False) for step in STEPS[3:]]
    return [*first, *last]


@task
def publish_in_thread(ctx: TaskContext, folder: str) -> list[str | None]:
    first = [ctx.step(step, effect, folder, step) for step in STEPS[:3]]
    last = [ctx.step(step, effect, folder, step, critical=False) for step in STEPS[3:]]
    return [*first, *last]


@task(executor="thread")
async def publish_on_another_loop(ctx: TaskContext, folder: str) -> list[str | None]:
    return await publish_async(ctx, folder)


@task(executor="process")
def publish_in_process(ctx: TaskContext, folder: str) -> list[str | None]:
    return publish_in_thread(ctx, folder)


@task(executor="process")
async def publish_async_in_process(ctx: TaskContext, folder: str) -> list[str | None]:
    return await publish_async(ctx, folder)


PLACES = [
    publish_async,
    publish_in_thread,
    publish_on_another_loop,
    publish_in_process,
    publish_async_in_process,
]


@task
async def plain_functions_async(ctx: TaskContext, folder: str) -> list[Any]:
    """Steps of an async task that block: each in a thread, with the context of the task."""

    def where() -> list[Any]:
        is_task = current_task() is ctx
        return [threading.current_thread() is threading.main_thread(), is_task]

    # Typed as in other tasks; a type checker would require `to_thread` here.
    step: Any = ctx.step
    return list(await step("where", where))


@task
def async_function_in_thread(ctx: TaskContext, folder: str) -> None:
    step: Any = ctx.step
    step("later", effect_later, folder, "later")


@task
async def together(ctx: TaskContext, folder: str, count: int) -> int:
    """Many steps at the same time, and then a failure."""
    steps = (ctx.step(f"s{n}", effect_later, folder, f"s{n}") for n in range(count))
    await asyncio.gather(*steps)
    await ctx.step("last", effect_later, folder, "last")
    return count


@task
def threads_together(ctx: TaskContext, folder: str, count: int) -> int:
    """Steps in threads that the task starts."""
    threads = [
        threading.Thread(target=ctx.step, args=(f"s{n}", effect, folder, f"s{n}"))
        for n in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ctx.step("last", effect, folder, "last")
    return count


@task(executor="process")
def threads_in_process(ctx: TaskContext, folder: str, count: int) -> int:
    return threads_together(ctx, folder, count)


@task
async def same_name_twice(ctx: TaskContext, folder: str) -> None:
    for _ in range(2):
        await ctx.step("same", effect_later, folder, "same")


@task
async def try_again_within(ctx: TaskContext, folder: str) -> str:
    """Retries a failed step in the same run."""
    try:
        return await ctx.step("flaky", effect_later, folder, "flaky")
    except ValueError:
        return await ctx.step("flaky", effect_later, folder, "flaky")


@task
async def catches_its_own(ctx: TaskContext, folder: str) -> str:
    try:
        await ctx.step("flaky", effect_later, folder, "flaky")
    except ValueError as error:
        raise RuntimeError("could not go on") from error
    return "fine"


@task
async def returns(ctx: TaskContext, what: str) -> None:
    """Its first result can be stored; the second cannot, or not together with the first."""

    async def make(what: str) -> object:
        return {"object": object(), "large": "x" * 30_000}[what]

    await ctx.step("before", make, "large")
    await ctx.step("make", make, what)


STEPS_OF = {"first": ("one", "gone", "last"), "second": ("one", "new", "last")}


@task
async def changes_its_code(ctx: TaskContext, folder: str) -> None:
    """Has other steps in its second run, as after a deploy."""
    for step in STEPS_OF["first" if ctx.attempt == 1 else "second"]:
        await ctx.step(step, effect_later, folder, step)


@task
async def signals_in_a_step(ctx: TaskContext, folder: str, kind: str) -> str:
    async def ask() -> str:
        effect(folder, "ask")
        if ctx.fencing_token == 1:
            raise {"retry": Retry(delay=0), "discard": Discard("enough")}[kind]
        return "asked"

    return await ctx.step("ask", ask, critical=False) or "skipped"


@task
async def hangs_in_a_step(ctx: TaskContext, folder: str) -> None:
    await ctx.step("first", effect_later, folder, "first")
    await ctx.step("slow", until, RECORDER.gate("never").is_set)


@task
async def looks_back_async(ctx: TaskContext, folder: str) -> dict[str, Any]:
    before = dict(await ctx.checkpoint)
    await ctx.step("one", effect_later, folder, "one")
    await ctx.step("two", effect_later, folder, "two")
    return {"before": before, "after": dict(ctx.checkpoint), "has": "one" in ctx.checkpoint}


@task
def looks_back_in_thread(ctx: TaskContext, folder: str) -> dict[str, Any]:
    before = dict(ctx.checkpoint)
    ctx.step("one", effect, folder, "one")
    ctx.step("two", effect, folder, "two")
    return {"before": before, "after": dict(ctx.checkpoint), "has": "one" in ctx.checkpoint}


@task
async def looks_too_early(ctx: TaskContext, folder: str) -> int:
    effect(folder, "look")
    return len(ctx.checkpoint)


# Iteration


def fetched(folder: str, source: Iterable[int]) -> Iterator[int]:
    for item in source:
        effect(folder, f"fetch{item}")
        yield item


async def fetched_later(folder: str, source: Iterable[int]) -> AsyncIterator[int]:
    for item in fetched(folder, source):
        yield item


@task
async def iterate_async(ctx: TaskContext, folder: str, count: int, every: int) -> int:
    done = 0
    async for item in ctx.cursor("rows", range(count), every=every):
        effect(folder, f"row{item}")
        done += 1
    return done


@task
def iterate_in_thread(ctx: TaskContext, folder: str, count: int, every: int) -> int:
    done = 0
    for item in ctx.cursor("rows", range(count), every=every):
        effect(folder, f"row{item}")
        done += 1
    return done


@task(executor="process")
def iterate_in_process(ctx: TaskContext, folder: str, count: int, every: int) -> int:
    return iterate_in_thread(ctx, folder, count, every)


ITERATIONS = [iterate_async, iterate_in_thread, iterate_in_process]


@task
async def iterate_after(ctx: TaskContext, folder: str, count: int) -> int:
    """Its source returns the items after a given one."""

    def after(last: int | None) -> AsyncIterator[int]:
        return fetched_later(folder, range(0 if last is None else last + 1, count))

    async for item in ctx.cursor("rows", after, every=2):
        effect(folder, f"row{item}")
    async for _ in ctx.cursor("none", [], every=1):
        raise AssertionError
    return await ctx.step("end", effect_later, folder, "end") == "end done"


@task
def iterate_wrongly(ctx: TaskContext, folder: str) -> None:
    for _ in ctx.cursor("rows", fetched_later(folder, [1])):
        raise AssertionError


# Sleep


@task
async def sleep_async(ctx: TaskContext, folder: str, seconds: float) -> list[int]:
    await ctx.step("before", effect_later, folder, "before")
    effect(folder, "awake")
    await ctx.sleep(seconds)
    await ctx.step("between", effect_later, folder, "between")
    await ctx.sleep(seconds, name="second")
    return [ctx.attempt, ctx.fencing_token]


@task
def sleep_in_thread(ctx: TaskContext, folder: str, seconds: float) -> list[int]:
    ctx.step("before", effect, folder, "before")
    effect(folder, "awake")
    ctx.sleep(seconds)
    ctx.step("between", effect, folder, "between")
    ctx.sleep(seconds, name="second")
    return [ctx.attempt, ctx.fencing_token]


@task(executor="process")
def sleep_in_process(ctx: TaskContext, folder: str, seconds: float) -> list[int]:
    return sleep_in_thread(ctx, folder, seconds)


SLEEPS = [sleep_async, sleep_in_thread, sleep_in_process]


# Errors and rules

RULES = ErrorRules(permanent=(Refused,), transient=(Busy,))


@task
async def fail_with(folder: str, kind: str) -> None:
    plan_failures(Path(folder), "work", kind=kind)
    effect(folder, "work")


@task
def fail_with_in_thread(folder: str, kind: str) -> None:
    plan_failures(Path(folder), "work", kind=kind)
    effect(folder, "work")


@task(executor="process")
def fail_with_in_process(folder: str, kind: str) -> None:
    fail_with_in_thread(folder, kind)


@task(errors=RULES)
async def fail_by_own_rules(folder: str, kind: str) -> None:
    await fail_with(folder, kind)


@task(errors=RULES)
def fail_by_own_rules_in_thread(folder: str, kind: str) -> None:
    fail_with_in_thread(folder, kind)


@task(errors=RULES, executor="process")
def fail_by_own_rules_in_process(folder: str, kind: str) -> None:
    fail_with_in_thread(folder, kind)


@task(errors=ErrorRules(transient=(Refused,)))
async def fail_against_the_worker(folder: str) -> None:
    await fail_with(folder, "Refused")


def is_refused(error: BaseException) -> bool:
    return isinstance(error, Refused)


WORKER_RULES = ErrorRules(permanent=(is_refused,), only_transient=True)
