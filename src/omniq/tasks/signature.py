"""How a worker calls a function: which executor, the context, and the types of its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from omniq.errors import InvalidTask, SerializationError
from omniq.models import PermanentError, Task
from omniq.tasks.arguments import FunctionTypes
from omniq.tasks.batches import Batch, batch_of
from omniq.tasks.error_rules import ErrorRules
from omniq.tasks.functions import options_of
from omniq.tasks.options import Executor
from omniq.tasks.versions import FIRST_VERSION, Upcasters, WrongSignature, upcast


class Callee(msgspec.Struct, frozen=True):
    """A function and what a worker must know to call it.

    `func` takes the arguments as they are stored, and converts them first if the function's
    annotations ask for that. `is_coroutine`: it is an `async def`. `is_chosen`: `@task` names the
    executor, which also awaits an awaitable that the function returns; otherwise the event loop
    awaits it. `rules` are the `errors` of `@task`. `inject` is for a function with resources: it takes
    the arguments, the context among them, and the resources by name. `version` and `upcasters` are those
    of `@task`. `batch` is what `@batched` says; `whole` is then the function of the lists, which takes
    values of the annotated types.
    """

    func: Callable[..., Any]
    place: Executor
    takes_context: bool
    types: FunctionTypes
    is_coroutine: bool
    is_chosen: bool
    rules: tuple[ErrorRules, ...] = ()
    inject: Callable[[tuple[Any, ...], dict[str, Any], Mapping[str, Any]], Any] | None = None
    version: int = FIRST_VERSION
    upcasters: Upcasters = {}
    batch: Batch | None = None
    whole: Callee | None = None

    def upcast(self, task: Task) -> Task:
        """The task with the arguments of the version that the code has. Raises `WrongSignature`."""
        path = task.func_path
        call = upcast(path, task.args, task.kwargs, task.version, self.version, self.upcasters)
        try:
            self.types.check(*call)
        except InvalidTask as error:
            raise WrongSignature(str(error)) from None
        return msgspec.structs.replace(task, args=call[0], kwargs=call[1], version=self.version)


def callee_of(func: Callable[..., Any], func_path: str) -> Callee:
    """Return what a worker must know to call the function at that path."""
    options = options_of(func)
    chosen = options.executor
    is_coroutine = inspect.iscoroutinefunction(func)
    place: Executor = chosen or ("async" if is_coroutine else "thread")
    rules = () if options.errors is None else (options.errors,)
    types = FunctionTypes(func, func_path)
    call = _converting(func, types) if types.converts_arguments else func
    is_chosen = chosen is not None
    inject = _injecting(func, types) if types.resources else None
    batch = batch_of(func)
    whole = None
    if batch is not None:
        inject_all = partial(_call_with_resources, batch.func) if types.resources else None
        whole = Callee(
            batch.func, place, False, types, is_coroutine, is_chosen, rules, inject_all, batch=batch
        )
    return Callee(
        call,
        place,
        types.takes_context,
        types,
        is_coroutine,
        is_chosen,
        rules,
        inject,
        options.version or FIRST_VERSION,
        options.upcasters or {},
        batch,
        whole,
    )


def _converting(func: Callable[..., Any], types: FunctionTypes) -> Callable[..., Any]:
    """The function, for arguments as they are stored."""
    context = 1 if types.takes_context else 0

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        converted, kwargs = _loaded(types, args[context:], kwargs)
        return func(*args[:context], *converted, **kwargs)

    return call


def _injecting(
    func: Callable[..., Any], types: FunctionTypes
) -> Callable[[tuple[Any, ...], dict[str, Any], Mapping[str, Any]], Any]:
    """The function, for arguments as they are stored and for resources."""
    context = 1 if types.takes_context else 0

    def call(args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[str, Any]) -> Any:
        stored, kwargs = _loaded(types, args[context:], kwargs)
        try:
            stored, kwargs = types.with_resources(stored, kwargs, values)
        except InvalidTask as error:
            raise PermanentError(str(error), error_type=type(error).__name__) from None
        return func(*args[:context], *stored, **kwargs)

    return call


def _call_with_resources(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: Mapping[str, Any],
) -> Any:
    return func(*args, **kwargs, **values)


def item_of(types: FunctionTypes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The item of a task of a batched function. Raises `WrongSignature`, and `PermanentError`."""
    if kwargs or len(args) != 1:
        try:
            types.check(args, kwargs)
        except InvalidTask as error:
            raise WrongSignature(str(error)) from None
    return _loaded(types, args, kwargs)[0][0] if types.converts_arguments else args[0]


def _loaded(
    types: FunctionTypes, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        return types.load(args, kwargs)
    except SerializationError as error:
        # A retry does not help. Without its cause, which may quote the arguments.
        message = str(error)
        raise PermanentError(message, error_type=type(error).__name__) from None


def as_raised(error: BaseException) -> BaseException:
    """Return the exception that user code raised, where Python replaced it by another.

    A StopIteration that leaves a coroutine arrives as a RuntimeError about it.
    """
    cause = error.__cause__
    if type(error) is RuntimeError and isinstance(cause, StopIteration):
        return cause if error.args == ("coroutine raised StopIteration",) else error
    return error
