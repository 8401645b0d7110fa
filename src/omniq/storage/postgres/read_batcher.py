"""Natural batching of questions: what is asked while one is under way, the next one asks together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Gathered(Generic[_T]):
    """Answers about single ids, asked for many at a time.

    Whoever asks gets an answer that was read after the question. Used on one event loop.
    """

    def __init__(self, ask: Callable[[list[str]], Awaitable[dict[str, _T]]]) -> None:
        self._ask = ask
        self._waiting: dict[str, asyncio.Future[_T | None]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def get(self, task_id: str) -> _T | None:
        """What there is about the id."""
        answer = self._waiting.get(task_id)
        if answer is None:
            answer = self._waiting[task_id] = asyncio.get_running_loop().create_future()
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask_on())
        # Others may wait for the same answer.
        return await asyncio.shield(answer)

    async def _ask_on(self) -> None:
        try:
            while self._waiting:
                await self._ask_all()
        finally:
            self._asking = None

    async def _ask_all(self) -> None:
        asked, self._waiting = self._waiting, {}
        try:
            answers = await self._ask(list(asked))
        except BaseException as error:
            for future in asked.values():
                future.set_exception(error)
                # Whoever asked may have gone meanwhile; nobody else needs to hear of it.
                future.exception()
            if not isinstance(error, Exception):
                raise
            return
        for task_id, future in asked.items():
            future.set_result(answers.get(task_id))
