"""The tasks of the web applications in this folder."""

from __future__ import annotations

from omniq import TaskContext, task


@task(max_retries=5, timeout=30)
async def thumbnail(ctx: TaskContext, picture: str, size: int) -> str:
    """Make a thumbnail; this example only returns its file name."""
    ctx.progress(0.5, f"{picture}: half of the pixels")
    return f"{picture.removesuffix('.png')}-{size}.png"


@task(queue="mail")
def welcome(to: str) -> str:  # a plain function runs in a thread
    return f"welcome, {to}"
