"""Functions with @batched, on each executor. They note the sizes of their calls in the recorder."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from omniq import (
    INJECTED,
    Discard,
    PermanentError,
    Resource,
    Retry,
    Snooze,
    TaskContext,
    batched,
    current_task,
    task,
)
from omniq.concurrency.running_task import running_task
from tests.worker.recorder import RECORDER, until


@dataclass
class Doc:
    key: str
    words: int = 0


def called(name: str, count: int) -> None:
    RECORDER.note(name)
    RECORDER.facts.setdefault(name, []).append(count)


def sizes(name: str) -> list[int]:
    return list(RECORDER.facts.get(name, []))


def outcomes(words: list[str]) -> list[str | BaseException]:
    """The outcome that each word names."""
    ends: dict[str, BaseException] = {
        "fail": ValueError("fail"),
        "permanent": PermanentError("permanent"),
        "retry": Retry("later", delay=1),
        "snooze": Snooze(3600),
        "discard": Discard("not wanted"),
    }
    return [ends.get(word, word.upper()) for word in words]


@task
@batched(size=10)
async def end_async(words: list[str]) -> list[str | BaseException]:
    called("end_async", len(words))
    return outcomes(words)


@task
@batched(size=10)
def end_thread(words: list[str]) -> list[str | BaseException]:
    called("end_thread", len(words))
    return outcomes(words)


@task(executor="process")
@batched(size=10)
def end_process(words: list[str]) -> list[str | BaseException]:
    return outcomes(words)


@task(executor="thread")
@batched(size=10)
async def end_thread_loop(words: list[str]) -> list[str | BaseException]:
    await asyncio.sleep(0)
    return outcomes(words)


ENDS = {
    "async": end_async,
    "thread": end_thread,
    "process": end_process,
    "thread with a loop": end_thread_loop,
}


@task(executor="process")
@batched(size=10)
def process_ids(numbers: list[int]) -> list[tuple[int, int]]:
    return [(os.getpid(), len(numbers)) for _ in numbers]


@task(executor="process")
@batched(size=10)
def die_in_process(numbers: list[int]) -> list[int]:
    if 13 in numbers:
        os._exit(7)
    return numbers


@task(retry=[60, 60, 60])
@batched(size=100)
async def spoilt(numbers: list[int]) -> list[int]:
    """Fails as a whole if 13 is among its items."""
    called("spoilt", len(numbers))
    if 13 in numbers:
        raise ValueError("13")
    return numbers


@task
@batched(size=10)
async def too_few(numbers: list[int]) -> list[int]:
    return numbers[1:]


@task
@batched(size=10)
async def no_list(numbers: list[int]) -> list[int]:
    return {"a": 1}  # type: ignore[return-value]


@task
@batched(size=10)
async def store(numbers: list[int]) -> None:
    called("store", len(numbers))


@task
@batched(size=3, wait=30)
async def gather(numbers: list[int]) -> list[int]:
    called("gather", len(numbers))
    return numbers


@task
@batched(size=10)
async def hold(names: list[str]) -> list[str]:
    called("hold", len(names))
    await until(RECORDER.gate("hold").is_set)
    return names


@task
@batched(size=10)
async def hold_contexts(contexts: list[TaskContext], names: list[str]) -> list[str]:
    called("hold", len(names))
    RECORDER.facts["contexts"] = contexts
    await until(RECORDER.gate("hold").is_set)
    return [context.task_id for context in contexts]


@task
@batched(size=10)
def hold_thread(names: list[str]) -> list[str]:
    called("hold", len(names))
    while not RECORDER.gate("hold").is_set():
        time.sleep(0.005)
    return names


@task
@batched(size=10)
async def never_ends(names: list[str]) -> list[str]:
    called("never_ends", len(names))
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            RECORDER.note("refused to stop")


@task
@batched(size=10)
async def count_words(docs: list[Doc]) -> list[Doc | BaseException]:
    assert all(isinstance(doc, Doc) for doc in docs)
    return [Doc(doc.key, doc.words + 1) for doc in docs]


@task(executor="process")
@batched(size=10)
def count_words_in_process(docs: list[Doc]) -> list[Doc | BaseException]:
    assert all(isinstance(doc, Doc) for doc in docs)
    return [Doc(doc.key, doc.words + 1) for doc in docs]


@task
@batched(size=10)
async def who_runs(numbers: list[int]) -> list[str]:
    return [current_task().task_id for _ in numbers]


def make_client() -> Iterator[str]:
    RECORDER.note("client made")
    yield "client"
    RECORDER.note("client closed")


def make_session() -> Iterator[str]:
    RECORDER.note("session made")
    yield "session"
    RECORDER.note("session closed")


def make_for_run(ctx: TaskContext) -> str:
    return ctx.task_id


@task
@batched(size=2)
async def with_resources(
    contexts: list[TaskContext],
    numbers: list[int],
    client: Annotated[str, Resource(make_client)] = INJECTED,
    *,
    session: Annotated[str, Resource(make_session, scope="run")],
) -> list[str]:
    return [f"{client} {session} {number}" for number in numbers]


@task
@batched(size=2)
def with_resources_in_thread(
    numbers: list[int], client: Annotated[str, Resource(make_client)] = INJECTED
) -> list[str]:
    return [f"{client} {number}" for number in numbers]


@task(executor="process")
@batched(size=2)
def with_resources_in_process(
    numbers: list[int], client: Annotated[str, Resource(make_client)] = INJECTED
) -> list[str]:
    return [f"{client} {number}" for number in numbers]


@task
@batched(size=2)
async def with_resource_of_a_run(
    numbers: list[int], who: Annotated[str, Resource(make_for_run, scope="run")] = INJECTED
) -> list[str]:
    return [who for _ in numbers]


@task
async def plain(number: int) -> int:
    RECORDER.note("plain")
    return number


@task
async def numbers_up_to(count: int) -> list[int]:
    return list(range(count))


@task(version=2, upcasters={1: None})
@batched(size=10)
async def newer(words: list[str]) -> list[str]:
    called("newer", len(words))
    return words


@task
@batched(size=10)
def untyped(items):
    return list(items)


@task
@batched(size=10)
async def as_text(numbers: list[int]) -> list[str]:
    return [str(number) for number in numbers]


@task
@batched(size=10)
def note_running(numbers: list[int]) -> None:
    RECORDER.facts["running"] = running_task()


@task
@batched(size=10)
async def stop_pool(numbers: list[int]) -> None:
    await RECORDER.facts["pool"].stop()
