"""The work that `omniq demo` gives its workers. Each run leaves a line in a diary."""

from __future__ import annotations

import hashlib
import os

from omniq.clock import SYSTEM_CLOCK
from omniq.models import PermanentError, TransientError
from omniq.tasks.context import TaskContext
from omniq.tasks.functions import task

STEPS = ("render", "upload", "index", "announce")
STEP_SECONDS = 0.7


def write_down(diary: str, line: str) -> None:
    """Append a line in one write, so that lines of several processes never mix."""
    descriptor = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


@task(max_retries=5)
async def fetch(diary: str, page: int) -> str:
    """Waits for somebody else, as most async code does."""
    await SYSTEM_CLOCK.sleep(0.1 + page % 5 * 0.03)
    write_down(diary, f"fetch {page}")
    return f"page {page}"


@task(max_retries=5)
def thumbnail(ctx: TaskContext, diary: str, picture: int) -> str:
    """Runs in a thread; every fifth picture cannot be read the first time."""
    if picture % 5 == 0 and ctx.attempt == 1:
        raise TransientError("the picture is still being uploaded", retry_after=0.5)
    write_down(diary, f"thumbnail {picture}")
    return checksum(picture, 2_000)


@task(executor="process", max_retries=5)
def encode(diary: str, film: int) -> str:
    """Runs in a process of its own: it would keep everybody else waiting."""
    write_down(diary, f"encode {film}")
    return checksum(film, 200_000)


@task
def invoice(diary: str, number: int) -> None:
    """Cannot succeed, and says so: no retry, a dead letter at once."""
    write_down(diary, f"invoice {number}")
    raise PermanentError(f"invoice {number} has no address")


@task(priority=9, max_retries=5)
async def publish(ctx: TaskContext, diary: str, document: str) -> str:
    """Goes through durable steps: those that are done are not done again, whoever dies."""
    for number, step in enumerate(STEPS, start=1):
        await ctx.step(step, take_step, diary, document, step)
        ctx.progress(number / len(STEPS), f"{step} done")
    return f"{document} is published"


async def take_step(diary: str, document: str, step: str) -> str:
    """Something that takes a while, and is written down when it begins."""
    write_down(diary, f"{document} {step}")
    await SYSTEM_CLOCK.sleep(STEP_SECONDS)
    return f"{step} of {document}"


def heartbeat(diary: str) -> None:
    """What the schedule enqueues."""
    write_down(diary, "heartbeat")


def checksum(number: int, rounds: int) -> str:
    """Some honest work."""
    digest = hashlib.sha256(str(number).encode())
    for _ in range(rounds):
        digest.update(digest.digest())
    return digest.hexdigest()
