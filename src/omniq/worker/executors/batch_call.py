"""One call of a batched function, shared by the runs of its items.

Each run gets to the point where a function of one task would be called, with its own context and
middleware. There it waits for the others; then the function is called once, and each run ends with the
outcome of its item. Most runs get there without waiting for anything: they need no asyncio task.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import msgspec

from omniq.concurrency.futures import finish
from omniq.concurrency.running_task import CURRENT
from omniq.models import Task
from omniq.tasks.context import TaskContext
from omniq.tasks.signature import Callee, item_of

Items = list["Item"]


class RunningBatch(msgspec.Struct, frozen=True):
    """What the log lines of a batched function carry: its function, and the first of its tasks."""

    task_id: str
    func_path: str
    attempt: int

    @classmethod
    def of(cls, context: TaskContext) -> RunningBatch:
        """A batch whose first task has that context."""
        return cls(context.task_id, context.func_path, context.attempt)


class Item:
    """One item of a call, and the run that waits for its outcome."""

    __slots__ = ("context", "future", "outcome", "task", "traceback", "value")

    def __init__(self, context: TaskContext, task: Task, value: Any) -> None:
        self.context = context
        self.task = task
        """With the arguments as the code takes them."""
        self.value = value
        """As the function takes it."""
        self.outcome: Any = None
        self.traceback: TracebackType | None = None
        self.future: asyncio.Future[None] | None = None
        """What the run waits for, if it is an asyncio task."""


class BatchCall:
    """Collects items, and calls the function of `batched` once.

    `make` makes the call: it gets the items, and returns what the function has returned.
    """

    def __init__(self, batched: Callee, make: Callable[[Items], Awaitable[Any]]) -> None:
        assert batched.batch is not None
        self.batched = batched
        self._batch = batched.batch
        self._is_elsewhere = batched.place == "process"
        self._make = make
        self._missing: dict[str, Task] = {}
        self._all_here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._items: Items = []
        self._error: BaseException | None = None
        # For runs that are asyncio tasks: a function of one task, on the event loop.
        self.callee = msgspec.structs.replace(
            batched,
            func=self._item,
            place="async",
            takes_context=True,
            is_coroutine=True,
            inject=None,
        )

    @property
    def error(self) -> BaseException | None:
        """Why all runs fail, if they do."""
        return self._error

    def enter(self, context: TaskContext, task: Task) -> Item:
        """Add the item of a task, which has the arguments as the code takes them.

        Raises what is wrong with them.
        """
        # A child process makes the values itself.
        value = None if self._is_elsewhere else item_of(self.batched.types, task.args, task.kwargs)
        item = Item(context, task, value)
        self._items.append(item)
        return item

    def wait_for(self, task: Task) -> None:
        """The call waits until the run of that task, an asyncio task, has entered or left."""
        self._missing[task.id] = task

    def is_missing(self, task_id: str) -> bool:
        """Whether the call waits for that run."""
        return task_id in self._missing

    def leave(self, task_id: str) -> None:
        """That run has entered, or ended: the call waits for it no longer."""
        self._missing.pop(task_id, None)
        if not self._missing:
            finish(self._all_here)

    async def run(self) -> None:
        """Wait until each run has entered or left, call the function, and let the runs go on.

        When cancelled, all runs that wait are cancelled, and those that enter later too.
        """
        items = self._items
        try:
            if self._missing:
                await self._all_here
            if not items:
                return
            CURRENT.set(RunningBatch.of(items[0].context))
            outcomes = self._batch.outcomes(await self._make(items), len(items))
        except BaseException as error:
            # The user's code may raise anything; each run makes its outcome of it.
            self._error = error
            outcomes = [error] * len(items)
        for item, outcome in zip(items, outcomes, strict=True):
            item.outcome = outcome
            if item.future is not None:
                if isinstance(outcome, BaseException):
                    item.traceback = outcome.__traceback__
                finish(item.future)

    async def _item(self, context: TaskContext, /, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the function in a run that is an asyncio task."""
        if self._error is not None:
            raise self._error
        task = msgspec.structs.replace(
            self._missing[context.task_id],
            args=args,
            kwargs=kwargs,
            version=self.batched.version,
        )
        item = self.enter(context, task)
        item.future = asyncio.get_running_loop().create_future()
        self.leave(context.task_id)
        await item.future
        outcome = item.outcome
        if isinstance(outcome, BaseException):
            # Raised by several runs, it would collect the frames of them all.
            raise outcome.with_traceback(item.traceback)
        return outcome


async def call_function(
    callee: Callee, items: Items, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
) -> Any:
    """Call the function of the lists on the event loop, or in a thread."""
    whole = callee.whole
    assert whole is not None
    assert whole.batch is not None
    lists: list[Any] = [[item.value for item in items]]
    if whole.batch.takes_contexts:
        lists.insert(0, [item.context for item in items])
    if whole.takes_context:
        # One with resources, which makes these with the context of a run.
        lists.insert(0, items[0].context)
    if whole.place == "thread":
        value = await in_thread(lambda: _call_in_thread(whole, lists))
    else:
        value = whole.func(*lists)
    return await value if inspect.isawaitable(value) else value


def _call_in_thread(whole: Callee, lists: list[Any]) -> Any:
    value = whole.func(*lists)
    if whole.is_chosen and inspect.isawaitable(value):
        return asyncio.run(_wait_for(value))
    return value


async def _wait_for(value: Awaitable[Any]) -> Any:
    return await value
