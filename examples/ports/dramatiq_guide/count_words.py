import asyncio

import requests

from omniq import ErrorRules, TaskContext, task


@task(max_retries=3, expires=3600, timeout=60)
def count_words(url: str) -> int:
    try:
        count = len(requests.get(url, timeout=10).text.split(" "))
    except requests.exceptions.MissingSchema:
        print(f"dropped: {url!r} is not a URL")
        return 0
    print(f"There are {count} words at {url!r}.")
    return count


@task(errors=ErrorRules(permanent=(LookupError,)))
def find(key: str) -> str:
    return {"tea": "green"}[key]


@task(timeout=1, max_retries=0)
async def long_running() -> None:
    try:
        await asyncio.sleep(20)
    except asyncio.CancelledError:
        print("taken down in time")
        raise


@task(priority=0)
def generate_report(user_id: int) -> None: ...


@task(priority=10)
def sync_order_to_warehouse(ctx: TaskContext, order_id: int) -> int:
    return order_id + ctx.attempt
