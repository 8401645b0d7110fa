"""Tasks that harm their worker: they exit, block, leak, or raise strange exceptions."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from omniq import PermanentError, Retry, Snooze, TaskContext, TaskError, current_task, task
from omniq.errors import FunctionNotFound, SerializationError

# Exceptions


class OwnBase(BaseException):
    """Not caught by `except Exception`."""


class TwoArguments(Exception):
    """Cannot be rebuilt from `args`, as unpickling does."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("two")
        self.lock = threading.Lock()


class BadText(Exception):
    """Raises SystemExit when its text is read or when it is pickled."""

    def __str__(self) -> str:
        raise SystemExit("__str__")

    __repr__ = __str__

    def __reduce__(self) -> NoReturn:
        raise SystemExit("__reduce__")


class Forgetful(TaskError):
    """A subclass that does not call the `__init__` of its base class."""

    def __init__(self, code: int) -> None:
        self.code = code


class ForgetfulSnooze(Snooze):
    """The same for a signal."""

    def __init__(self) -> None:
        self.delay = object()  # type: ignore[assignment]


def recurse() -> NoReturn:
    recurse()


def raise_cyclic() -> NoReturn:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


def raise_odd_record() -> NoReturn:
    error = TaskError("a record")
    error.message = 5  # type: ignore[assignment]
    error.retry_after = float("nan")
    error.category = "whatever"  # type: ignore[assignment]
    error.recovery_hint = "h" * 10_000_000
    raise error


def raising(error: Callable[[], BaseException]) -> Callable[[], NoReturn]:
    def throw() -> NoReturn:
        raise error()

    return throw


RAISES: dict[str, Callable[[], object]] = {
    "SystemExit": raising(lambda: SystemExit(3)),
    "KeyboardInterrupt": raising(KeyboardInterrupt),
    "StopIteration": raising(StopIteration),
    "StopAsyncIteration": raising(StopAsyncIteration),
    "GeneratorExit": raising(GeneratorExit),
    "CancelledError": raising(asyncio.CancelledError),
    "BaseExceptionGroup": raising(lambda: BaseExceptionGroup("group", [SystemExit(1), OwnBase()])),
    "MemoryError": raising(MemoryError),
    "OwnBase": raising(OwnBase),
    "RecursionError": recurse,
    "TwoArguments": raising(lambda: TwoArguments(1, 2)),
    "BadText": raising(BadText),
    "OverflowError": raising(lambda: OverflowError("x" * 100_000_000)),
    "UnicodeError": raising(lambda: UnicodeError("\udcff\0")),
    "ValueError": raise_cyclic,
    "FunctionNotFound": raising(lambda: FunctionNotFound("a.b", "not ours", elsewhere=True)),
    "SerializationError": raising(lambda: SerializationError("not ours")),
    "Forgetful": raising(lambda: Forgetful(7)),
    "TaskError": raise_odd_record,
    "TypeError": raising(ForgetfulSnooze),
}
"""By the `error_type` that should be recorded."""


def big() -> str:
    return "x" * 2_000_000


async def numbers() -> Any:
    yield 1


async def forty_two() -> int:
    return 42


RETURNS: dict[str, Callable[[], object]] = {
    "an object": object,
    "too large": big,
    "a generator": lambda: (number for number in (1, 2)),
    "an async generator": numbers,
    "too deep": lambda: nest(200),
}


def nest(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


def misbehave(kind: str) -> object:
    return (RAISES | RETURNS)[kind]()


@task(max_retries=0)
async def in_the_loop(kind: str) -> object:
    return misbehave(kind)


@task(max_retries=0)
def in_a_thread(kind: str) -> object:
    return misbehave(kind)


@task(max_retries=0, executor="process")
def in_a_process(kind: str) -> object:
    return misbehave(kind)


@task(max_retries=0, executor="process")
async def in_the_loop_of_a_process(kind: str) -> object:
    return misbehave(kind)


@task
async def good_in_the_loop(number: int) -> int:
    return number


@task
async def sleeps_in_the_loop(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@task
def good_in_a_thread(number: int) -> int:
    return number


@task(executor="process")
def good_in_a_process(number: int) -> int:
    return number


# Coroutines in unexpected places


@task
def returns_a_coroutine(ctx: TaskContext) -> Coroutine[Any, Any, tuple[str, str]]:
    return where_am_i()


async def where_am_i() -> tuple[str, str]:
    await asyncio.sleep(0)
    return threading.current_thread().name, current_task().task_id


@task(executor="async")
def blocks_the_loop_on_purpose() -> tuple[str, str]:
    return threading.current_thread().name, current_task().task_id


@task(executor="thread")
async def has_a_loop_in_a_thread() -> tuple[str, str]:
    return await where_am_i()


@task(executor="process")
async def has_a_loop_in_a_process() -> tuple[str, str]:
    return await where_am_i()


# Ignore their cancellation


@task
async def exits_in_a_subtask() -> None:
    async def inner() -> None:
        sys.exit(3)

    await asyncio.gather(inner())


@task
async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()


@task
async def cancels_itself() -> None:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(0)


@task
async def swallows_every_cancel() -> None:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


@task
async def cleans_up_for_ever() -> None:
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(60)
        await asyncio.sleep(60)
        await asyncio.sleep(60)


@task
async def shields_itself() -> None:
    inner = asyncio.ensure_future(asyncio.sleep(60))
    while not inner.done():
        try:
            await asyncio.shield(inner)
        except asyncio.CancelledError:
            if inner.done():
                raise


@task
async def returns_when_cancelled() -> str:
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    return "partial"


# Threads

gate = threading.Event()
"""Held threads wait here."""

seen: list[tuple[str, bool]] = []


@task
def holds_its_thread(ctx: TaskContext) -> str:
    gate.wait(30)
    seen.append((ctx.task_id, ctx.cancelled))
    return "late"


# Processes


@task(executor="process", max_retries=0)
def dies(how: str) -> None:
    match how:
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "closes its files":
            os.closerange(3, 256)
            time.sleep(60)


@task(executor="process", max_retries=0)
def hangs(pids: str) -> None:
    """Writes the ids of its process and of one that it has started, and never ends."""
    other = subprocess.Popen(["sleep", "60"])
    Path(pids).with_suffix(".part").write_text(f"{os.getpid()} {other.pid}")
    Path(pids).with_suffix(".part").rename(pids)
    while True:
        # In C code that never releases the interpreter lock.
        sum(range(10**11))


@task(executor="process")
def pid() -> int:
    return os.getpid()


@task(executor="process")
def environment() -> dict[str, str]:
    return dict(os.environ)


@task(executor="process")
def talks() -> None:
    sys.stdout.write("said by a child\n")
    sys.stderr.write("complained by a child\n")


@task(executor="process")
def terminates_its_own_process() -> int:
    other = subprocess.Popen(["sleep", "60"])
    other.terminate()
    return other.wait(5)


@task(executor="process")
def knows_its_task(ctx: TaskContext) -> dict[str, Any]:
    assert current_task() is ctx
    return {
        "task_id": ctx.task_id,
        "attempt": ctx.attempt,
        "token": ctx.fencing_token,
        "deadline": ctx.deadline,
        "metadata": dict(ctx.metadata),
    }


@task(executor="process")
def reports(ctx: TaskContext, until: str) -> None:
    ctx.progress(0.5, "half \udcff")
    while not Path(until).exists():
        time.sleep(0.01)


class NotYet(Snooze):
    """A subclass of a control exception."""


@task(executor="process", max_retries=1)
def signals(ctx: TaskContext, kind: str) -> int:
    if kind == "permanent":
        raise PermanentError("no use", recovery_hint="give up")
    if ctx.fencing_token == 1:
        raise Retry("again", delay=0) if kind == "retry" else NotYet(0)
    return ctx.attempt


@task(executor="process", max_retries=0)
def leaves_a_thread_behind(ctx: TaskContext) -> int:
    def report_for_ever() -> None:
        while True:
            ctx.progress(0.1)
            time.sleep(0.001)

    threading.Thread(target=report_for_ever).start()
    return os.getpid()


# The event loop


def block(seconds: float) -> None:
    time.sleep(seconds)


@task(max_retries=0)
async def blocks_the_loop(seconds: float) -> str:
    starts.append(current_task().fencing_token)
    block(seconds)
    return "done"


@task(max_retries=0)
async def blocks_the_loop_in_a_subtask(seconds: float) -> None:
    async def inner() -> None:
        block(seconds)

    await asyncio.gather(inner())


starts: list[int] = []
"""The tokens of the runs that have started."""


@task(max_retries=5)
async def waits_for_cancel(ctx: TaskContext) -> str:
    """The first run waits to be stopped, and later ones end immediately."""
    starts.append(ctx.fencing_token)
    if ctx.fencing_token > 1:
        return "second"
    try:
        await asyncio.sleep(60)
    finally:
        stopped.set()
    return "first"


stopped = threading.Event()


@task(executor="process", max_retries=5)
def waits_in_a_process(ctx: TaskContext, folder: str) -> str:
    Path(folder, f"{ctx.fencing_token}.started").touch()
    while ctx.fencing_token == 1:
        Path(folder, "alive").touch()
        time.sleep(0.005)
    return "second"
