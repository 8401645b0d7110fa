"""A folder with tasks that log and fail, and the real worker command in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omniq import TaskQueue
from tests.acceptance.command import WorkerCommand

TASKS = """
import asyncio
import logging
import os
import threading
import time

from loguru import logger

from omniq import task

log = logging.getLogger("shop.mail")


@task
async def in_the_loop(word):
    await asyncio.sleep(0)
    log.info("stdlib says %s", word)
    logger.info("loguru says {}", word)


@task
def in_a_thread(word):
    log.info("stdlib says %s", word)
    logger.info("loguru says {}", word)


@task(executor="process")
def in_a_process(word):
    log.info("stdlib says %s", word)
    logger.info("loguru says {}", word)


@task
async def log_an_exception():
    try:
        {}["key"]
    except KeyError:
        log.exception("it went wrong")
        logger.exception("it went wrong again")


@task
def divide(number):
    return one_by(number)


def one_by(number):
    return 1 / number


@task(executor="process")
def divide_in_a_process(number):
    return one_by(number)


@task
async def fail_with(message):
    raise RuntimeError(message)


@task
async def noop():
    pass


@task
async def exit_after_a_turn():
    await asyncio.sleep(0)
    os._exit(3)


@task
async def block_the_loop(seconds):
    time.sleep(seconds)


@task
async def fork():
    # In its first turn: the line of its start is gathered, and not written yet.
    pid = os.fork()
    if not pid:
        log.info("from a fork")
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(TASKS)
    (tmp_path / "empty.py").write_text("NOTHING = 1\n")
    return tmp_path


@pytest.fixture
def url(folder: Path) -> str:
    return f"sqlite:///{folder}/q.db?durability=os"


@pytest.fixture
def queue(url: str) -> Iterator[TaskQueue]:
    with TaskQueue(url) as queue:
        yield queue


@pytest.fixture
def run_worker(folder: Path, url: str) -> Iterator[Callable[..., WorkerCommand]]:
    """Starts `omniq worker shop` in the folder."""
    started: list[WorkerCommand] = []

    def start(*arguments: str, modules: str = "shop", **variables: Any) -> WorkerCommand:
        variables.setdefault("OMNIQ_BASE_RETRY_DELAY", "2")
        names = tuple(modules.split())
        started.append(WorkerCommand(folder, "--url", url, *arguments, modules=names, **variables))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()
