"""The command in this process, on an SQLite file in a separate folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from omniq import TaskQueue
from omniq.cli import main
from omniq.models import TaskError
from omniq.outcomes import Failed

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


class CommandResult:
    """The output and the exit code of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """One JSON document for each line."""
        return [json.loads(line) for line in self.out.splitlines()]


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
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(arguments)
        out, err = capsys.readouterr()
        return CommandResult(int(left.value.code or 0), out, err)

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
