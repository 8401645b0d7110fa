"""The command in this process, on an SQLite file in a separate folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from omniq import TaskQueue
from omniq.models import TaskError
from omniq.outcomes import Failed
from tests.cli.in_process import CommandResult, run_command

TASKS = '''
from omniq import task


@task(queue="mail", max_retries=0)
def boom(text):
    """Raises an error with that text."""
    raise RuntimeError(text)


@task
def add(a, b=0):
    return a + b


def unmarked():
    """Enqueued by its path, it is noted on stderr."""
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [*os.environ]:
        if name.startswith("OMNIQ_") or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)
    (tmp_path / "clitasks.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("clitasks", None)


@pytest.fixture
def url(folder: Path) -> str:
    return f"sqlite:///{folder}/tasks.db?durability=os"


@pytest.fixture
def omniq(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys):
    """Run `omniq …` on the test's storage."""
    monkeypatch.setenv("OMNIQ_URL", url)

    def run(*arguments: str) -> CommandResult:
        return run_command(capsys, *arguments)

    return run


@pytest.fixture
def queue(url: str):
    with TaskQueue(url) as queue:
        yield queue


@pytest.fixture
def dead_task(queue: TaskQueue):
    """Enqueue a task that fails for good; return its id."""

    def make(message: str = "boom", func: str = "clitasks.boom", **options: Any) -> str:
        handle = queue.options(priority=1000, **options).enqueue(func, "an argument")

        async def fail() -> None:
            storage = queue.storage
            (task,) = await storage.reserve(1)
            error = TaskError(message, error_type="RuntimeError", traceback=f"Traceback\n{message}")
            await storage.record([Failed(task.id, task.token, error)])

        queue._portal.run(fail())
        return handle.id

    return make
