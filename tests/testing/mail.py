"""A sample application whose tests use the manual queue."""

from __future__ import annotations

from collections.abc import Callable

from omniq import TaskContext, task

SENT: list[str] = []
WHEN_SENDING: list[Callable[[], object]] = []


@task(max_retries=2)
def send(to: str, subject: str = "hello") -> str:
    for act in list(WHEN_SENDING):
        act()
    SENT.append(to)
    return f"{to}: {subject}"


@task
async def report(day: str = "today") -> None:
    SENT.append(day)


@task
async def publish(ctx: TaskContext, doc: str) -> str:
    url = await ctx.step("upload", upload, doc)
    await ctx.step("announce", announce, url)
    return url


async def upload(doc: str) -> str:
    SENT.append(f"upload {doc}")
    return f"https://example.org/{doc}"


async def announce(url: str) -> None:
    for act in list(WHEN_SENDING):
        act()
    SENT.append(f"announce {url}")


@task
async def dictate(ctx: TaskContext) -> None:
    ctx.log("begins")
    for word in ("Dear", "Ada"):
        await ctx.stream(word)
    if ctx.attempt == 1:
        raise ConnectionError("once")
