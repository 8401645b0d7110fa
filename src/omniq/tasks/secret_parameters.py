"""Which parameters of a function hold secrets: by their names, or because they are marked.

    def charge(customer: str, card: Secret[str]) -> None: ...

The types `SecretStr` and `SecretBytes` of pydantic are marks as well. A parameter of a class with such
a field is hidden as a whole, unless the name of the field hides it.

A task stores which they are, so that a process that displays it needs no access to the function.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from omniq.tasks.resources import resource_of
from omniq.text.masking import is_secret_name

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
    # Imported late: a program that only declares tasks does not need it.
    from omniq.tasks.annotations import resolve_annotations

    names = getattr(inspect.unwrap(func), "__globals__", {})
    parameters = list(inspect.signature(func).parameters.values())
    hints = resolve_annotations({each.name: each.annotation for each in parameters}, names)
    if parameters and _is_context(parameters[0].annotation, hints[parameters[0].name]):
        # The worker passes the context, not the caller.
        del parameters[0]
    # Nor are resources among the arguments.
    parameters = [each for each in parameters if resource_of(hints[each.name]) is None]
    found: list[int | str] = []
    for position, parameter in enumerate(parameters):
        name, annotation = parameter.name, parameter.annotation
        if is_secret_name(name) or _is_marked(annotation) or _has_secret(hints[name], set()):
            found += [position, name]
    return tuple(found)


def _is_marked(annotation: Any) -> bool:
    # Text is not evaluated: its names may exist for type checkers only.
    if isinstance(annotation, str):
        return re.search(r"\bSecret(\[|Str\b|Bytes\b)", annotation) is not None
    return re.search(rf"\bSecret(Str|Bytes)\b|{_MARK}", str(annotation)) is not None


def _has_secret(annotation: Any, seen: set[type]) -> bool:
    """Whether values of this type have a secret that would be displayed."""
    from omniq.tasks.annotations import class_annotations

    if _is_marked(annotation) or any(
        _has_secret(each, seen) for each in typing.get_args(annotation)
    ):
        return True
    kind = typing.get_origin(annotation) or annotation
    if not isinstance(kind, type) or kind in seen or kind.__module__ == "builtins":
        return False
    seen.add(kind)
    # A tuple has no names when it is displayed; in a dictionary, the name of a secret hides it.
    has_names = not issubclass(kind, tuple)
    return any(
        not has_names if is_secret_name(name) else _has_secret(hint, seen)
        for name, hint in class_annotations(kind).items()
    )


def _is_context(annotation: Any, hint: Any) -> bool:
    # The text, if it names what exists for type checkers only.
    text = annotation.partition("[")[0] if isinstance(annotation, str) else ""
    kind = typing.get_origin(hint) or hint
    return "TaskContext" in (getattr(kind, "__name__", ""), text.rpartition(".")[2])
