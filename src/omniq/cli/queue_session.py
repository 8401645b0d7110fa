"""A command's turn with the storage: open it, do the work, close it; or say in one line why not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import typer

from omniq.errors import OmniqError, SettingsError
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.settings import Settings, mask_url
from omniq.storage.urls import local_path, storage_url
from omniq.worker.process import console

T = TypeVar("T")


class CommandFailed(OmniqError):
    """The command could not do what it was asked; `code` is what it exits with."""

    def __init__(self, message: str, code: int = console.FAILURE) -> None:
        super().__init__(message)
        self.code = code


def with_queue(
    url: str | None, work: Callable[[AsyncTaskQueue], Awaitable[T]], *, creates: bool = False
) -> T:
    """What `work` makes of the queue at that URL.

    A storage that is not there is made only when the command `creates`: who asks about an empty
    one has most likely mistyped its name, or stands in the wrong folder.
    """
    settings = Settings.load(url=url)
    chosen = storage_url(settings)
    _check_place(chosen, creates)

    async def session() -> T:
        async with AsyncTaskQueue(chosen, settings=settings) as queue:
            return await work(queue)

    try:
        return asyncio.run(session())
    except BrokenPipeError:
        # Whoever read our output has seen enough, as in `omniq tasks list | head`.
        raise typer.Exit(0) from None


def _check_place(url: str, creates: bool) -> None:
    if url.lower().startswith("memory:"):
        raise SettingsError(
            "memory:// lives and dies with one process, so no command can see another's tasks; "
            "name a storage that lasts with --url or OMNIQ_URL, such as sqlite:///tasks.db"
        )
    place = local_path(url)
    if not creates and place is not None and not place.exists():
        raise CommandFailed(
            f"there is no storage at {mask_url(url)} (looked for {place.absolute()}); "
            "enqueue something first, or name another with --url or OMNIQ_URL",
            console.NOT_FOUND,
        )
