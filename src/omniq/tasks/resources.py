"""Parameters that a worker fills in: `pool: Annotated[Pool, Resource(make_pool)]`.

The annotation of the function decides, never the record: a stored task cannot name a resource, nor
pass a value for its parameter.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from inspect import Parameter
from typing import Annotated, Any, Literal, NoReturn, get_args

from omniq.errors import InvalidTask

Scope = Literal["worker", "run"]

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_UNIONS = (typing.Union, types.UnionType)
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Resource:
    """Marks a parameter whose value a worker makes: a pool, a client, a session.

    `make` is a function, sync or async, or a class. It may be a generator with one `yield`, and what
    it returns may be a context manager: then it is entered, and left at the end. Its own parameters
    may be resources too. With `scope="worker"` the value is made once for each worker process, by the
    first run that needs it, and shared by all tasks with the same `make`; with `scope="run"` it is
    made for each run, and `make` may have a `TaskContext` as its first parameter.
    """

    make: Callable[..., Any]
    _: KW_ONLY
    scope: Scope = "worker"

    def __post_init__(self) -> None:
        make: object = self.make
        if not callable(make):
            if inspect.iscoroutine(make):
                # Python would warn that it was never awaited, which is not the mistake.
                make.close()
            raise InvalidTask(
                f"Resource({type(make).__name__}): expected the function that makes it; pass the "
                "function, do not call it"
            )
        try:
            hash(make)
        except TypeError:
            raise InvalidTask(
                f"Resource({type(make).__name__}): tasks share what the same function makes, and this "
                "object has no hash; pass a function"
            ) from None
        if self.scope not in get_args(Scope):
            raise InvalidTask(f"scope {self.scope!r}: expected 'worker' or 'run'")

    @property
    def name(self) -> str:
        """The name of the function that makes it."""
        return str(getattr(self.make, "__qualname__", type(self.make).__name__))

    def open(self, *args: Any, **kwargs: Any) -> Any:
        """Call `make`; a generator becomes a context manager."""
        made = self.make(*args, **kwargs)
        if inspect.isasyncgen(made):
            return contextlib.asynccontextmanager(lambda: made)()
        if inspect.isgenerator(made):
            return contextlib.contextmanager(lambda: made)()
        return made


class _Injected:
    """The default of a parameter that a worker fills in. Any use of it is a mistake."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "INJECTED"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"only a worker fills in this parameter: pass a value when you call the function yourself "
            f"(.{name} of INJECTED was used)"
        )


INJECTED: Any = _Injected()
"""The default for a parameter with a `Resource`: type checkers then know that callers leave it out."""


@dataclass(frozen=True, slots=True)
class ResourceParameter:
    """A parameter that is a resource. `position`: among the positional ones; None if only named."""

    name: str
    position: int | None
    resource: Resource


def resource_of(hint: Any) -> Resource | None:
    """Return the resource that an annotation names; None for an ordinary one."""
    if type(hint).__name__ == "TypeAliasType":
        hint = hint.__value__
    origin = typing.get_origin(hint)
    if origin in _UNIONS:
        # Annotated[Pool, Resource(make_pool)] | None: a worker makes it all the same.
        return next(filter(None, map(resource_of, get_args(hint))), None)
    if origin is not Annotated:
        return None
    for mark in reversed(hint.__metadata__):
        if isinstance(mark, Resource):
            return mark
        if mark is Resource:
            raise InvalidTask(
                "Resource: name the function that makes it, as in Resource(make_pool)"
            )
    return None


def resource_parameters(
    parameters: Iterable[Parameter], hints: Mapping[str, Any]
) -> tuple[ResourceParameter, ...]:
    """Return those of a function's parameters, without its context, that a worker fills in."""
    found = []
    position = 0
    for parameter in parameters:
        resource = resource_of(hints.get(parameter.name))
        if resource is not None:
            if parameter.kind is Parameter.POSITIONAL_ONLY or parameter.kind in _VARIABLE:
                raise InvalidTask(
                    f"parameter {parameter.name}: a resource needs a parameter that can be passed by "
                    "name; make it keyword-only"
                )
            is_named = parameter.kind is Parameter.KEYWORD_ONLY
            found.append(
                ResourceParameter(parameter.name, None if is_named else position, resource)
            )
        elif parameter.default is INJECTED:
            raise InvalidTask(
                f"parameter {parameter.name}: INJECTED is for Annotated[…, Resource(…)]; there is no "
                "such annotation, or its names do not exist in the module of the function"
            )
        position += parameter.kind in _POSITIONAL
    return tuple(found)
