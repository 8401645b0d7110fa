"""The tasks of `omniq demo`. Each run appends a line to a log file."""

from __future__ import annotations

import hashlib
import os

from omniq.clock import SYSTEM_CLOCK
from omniq.models import PermanentError, TransientError
from omniq.tasks.context import TaskContext
from omniq.tasks.functions import task

STEPS = ("render", "upload", "index", "announce")
STEP_SECONDS = 0.7


def write_line(run_log: str, line: str) -> None:
    """Append a line in one write, so that lines of several processes never mix."""
    descriptor = os.open(run_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


@task(max_retries=5)
async def fetch(run_log: str, page: int) -> str:
    """Waits for input and output, as most async code does."""
    await SYSTEM_CLOCK.sleep(0.1 + page % 5 * 0.03)
    write_line(run_log, f"fetch {page}")
    return f"page {page}"


@task(max_retries=5)
def thumbnail(ctx: TaskContext, run_log: str, picture: int) -> str:
    """Runs in a thread; every fifth picture cannot be read the first time."""
    if picture % 5 == 0 and ctx.attempt == 1:
        raise TransientError("the picture is still being uploaded", retry_after=0.5)
    write_line(run_log, f"thumbnail {picture}")
    return checksum(picture, 2_000)


@task(executor="process", max_retries=5)
def encode(run_log: str, film: int) -> str:
    """Runs in a child process: it needs the CPU and would block the other tasks."""
    write_line(run_log, f"encode {film}")
    return checksum(film, 200_000)


@task
def invoice(run_log: str, number: int) -> None:
    """Fails for good: it becomes a dead letter without a retry."""
    write_line(run_log, f"invoice {number}")
    raise PermanentError(f"invoice {number} has no address")


@task(priority=9, max_retries=5)
async def publish(ctx: TaskContext, run_log: str, document: str) -> str:
    """Runs durable steps: a completed step does not run again, even if the worker dies."""
    for number, step in enumerate(STEPS, start=1):
        await ctx.step(step, take_step, run_log, document, step)
        ctx.progress(number / len(STEPS), f"{step} done")
    return f"{document} is published"


async def take_step(run_log: str, document: str, step: str) -> str:
    """A slow step that logs its start."""
    write_line(run_log, f"{document} {step}")
    await SYSTEM_CLOCK.sleep(STEP_SECONDS)
    return f"{step} of {document}"


@task
def heartbeat(run_log: str) -> None:
    """The task of the schedule."""
    write_line(run_log, "heartbeat")


def checksum(number: int, rounds: int) -> str:
    """Compute a hash that takes some time."""
    digest = hashlib.sha256(str(number).encode())
    for _ in range(rounds):
        digest.update(digest.digest())
    return digest.hexdigest()
