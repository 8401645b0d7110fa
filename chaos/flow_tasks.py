"""The flows of `chaos.flow_kills`: their functions, and how each flow must end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import PAGESIZE, mmap

import msgspec

from chaos.history import current
from omniq import Flow, TaskContext, task
from omniq.models import PermanentError, TaskStatus

MEMBERS, PARTS = 6, 3

OK, FAILED, CANCELLED = TaskStatus.SUCCESS, TaskStatus.FAILED, TaskStatus.CANCELLED
_TASKS, _CALLS = 0, 1


class UnderWay:
    """What a process does now, in memory that outlives it: how many tasks, and how many calls of the store."""

    def __init__(self) -> None:
        self._counts = mmap(-1, PAGESIZE)

    @contextmanager
    def task(self) -> Iterator[None]:
        yield from self._counted(_TASKS)

    @contextmanager
    def call(self) -> Iterator[None]:
        yield from self._counted(_CALLS)

    def _counted(self, which: int) -> Iterator[None]:
        self._counts[which] += 1
        try:
            yield
        finally:
            self._counts[which] -= 1

    @property
    def has_any(self) -> bool:
        return self._counts[_TASKS] + self._counts[_CALLS] > 0


under_way = UnderWay()
"""What this process does. Each process of a run sets its own."""


@contextmanager
def _run(ctx: TaskContext) -> Iterator[None]:
    """Record the start of a run, and its end if it returns or raises."""
    journal = current.get()
    with under_way.task():
        journal.note("start", ctx.task_id, ctx.fencing_token)
        yield
        journal.note("end", ctx.task_id, ctx.fencing_token, value="returned")


@task(timeout=None)
async def member(ctx: TaskContext, number: int, seconds: float) -> int:
    with _run(ctx):
        await asyncio.sleep(seconds)
        return number


@task(timeout=None)
async def fatal(ctx: TaskContext) -> int:
    with _run(ctx):
        raise PermanentError("the plan says that this node fails for good")


@task(timeout=None)
async def callback(ctx: TaskContext, numbers: list[int]) -> int:
    with _run(ctx):
        return sum(numbers)


@task(timeout=None)
async def listed(ctx: TaskContext, count: int) -> list[int]:
    with _run(ctx):
        return list(range(count))


@task(timeout=None)
async def parent(ctx: TaskContext, seconds: float) -> int:
    with _run(ctx):
        parts = await ctx.map("part", member, range(PARTS), seconds)
        return await ctx.call("last", callback, parts)


@task(timeout=None)
async def asks(ctx: TaskContext) -> int:
    with _run(ctx):
        return await ctx.wait_for("go", int)


class Expected(msgspec.Struct, frozen=True):
    """How a flow must end: each record below it, by the rest of its id, and the value of `callback`."""

    nodes: dict[str, TaskStatus]
    value: int | None
    status: TaskStatus = OK
    sources: tuple[str, ...] = ()
    """What `callback` waits for."""
    event: str = ""
    """The node that waits for the event `go`."""


def make_flow(draw: random.Random) -> tuple[Flow, Expected]:
    """One of six kinds of flows."""
    seconds = draw.choice((0.0, 0.005, 0.02))
    flow, total = Flow(), sum(range(MEMBERS))
    kind = draw.choice(("group", "chain", "mapped", "parent", "event", "failing"))
    members = tuple(f"m.{number:06d}" for number in range(MEMBERS))
    match kind:
        case "group" | "mapped":
            items = range(MEMBERS) if kind == "group" else flow.add("list", listed, MEMBERS)
            flow.add("callback", callback, flow.map("m", member, items, seconds))
            others = () if kind == "group" else ("list", "m._map")
            nodes = dict.fromkeys(("m", *members, *others, "callback"), OK)
            return flow, Expected(nodes, total, sources=members)
        case "chain":
            first = flow.add("a", member, 1, seconds)
            second = flow.add("b", member, first, seconds)
            flow.add("callback", callback, [second])
            return flow, Expected(dict.fromkeys(("a", "b", "callback"), OK), 1, sources=("b",))
        case "parent":
            flow.add("callback", callback, [flow.add("p", parent, seconds)])
            parts = tuple(f"p.part.{number:06d}" for number in range(PARTS))
            nodes = dict.fromkeys(("p", "p.part", *parts, "p.last", "callback"), OK)
            return flow, Expected(nodes, sum(range(PARTS)), sources=("p", "p.last", *parts))
        case "event":
            flow.add("callback", callback, [flow.add("ask", asks)])
            nodes = dict.fromkeys(("ask", "ask.go", "callback"), OK)
            return flow, Expected(nodes, 7, sources=("ask",), event="ask")
        case _:
            bad = flow.add("bad", fatal)
            good = flow.add("good", member, 1, seconds)
            flow.add("callback", callback, [bad, good])
            flow.options(after_any=[bad]).add("clean", listed, 1)
            nodes = {"bad": FAILED, "good": OK, "callback": CANCELLED, "clean": OK}
            return flow, Expected(nodes, None, FAILED)
