import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from httpx import AsyncClient

from omniq import AsyncTaskQueue, TaskContext, task


@task
async def download_content(ctx: TaskContext[AsyncClient], url: str) -> int:
    response = await ctx.state.get(url)
    print(f"{url}: {response.text:.80}...")
    return len(response.text)


@asynccontextmanager
async def lifespan() -> AsyncIterator[AsyncClient]:
    async with AsyncClient() as client:
        yield client


async def main() -> None:
    async with AsyncTaskQueue() as queue:
        for page in ("a", "b", "c"):
            await queue.enqueue(download_content, f"https://example.org/{page}")


if __name__ == "__main__":
    asyncio.run(main())
