"""persist-queue: `SQLiteAckQueue` with the smallest loop that takes, runs and acknowledges."""

from __future__ import annotations

import time

from persistqueue import Empty, SQLiteAckQueue

from benchmarks.run_context import FOLDER, record_start

PACKAGES = ["persist-queue"]
STORES = ["sqlite-power"]
KEEPS = "nothing"

queue: SQLiteAckQueue


def open() -> None:
    global queue
    queue = SQLiteAckQueue(str(FOLDER / "queue"), multithreading=True, auto_resume=False)


def close() -> None:
    queue.close()


def one(number: int) -> None:
    queue.put(number)


def work() -> None:
    open()
    while True:
        try:
            item = queue.get(block=False, raw=True)
        except Empty:
            time.sleep(0.002)
            continue
        record_start(item["data"])
        queue.ack(id=item["pqid"])
