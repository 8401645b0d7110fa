"""How a worker calls a function: which executor, and whether it takes a context."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from omniq.tasks.context import TaskContext
from omniq.tasks.error_rules import ErrorRules
from omniq.tasks.functions import options_of
from omniq.tasks.options import Executor


class Callee(msgspec.Struct, frozen=True):
    """A function and what a worker must know to call it.

    `is_coroutine`: it is an `async def`. `is_chosen`: `@task` names the executor, which also awaits
    an awaitable that the function returns; otherwise the event loop awaits it. `rules` are the
    `errors` of `@task`.
    """

    func: Callable[..., Any]
    place: Executor
    takes_context: bool
    is_coroutine: bool
    is_chosen: bool
    rules: tuple[ErrorRules, ...] = ()


def callee_of(func: Callable[..., Any]) -> Callee:
    """Return what a worker must know to call the function."""
    options = options_of(func)
    chosen = options.executor
    is_coroutine = inspect.iscoroutinefunction(func)
    place: Executor = chosen or ("async" if is_coroutine else "thread")
    rules = () if options.errors is None else (options.errors,)
    return Callee(func, place, _takes_context(func), is_coroutine, chosen is not None, rules)


def as_raised(error: BaseException) -> BaseException:
    """Return the exception that user code raised, where Python replaced it by another.

    A StopIteration that leaves a coroutine arrives as a RuntimeError about it.
    """
    cause = error.__cause__
    if type(error) is RuntimeError and isinstance(cause, StopIteration):
        return cause if error.args == ("coroutine raised StopIteration",) else error
    return error


def _takes_context(func: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(func).parameters.values())
    if not parameters:
        return False
    annotation = parameters[0].annotation
    if isinstance(annotation, str):
        try:
            annotation = typing.get_type_hints(func).get(parameters[0].name)
        except Exception:
            # Hints may name what exists for type checkers only; then the text decides.
            return str(parameters[0].annotation).rpartition(".")[2] == TaskContext.__name__
    return annotation is TaskContext
