"""A folder with a module of tasks and an SQLite file, and workers that end with their test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omniq import TaskQueue
from tests.acceptance.command import TASKS, WorkerCommand


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


@pytest.fixture
def url(folder: Path) -> str:
    return f"sqlite:///{folder}/tasks.db?durability=os"


@pytest.fixture
def queue(url: str):
    with TaskQueue(url) as queue:
        yield queue


@pytest.fixture
def run_worker(folder: Path, url: str):
    """Start `omniq worker tasks` on the test's storage."""
    commands: list[WorkerCommand] = []

    def run(*arguments: str, **options: Any):
        command = WorkerCommand(folder, "--url", url, *arguments, **options)
        commands.append(command)
        return command

    yield run
    for command in commands:
        command.kill()
        print(command.text)  # noqa: T201 - pytest shows it when the test has failed
