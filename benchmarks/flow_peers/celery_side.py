"""celery-batches: 8 threads, all that wait fetched ahead, no results, no gossip, heartbeats or events."""

from __future__ import annotations

import asyncio
import threading
import time

from celery import Celery
from celery_batches import Batches

from benchmarks.flow_peers.meter import SIZE, WAIT, Meter
from benchmarks.run_context import URL

app = Celery("bench", broker=URL)
app.conf.update(
    task_ignore_result=True,
    # The documentation of celery-batches asks for no limit, or a multiple of `flush_every`.
    worker_prefetch_multiplier=0,
    worker_disable_rate_limits=True,
    worker_send_task_events=False,
    worker_redirect_stdouts=False,
    broker_connection_retry_on_startup=True,
)
meter = Meter.of_arguments()
lock = threading.Lock()
first: list[float] = []


@app.task(base=Batches, flush_every=SIZE, flush_interval=WAIT, name="batch")
def batch(requests: list[object]) -> None:
    with lock:
        if not first:
            # The start of Celery does not count.
            first.extend((time.perf_counter(), time.process_time()))
        meter.ran += len(requests)
        if meter.ran >= meter.expected:
            meter.drain = time.perf_counter() - first[0]
            meter.drain_cpu = time.process_time() - first[1]
            meter.print()


async def enqueue(number: int) -> None:
    batch.delay(number)


if __name__ == "__main__":
    asyncio.run(meter.filled(enqueue))
    options = "-l ERROR -P threads -c 8 --without-gossip --without-mingle --without-heartbeat"
    app.worker_main(["worker", *options.split()])
