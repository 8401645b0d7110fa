"""A queue with demo data: every page has something to show."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path

from omniq import AsyncTaskQueue

sys.path.insert(0, str(Path(__file__).parent / "demo"))

ORDERS = 60


@asynccontextmanager
async def demo_queue(folder: Path):
    """An open queue on an SQLite file in the folder, with demo data and a running worker."""
    async with AsyncTaskQueue(f"sqlite:///{folder}/shop.db?durability=os") as queue:
        await fill(queue)
        async with queue.worker(concurrency=6, base_retry_delay=0.05, poll_interval=0.1) as pool:
            try:
                yield queue
            finally:
                # One of the tasks takes ten minutes.
                await pool.stop(cancel_in_flight=True)


async def fill(queue: AsyncTaskQueue) -> None:
    """Enqueue and schedule the tasks of a shop."""
    shop = import_module("shop")
    now = datetime.now(UTC)
    for name in ("reports", "images"):
        await queue.storage.pause_queue(name)
    await queue.options(priority=9, metadata={"supplier": "acme"}).enqueue(
        shop.import_catalogue, "acme"
    )
    await queue.options(queue="mail", metadata={"tenant": "eu-1"}).enqueue_many(
        [
            (shop.send_receipt, (number, f"customer{number}@example.org"), {"api_key": "k-2f9e"})
            for number in range(ORDERS)
        ]
    )
    await queue.enqueue_many(
        [
            (shop.charge_card, (number, 4_990), {"card_number": "4111 1111 1111 1111"})
            for number in range(ORDERS // 2)
        ]
    )
    await queue.enqueue_many(shop.make_thumbnail, [("/img/1.jpg", 320), ("/img/2.jpg", 320)])
    await queue.options(eta=now + timedelta(hours=3)).enqueue(shop.refresh_prices, "us")
    await queue.options(queue="reports").enqueue("shop.monthly_report", 2026, 1)
    cancelled = await queue.options(delay=3600).enqueue(shop.refresh_prices, "jp")
    await cancelled.cancel()
    await queue.schedules.add("prices-eu", "shop.refresh_prices", args=("eu",), interval=20)
    await queue.schedules.add(
        "month-end", "shop.refresh_prices", cron="0 3 1 * *", tz="Europe/Berlin", overlap="skip"
    )
    await queue.schedules.add("old-import", "shop.refresh_prices", cron="*/15 * * * *")
    await queue.schedules.pause("old-import")
