"""Functions that take several tasks in one call: `@batched(size=100, wait=0.2)`.

The function takes a list of items and returns a list with an outcome for each. What callers see is a
function of one item: each item is a task, with an id, a result, retries and a dead letter.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Coroutine, Sequence
from inspect import Parameter
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_args, overload

from omniq.errors import InvalidTask
from omniq.models import check_int
from omniq.tasks.batches import BATCH_MARK, Batch, batch_of
from omniq.tasks.context import TaskContext
from omniq.tasks.durations import Duration, seconds_of
from omniq.tasks.function_lookup import MARK

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

MOST_ITEMS = 1_000
"""The largest batch: all its items are held in memory, and end in one step of the storage."""

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_CONTEXTS = re.compile(r"list\[\s*(\w+\.)*TaskContext\b")


class Batched(Protocol):
    """The decorator that `batched(…)` returns: from a function of a list to one of an item."""

    @overload
    def __call__(
        self,
        func: Callable[Concatenate[list[TaskContext], list[T], P], Coroutine[Any, Any, None]],
        /,
    ) -> Callable[Concatenate[TaskContext, T, P], Coroutine[Any, Any, None]]: ...
    @overload
    def __call__(
        self,
        func: Callable[
            Concatenate[list[TaskContext], list[T], P],
            Coroutine[Any, Any, Sequence[R | BaseException]],
        ],
        /,
    ) -> Callable[Concatenate[TaskContext, T, P], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[list[TaskContext], list[T], P], None], /
    ) -> Callable[Concatenate[TaskContext, T, P], None]: ...
    @overload
    def __call__(
        self,
        func: Callable[Concatenate[list[TaskContext], list[T], P], Sequence[R | BaseException]],
        /,
    ) -> Callable[Concatenate[TaskContext, T, P], R]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[list[T], P], Coroutine[Any, Any, None]], /
    ) -> Callable[Concatenate[T, P], Coroutine[Any, Any, None]]: ...
    @overload
    def __call__(
        self,
        func: Callable[Concatenate[list[T], P], Coroutine[Any, Any, Sequence[R | BaseException]]],
        /,
    ) -> Callable[Concatenate[T, P], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[list[T], P], None], /
    ) -> Callable[Concatenate[T, P], None]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[list[T], P], Sequence[R | BaseException]], /
    ) -> Callable[Concatenate[T, P], R]: ...


def batched(*, size: int, wait: Duration = 0.0) -> Batched:
    """Let a worker call the function with up to `size` items: below `@task`, for a function of a list.

        @task(queue="index")
        @batched(size=100, wait=0.2)
        async def index(docs: list[Doc]) -> list[int | BaseException]: ...

        await queue.enqueue(index, doc)            # one item

    It returns a list with the outcome of each item, in their order: a value, or an exception, also
    `Retry(…)`, `Snooze(…)` and `Discard(…)`. A function that is annotated with None returns nothing. If it
    raises, all items of the call fail. A worker waits up to `wait` seconds for a batch to be full. The
    first parameter may be `contexts: list[TaskContext]`. Called directly, it takes one item.

    Raises `InvalidTask` for a wrong size or wait, and for a function that takes no list.
    """
    check_int("size", size, low=1)
    if size > MOST_ITEMS:
        raise InvalidTask(f"size {size}: a batch has at most {MOST_ITEMS:,} items")
    seconds = seconds_of("wait", wait)
    return typing.cast("Batched", functools.partial(_batched, size, seconds))


def _batched(size: int, wait: float, func: Callable[..., Any], /) -> Callable[..., Any]:
    if not inspect.isroutine(func):
        raise InvalidTask(f"@batched: expected a function, not {type(func).__name__}")
    if hasattr(func, MARK) or batch_of(func):
        raise InvalidTask(f"@batched on {func.__qualname__}: put it below @task, and once")
    signature = inspect.signature(func)
    parameters = list(signature.parameters.values())
    takes_contexts = bool(parameters) and _is_contexts(parameters[0].annotation)
    first = parameters[: 1 + takes_contexts]
    if len(first) <= takes_contexts or any(each.kind not in _POSITIONAL for each in first):
        raise InvalidTask(
            f"@batched on {func.__qualname__}: it takes no list of items; expected a function such as "
            "f(items: list[…])"
        )
    returns_none = signature.return_annotation in (None, "None", type(None), signature.empty)
    batch = Batch(func, size, wait, takes_contexts, returns_none)
    call = _one_item(batch, len(first))
    # Positional only: the parameter has a name for several items.
    parameters[: len(first)] = [each.replace(kind=Parameter.POSITIONAL_ONLY) for each in first]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    setattr(call, BATCH_MARK, batch)
    _check_parameters(func, call, signature)
    return call


def _check_parameters(
    func: Callable[..., Any], call: Callable[..., Any], signature: inspect.Signature
) -> None:
    """Raise `InvalidTask` for parameters that no task can have, if all annotations have a meaning now."""
    # Imported late: a program that only declares tasks of one item does not need it.
    from omniq.tasks.arguments import FunctionTypes, hints_of

    hints = hints_of(func, signature)
    is_known = not any(
        isinstance(each.annotation, str) and each.annotation != "Any" and hints[each.name] is Any
        for each in signature.parameters.values()
    )
    if is_known:
        FunctionTypes(call, func.__qualname__)


def _one_item(batch: Batch, lists: int) -> Callable[..., Any]:
    """The function of one item, for callers: it calls the function with a batch of one."""

    def in_lists(args: tuple[Any, ...]) -> list[Any]:
        return [*([each] for each in args[:lists]), *args[lists:]]

    def outcome_of(returned: Any) -> Any:
        (outcome,) = batch.outcomes(returned, 1)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    if inspect.iscoroutinefunction(batch.func):

        @functools.wraps(batch.func)
        async def call(*args: Any, **kwargs: Any) -> Any:
            return outcome_of(await batch.func(*in_lists(args), **kwargs))

        return call

    @functools.wraps(batch.func)
    def blocking_call(*args: Any, **kwargs: Any) -> Any:
        return outcome_of(batch.func(*in_lists(args), **kwargs))

    return blocking_call


def _is_contexts(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return bool(_CONTEXTS.match(annotation))
    if typing.get_origin(annotation) is not list:
        return False
    (item,) = get_args(annotation)
    return item is TaskContext or typing.get_origin(item) is TaskContext
