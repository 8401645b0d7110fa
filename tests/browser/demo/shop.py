"""The tasks of a small shop, for the dashboard to show."""

from __future__ import annotations

import asyncio

from omniq import PermanentError, TaskContext, task
from omniq.models import TransientError


@task(queue="mail", max_retries=2)
async def send_receipt(order: int, to: str, *, api_key: str = "") -> str:
    """Takes a moment; fails permanently for every ninth order."""
    await asyncio.sleep(0.05 + order % 7 * 0.02)
    if order % 9 == 4:
        raise PermanentError(f"mailbox of customer {order} does not exist")
    return f"sent to {to}"


@task(queue="orders", max_retries=1, breaker="payments")
async def charge_card(order: int, cents: int, *, card_number: str = "") -> dict[str, int]:
    """Fails for every eleventh order, as if the payment provider were down."""
    await asyncio.sleep(0.08)
    if order % 11 == 3:
        raise TransientError("payment provider answered 503 Service Unavailable")
    return {"order": order, "charged": cents}


@task(queue="images")
def make_thumbnail(path: str, width: int) -> str:
    """Runs in a thread."""
    return f"{path}@{width}"


@task(queue="orders", timeout=3600)
async def import_catalogue(ctx: TaskContext, supplier: str) -> int:
    """Runs durable steps and reports progress."""
    for number, name in enumerate(("download", "check"), start=1):
        await ctx.step(name, _step, supplier, name)
        ctx.progress(number / 4, f"{name} done")
    await asyncio.sleep(600)
    return 4


async def _step(supplier: str, name: str) -> str:
    return f"{name} of {supplier}: 1,204 products"


@task
async def refresh_prices(region: str = "eu") -> int:
    """The task of the schedules."""
    await asyncio.sleep(0.05)
    return 1204


@task
async def say(text: str) -> str:
    """Returns the text, or fails with it if it starts with `fail`."""
    if text.startswith("fail"):
        raise PermanentError(text)
    return text
