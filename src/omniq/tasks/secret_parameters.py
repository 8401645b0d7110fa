"""Which parameters of a function hold secrets: by their names, or because they are marked.

    def charge(customer: str, card: Secret[str]) -> None: ...

A task stores which they are, so that a process that displays it needs no access to the function.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from omniq.masking import is_secret_name

_T = TypeVar("_T")
_MARK = "omniq: a secret"

Secret = Annotated[_T, _MARK]
"""The type of a parameter whose value is hidden wherever a task is displayed."""


def secret_parameters(func: Callable[..., Any]) -> tuple[int | str, ...]:
    """Return positions and names of the parameters that hold secrets, without the context.

    >>> def send(to: str, password: str, card: Secret[str]) -> None: ...
    >>> secret_parameters(send)
    (1, 'password', 2, 'card')
    """
    parameters = list(inspect.signature(func).parameters.values())
    if parameters and _text(parameters[0].annotation).rpartition(".")[2] == "TaskContext":
        # The worker passes the context, not the caller.
        del parameters[0]
    found: list[int | str] = []
    for position, parameter in enumerate(parameters):
        if is_secret_name(parameter.name) or _is_marked(parameter.annotation):
            found += [position, parameter.name]
    return tuple(found)


def _is_marked(annotation: Any) -> bool:
    # Text is not evaluated: its names may exist for type checkers only.
    if isinstance(annotation, str):
        return re.search(r"\bSecret\[", annotation) is not None
    return _MARK in getattr(annotation, "__metadata__", ())


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
