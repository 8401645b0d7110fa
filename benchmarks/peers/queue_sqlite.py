"""queue-sqlite: its async scheduler; WAL, synchronous NORMAL, four files, its defaults."""

from __future__ import annotations

import logging
import os
import threading

from queue_sqlite.model import MessageItem
from queue_sqlite.mounter.task_mounter import TaskMounter
from queue_sqlite.scheduler import QueueScheduler

from benchmarks.run_context import FOLDER, record_start

PACKAGES = ["queue-sqlite"]
STORES = ["sqlite-os"]
KEEPS = "a result"

scheduler: QueueScheduler


@TaskMounter.task(meta={"name": "noop", "max_retries": 0})
async def noop(item: MessageItem) -> None:
    record_start(item.content["number"])


def open() -> None:
    global scheduler
    # It works in and below the current folder.
    os.chdir(FOLDER)
    os.makedirs("log", exist_ok=True)
    logging.disable(logging.WARNING)
    scheduler = QueueScheduler("async")


def close() -> None:
    """Do nothing: there is nothing to close."""


def one(number: int) -> None:
    message = MessageItem(content={"number": number}, destination="noop")
    scheduler.queue_operation.enqueue(message.to_dict_by_core())


def work() -> None:
    open()
    scheduler.start()
    threading.Event().wait()
