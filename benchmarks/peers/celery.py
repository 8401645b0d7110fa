"""Celery: 8 threads, 64 tasks fetched ahead for each, no gossip, heartbeats or events."""

from __future__ import annotations

from celery import Celery

from benchmarks.run_context import URL, exec_module, record_start

PACKAGES = ["celery[redis]", "hiredis"]
STORES = ["redis"]
KEEPS = "nothing"

app = Celery("bench", broker=URL)
app.conf.update(
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    worker_disable_rate_limits=True,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="noop")
def noop(number: int) -> None:
    record_start(number)


def open() -> None:
    """Do nothing: it connects when it is used."""


def close() -> None:
    app.close()


def one(number: int) -> None:
    noop.delay(number)


def work() -> None:
    exec_module(
        *("celery", "-A", __name__, "worker", "-l", "ERROR", "-P", "threads", "-c", 8),
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    )
