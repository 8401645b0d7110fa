"""Opens the storage for a command, runs the command and closes the storage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from omniq.errors import OmniqError, SettingsError
from omniq.queue.async_queue import AsyncTaskQueue
from omniq.settings import Settings
from omniq.storage.urls import local_path, storage_url
from omniq.text.masking import mask_url
from omniq.worker.process import console

T = TypeVar("T")


class CommandFailed(OmniqError):
    """The command failed; `code` is its exit code."""

    def __init__(self, message: str, code: int = console.FAILURE) -> None:
        super().__init__(message)
        self.code = code


def with_queue(
    url: str | None, work: Callable[[AsyncTaskQueue], Awaitable[T]], *, creates: bool = False
) -> T:
    """Run `work` with the queue at that URL and return its result.

    A missing storage is created only if `creates`: a user who queries a storage that does not exist
    has most likely mistyped its name, or is in the wrong folder.
    """
    settings = Settings.load(url=url)
    chosen = storage_url(settings)
    check_exists(chosen, creates)

    async def session() -> T:
        async with AsyncTaskQueue(chosen, settings=settings) as queue:
            return await work(queue)

    return asyncio.run(session())


def check_exists(url: str, creates: bool = False) -> None:
    """Raise `CommandFailed` for a missing storage, unless the command creates it."""
    if url.lower().startswith("memory:"):
        raise SettingsError(
            "memory:// exists only within one process, so no command can see its tasks; "
            "name another storage with --url or OMNIQ_URL, such as sqlite:///tasks.db"
        )
    path = local_path(url)
    if not creates and path is not None and not path.exists():
        raise CommandFailed(
            f"there is no storage at {mask_url(url)} (looked for {path.absolute()}); "
            "enqueue a task first, or name another storage with --url or OMNIQ_URL",
            console.NOT_FOUND,
        )
