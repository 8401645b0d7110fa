"""What `@batched` says about a function: how a worker calls it, and what its tasks take and return."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from omniq.errors import InvalidTask
from omniq.models import PermanentError
from omniq.tasks.context import TaskContext

BATCH_MARK = "__omniq_batch__"

_LISTS = (list, Sequence, Iterable)


@dataclass(frozen=True, slots=True)
class Batch:
    """What `@batched` says: the function of a list, and when it is called.

    `takes_contexts`: its first parameter is the list of the items' contexts. `returns_none`: it returns
    no outcomes, and all items have succeeded when it returns.
    """

    func: Callable[..., Any]
    size: int
    wait: float
    takes_contexts: bool
    returns_none: bool

    def outcomes(self, returned: Any, count: int) -> list[Any]:
        """The outcomes of that many items: values and exceptions. Raises `PermanentError`."""
        if returned is None and self.returns_none:
            return [None] * count
        name = self.func.__qualname__
        if not isinstance(returned, list | tuple):
            raise PermanentError(
                f"{name} returned {type(returned).__name__}: expected a list with an outcome for each of "
                f"{count} items",
                error_type="WrongOutcomes",
            )
        if len(returned) != count:
            raise PermanentError(
                f"{name} returned {len(returned)} outcomes for {count} items",
                error_type="WrongOutcomes",
            )
        return list(returned)


def batch_of(func: object) -> Batch | None:
    """What `@batched` says about the function; None for one of a single task."""
    found = getattr(func, BATCH_MARK, None)
    return found if isinstance(found, Batch) else None


def item_hints(
    name: str, batch: Batch, signature: inspect.Signature, hints: Mapping[str, Any]
) -> dict[str, Any]:
    """The annotations of the function of one item. Raises `InvalidTask` if it has not one list."""
    context, items = None, next(iter(signature.parameters))
    found = dict(hints)
    if batch.takes_contexts:
        context, items, *_ = signature.parameters
        found[context] = TaskContext
    found[items] = _item_of(name, items, hints.get(items, Any))
    if "return" in hints:
        found["return"] = _value_of(hints["return"])
    return found


def _item_of(name: str, parameter: str, hint: Any) -> Any:
    if hint is Any or hint is list:
        return Any
    if typing.get_origin(hint) in _LISTS:
        return get_args(hint)[0]
    raise InvalidTask(f"{name}: {parameter} takes the items of a batch; annotate it as list[…]")


def _value_of(hint: Any) -> Any:
    """The type of an item's value: that of the list without the exceptions."""
    if typing.get_origin(hint) not in _LISTS:
        return hint if hint is type(None) else Any
    (item,) = get_args(hint)
    if typing.get_origin(item) not in (typing.Union, types.UnionType):
        return item
    values = [each for each in get_args(item) if not _is_exception(each)]
    return typing.Union[tuple(values)] if values else Any  # noqa: UP007


def _is_exception(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseException)
