"""docket: limits of each key and debounce, 100 tasks at a time. Its results expire after 15 minutes, as by default."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Annotated

from docket import ConcurrencyLimit, Debounce, Docket, Worker

from benchmarks.flow_peers.meter import CONCURRENCY, SETTLE, Meter
from benchmarks.run_context import URL

meter = Meter.of_arguments()


async def limited(key: Annotated[str, ConcurrencyLimit(1)]) -> None:
    meter.ran += 1


async def debounced(key: Annotated[str, Debounce(timedelta(seconds=SETTLE))]) -> None:
    meter.ran += 1


async def main() -> None:
    function = limited if meter.figure == "limits" else debounced
    # It takes a connection for each running task and more, and the default is 100.
    async with Docket("bench", url=f"{URL}?max_connections=1000") as docket:
        docket.register(function)

        async def enqueue(number: int) -> None:
            await docket.add(function)(meter.key(number))

        async def work() -> None:
            # The default of 250 ms would be most of the time that a debounced task takes.
            often = timedelta(milliseconds=20)
            async with Worker(
                docket,
                concurrency=CONCURRENCY,
                message_batch=CONCURRENCY,
                minimum_check_interval=often,
                scheduling_resolution=often,
            ) as worker:
                await worker.run_until_finished()

        await meter.filled(enqueue)
        await meter.drained(work)
    meter.print()


asyncio.run(main())
