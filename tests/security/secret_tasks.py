"""Tasks that handle secrets: those of the user, and those they should not see."""

from __future__ import annotations

import os
from pathlib import Path

from omniq import Secret, Task, TaskContext, TaskError, task


@task
def echo(value: str, word: str = "") -> list[str]:
    return [value, word]


@task(executor="process", max_retries=2)
def in_steps(ctx: TaskContext, path: str) -> str:
    def step() -> str:
        with Path(path).open("a") as file:
            file.write("step\n")
        return "step value"

    value: str = ctx.step("only", step)
    if ctx.attempt == 1:
        raise RuntimeError("after the step")
    return value


@task(executor="process")
def environment() -> dict[str, str]:
    return dict(os.environ)


@task(executor="process")
def command_lines() -> list[str]:
    """What a process list shows of this process and its parent."""
    return [Path(f"/proc/{pid}/cmdline").read_text() for pid in (os.getpid(), os.getppid())]


@task
def send(to: str, password: str) -> None:
    """Never run; only its signature is read."""


@task
def pay(
    ctx: TaskContext, to: str, card: Secret[str], api_token: str, *, when: Secret[str] = ""
) -> None:
    """Never run; only its signature is read."""


@task
def fail(password: str) -> None:
    raise RuntimeError("it failed")


@task(executor="process", max_retries=0)
def raise_what_cannot_be_pickled() -> None:
    class Local(Exception):
        def __reduce__(self) -> str:
            raise RuntimeError("pickled")

    raise Local("as text")


@task(executor="process")
def return_bytes() -> bytes:
    return b"\x80\x05cos\nsystem\n."


died: list[str] = []
"""The ids of the tasks for which `on_dead` was called."""


def _note_death(task: Task, error: TaskError) -> None:
    died.append(task.id)


@task(on_dead=_note_death)
def noted() -> None:
    """Never run; only its hook is called."""
