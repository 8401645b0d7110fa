"""A lifespan, resources, middleware and tasks that use them. What happens is in a file, for all processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from omniq import (
    INJECTED,
    OmniqError,
    Resource,
    Task,
    TaskContext,
    TaskResult,
    current_task,
    task,
)

if TYPE_CHECKING:
    from collections import UserList

    from omniq.worker.middleware import CallNext

LOG = "OMNIQ_TEST_RESOURCE_LOG"
WORKER = "OMNIQ_TEST_WORKER_PID"


def note(what: str) -> None:
    """Append a line to the file that the test reads, if there is one."""
    if path := os.environ.get(LOG):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{what} pid={os.getpid()}\n")


# Lifespans


@dataclass
class State:
    greeting: str
    entered: int


_entered = 0


@contextlib.asynccontextmanager
async def lifespan() -> AsyncIterator[State]:
    global _entered
    _entered += 1
    note("lifespan entered")
    try:
        yield State("hello", _entered)
    finally:
        await asyncio.sleep(0)
        note("lifespan left")


async def plain_generator() -> AsyncIterator[str]:
    yield "from a generator"
    note("generator ended")


def _fail(error: BaseException) -> None:
    raise error


@contextlib.asynccontextmanager
async def raising() -> AsyncIterator[None]:
    note("raising")
    _fail(ConnectionError("no database at db:5432, postgresql://me:sesame@db/app"))
    yield


@contextlib.asynccontextmanager
async def only_in_the_worker() -> AsyncIterator[State]:
    """Fails in child processes, the first time in each."""
    global _entered
    _entered += 1
    if os.environ[WORKER] != str(os.getpid()) and _entered == 1:
        raise ConnectionError("not in a child")
    yield State("late", _entered)


@contextlib.asynccontextmanager
async def exiting() -> AsyncIterator[None]:
    _fail(SystemExit("gone"))
    yield


@contextlib.asynccontextmanager
async def hanging() -> AsyncIterator[None]:
    note("hanging")
    await asyncio.sleep(3600)
    yield


@contextlib.asynccontextmanager
async def blocking() -> AsyncIterator[None]:
    note("blocking")
    time.sleep(3600)  # noqa: ASYNC251 - it blocks the event loop on purpose
    yield


@contextlib.asynccontextmanager
async def broken_teardown() -> AsyncIterator[str]:
    yield "fine"
    note("teardown")
    raise RuntimeError("the teardown is broken")


@contextlib.asynccontextmanager
async def exiting_teardown() -> AsyncIterator[str]:
    yield "fine"
    note("teardown")
    raise SystemExit(4)


@contextlib.asynccontextmanager
async def cancelled_teardown() -> AsyncIterator[str]:
    """Awaits a task that it has cancelled, which raises CancelledError."""
    beat = asyncio.create_task(asyncio.sleep(3600))
    yield "fine"
    note("teardown")
    beat.cancel()
    await beat


@contextlib.asynccontextmanager
async def hanging_teardown() -> AsyncIterator[str]:
    yield "fine"
    note("teardown")
    await asyncio.sleep(3600)


@contextlib.asynccontextmanager
async def entered_late() -> AsyncIterator[str]:
    time.sleep(1)  # noqa: ASYNC251 - it blocks the event loop on purpose
    note("entered late")
    yield "late"
    note("left")


class Lifespans:
    @staticmethod
    async def one() -> AsyncIterator[str]:
        yield "in a class"


def not_a_lifespan() -> str:
    return "text"


# Resources


class Pool:
    """Made once for each process."""

    def __init__(self) -> None:
        self.is_open = True
        self.thread = threading.current_thread().name
        note("pool made")

    def close(self) -> None:
        self.is_open = False
        note("pool closed")


async def make_pool() -> AsyncIterator[Pool]:
    pool = Pool()
    await asyncio.sleep(0)
    yield pool
    pool.close()


class Client:
    """An async context manager: entered, and left at the end."""

    def __init__(self, pool: Annotated[Pool, Resource(make_pool)]) -> None:
        self.pool = pool
        self.is_entered = False

    async def __aenter__(self) -> Client:
        self.is_entered = True
        note("client entered")
        return self

    async def __aexit__(self, *details: object) -> None:
        note(f"client left, pool open: {self.pool.is_open}")


def make_number() -> int:
    note("number made")
    return 7


async def make_number_later() -> int:
    await asyncio.sleep(0)
    return 8


def make_semaphore() -> asyncio.Semaphore:
    return asyncio.Semaphore(1)


def make_session(ctx: TaskContext, pool: Annotated[Pool, Resource(make_pool)]) -> Iterator[Any]:
    session = {
        "attempt": ctx.attempt,
        "thread": threading.current_thread().name,
        "pool": pool.is_open,
    }
    note("session begun")
    try:
        yield session
    except Exception as error:
        note(f"session rolled back: {error!r}")
        raise
    if session.get("broken"):
        raise RuntimeError("the commit failed")
    note("session committed")


_tries: list[int] = []


def make_at_second_try() -> str:
    _tries.append(1)
    if len(_tries) == 1:
        raise ConnectionError("the resource is not there yet")
    return "made"


def swallow() -> Iterator[str]:
    with contextlib.suppress(ValueError):
        yield "swallowing"


async def hang() -> str:
    await asyncio.sleep(3600)
    return "never"


def make_report(number: object) -> Iterator[str]:
    yield f"report of {number}"


async def make_report_async(number: object) -> AsyncIterator[str]:
    yield f"report of {number}"


class MakeReport:
    def __call__(self, number: Annotated[int, Resource(make_number)]) -> Iterator[str]:
        return make_report(number)


@dataclass
class Unhashable:
    """A dataclass that can be compared has no hash."""

    def __call__(self) -> int:
        return 1


async def check_task() -> AsyncIterator[str]:
    """Fails the run if another asyncio task leaves it than has entered it, as cancel scopes do."""
    owner = asyncio.current_task()
    try:
        yield "entered"
    finally:
        if asyncio.current_task() is not owner:
            raise RuntimeError("left by another task")


async def exit_at_start() -> str:
    raise SystemExit(3)


async def exit_at_end() -> AsyncIterator[str]:
    yield "made"
    raise SystemExit(4)


def find_owner() -> str:
    try:
        return current_task().task_id
    except OmniqError:
        return "no task"


def need_itself(other: Annotated[str, Resource(lambda: "")]) -> str:
    return other


need_itself.__annotations__["other"] = Annotated[str, Resource(need_itself)]


def worker_needs_run(session: Annotated[Any, Resource(make_session, scope="run")]) -> str:
    return "impossible"


def needs_text(dsn: str) -> str:
    return dsn


PoolOf = Annotated[Pool, Resource(make_pool)]
SessionOf = Annotated[dict[str, Any], Resource(make_session, scope="run")]


@task
async def use_pool(number: int, *, pool: PoolOf = INJECTED) -> list[Any]:
    return [number, id(pool), pool.is_open]


@task
async def use_pool_too(pool: PoolOf, number: int) -> list[Any]:
    return [number, id(pool), pool.is_open]


@task
def use_pool_in_a_thread(ctx: TaskContext[State], pool: PoolOf, *rest: int) -> list[Any]:
    return [sum(rest), id(pool), ctx.attempt]


@task
async def use_everything(
    client: Annotated[Client, Resource(Client)],
    number: Annotated[int, Resource(make_number)],
    a: int,
    later: Annotated[int, Resource(make_number_later)],
    b: int = 10,
    *,
    semaphore: Annotated[asyncio.Semaphore, Resource(make_semaphore)] = INJECTED,
    **others: int,
) -> list[Any]:
    async with semaphore:
        return [a, b, client.is_entered, client.pool.is_open, number, later, others]


@task
async def use_session(value: str, *, session: SessionOf = INJECTED) -> dict[str, Any]:
    if value == "fail":
        raise ValueError("the function failed")
    if value == "break":
        session["broken"] = True
    return session


@task
def use_session_in_a_thread(value: str, *, session: SessionOf = INJECTED) -> dict[str, Any]:
    if value == "fail":
        raise ValueError("the function failed")
    if value == "break":
        session["broken"] = True
    return {**session, "here": threading.current_thread().name}


@task(executor="thread")
async def use_async_client_in_a_thread(
    *, client: Annotated[Client, Resource(Client, scope="run")] = INJECTED
) -> bool:
    await asyncio.sleep(0)
    return client.is_entered


@task
def use_async_client_in_plain_code(
    *, client: Annotated[Client, Resource(Client, scope="run")] = INJECTED
) -> bool:
    return client.is_entered


@task(executor="process")
def use_all_in_a_process(
    ctx: TaskContext[State], value: int, *, session: SessionOf = INJECTED
) -> list[Any]:
    if value < 0:
        raise ValueError("negative")
    return [value, ctx.state.greeting, ctx.state.entered, session["pool"], os.getpid()]


@task(executor="process")
async def use_all_async_in_a_process(
    ctx: TaskContext[State], value: int, *, client: Annotated[Client, Resource(Client)] = INJECTED
) -> list[Any]:
    await asyncio.sleep(0)
    return [value, ctx.state.greeting, ctx.state.entered, client.is_entered, os.getpid()]


@task
async def use_late(*, late: Annotated[str, Resource(make_at_second_try)] = INJECTED) -> str:
    return late


@task
async def use_swallowing(*, it: Annotated[str, Resource(swallow, scope="run")] = INJECTED) -> str:
    raise ValueError(f"not hidden by {it}")


@task
async def use_hanging(*, it: Annotated[str, Resource(hang)] = INJECTED) -> str:
    return it


@task
async def use_circle(*, it: Annotated[str, Resource(need_itself)] = INJECTED) -> str:
    return it


@task
async def use_mixed(*, it: Annotated[str, Resource(worker_needs_run)] = INJECTED) -> str:
    return it


@task
async def use_needy(*, it: Annotated[str, Resource(needs_text)] = INJECTED) -> str:
    return it


@task
async def for_type_checkers(it: Annotated[UserList[Any], Resource(make_number)], a: int) -> int:
    return a * len(it)


@task
async def use_number(
    *, task_context: int = 0, it: Annotated[Any, Resource(make_number)] = INJECTED
) -> Any:
    """Tests replace the annotation."""
    return it


async def make_stubborn() -> AsyncIterator[int]:
    yield os.getpid()
    note("stubborn closes")
    await asyncio.sleep(3600)


@task(executor="process")
async def use_stubborn(*, it: Annotated[int, Resource(make_stubborn)] = INJECTED) -> int:
    return it


CheckOf = Annotated[str, Resource(check_task, scope="run")]


@task
async def check_on_the_loop(fails: bool, *, it: CheckOf = INJECTED) -> str:
    if fails:
        raise ValueError("the function failed")
    return it


@task
def check_in_a_thread(fails: bool, *, it: CheckOf = INJECTED) -> str:
    if fails:
        raise ValueError("the function failed")
    return it


@task(executor="process")
def check_in_a_process(fails: bool, *, it: CheckOf = INJECTED) -> str:
    if fails:
        raise ValueError("the function failed")
    return it


@task
def exit_before(*, it: Annotated[str, Resource(exit_at_start, scope="run")] = INJECTED) -> str:
    return it


@task
def exit_after(*, it: Annotated[str, Resource(exit_at_end, scope="run")] = INJECTED) -> str:
    return it


@task(executor="process")
def use_owner_in_a_process(*, it: Annotated[str, Resource(find_owner)] = INJECTED) -> str:
    return it


@task(executor="process")
def hang_in_a_process(*, it: Annotated[str, Resource(hang)] = INJECTED) -> str:
    return it


# The state


@task
async def greet(ctx: TaskContext[State], name: str) -> str:
    return f"{ctx.state.greeting}, {name}"


@task
def greet_in_a_thread(ctx: TaskContext[State], name: str) -> str:
    return f"{ctx.state.greeting}, {name}"


@task
async def read_state(ctx: TaskContext) -> Any:
    return ctx.state


@task
def hold(ctx: TaskContext[State], folder: str) -> str:
    """Note that it runs, and return once the file `go` exists."""
    note("hold begun")
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.01)
    note("hold ended")
    return ctx.state.greeting


# Middleware


async def first(ctx: TaskContext, call_next: CallNext) -> None:
    note(f"first before {ctx.func_path}")
    await call_next()
    note("first after")


async def second(ctx: TaskContext, call_next: CallNext) -> None:
    note("second before")
    try:
        value = await call_next()
    except BaseException as error:
        note(f"second saw {error!r}")
        raise
    note(f"second got {value!r}")


async def never_calls(ctx: TaskContext, call_next: CallNext) -> None:
    note("never calls")


@task
async def leave() -> None:
    sys.exit(7)


@task
def leave_thread() -> None:
    sys.exit(7)


# Hooks


async def succeeded(task: Task, result: TaskResult) -> None:
    note(f"on_success {task.args} {result.result}")


@task(on_success=succeeded)
async def double(number: int) -> int:
    return number * 2
