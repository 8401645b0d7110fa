"""Which parameters of a function hold secrets: by their names, or because they are marked.

    def charge(customer: str, card: Secret[str]) -> None: ...

A task carries what is known of that, so that whoever shows it need not have the function.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

_T = TypeVar("_T")
_MARK = "omniq: a secret"

Secret = Annotated[_T, _MARK]
"""The type of a parameter whose value is hidden wherever a task is shown."""

_WORDS = re.compile(
    r"passw|passphrase|secret|token|api_?-?key|access_?-?key|private_?-?key|authorization"
    r"|credential|cookie|session_?-?id|signature|\bpin\b|\bcvv\b|\bssn\b|\biban\b|card_?-?number",
    re.IGNORECASE,
)


def tells_of_a_secret(name: str) -> bool:
    """Whether what has that name is best not shown.

    >>> [tells_of_a_secret(name) for name in ("user", "db_password", "apiKey")]
    [False, True, True]
    """
    return _WORDS.search(name) is not None


def secret_parameters(func: Callable[..., Any]) -> tuple[int | str, ...]:
    """Positions and names of the parameters that hold secrets, as a caller counts them.

    >>> def send(to: str, password: str, card: Secret[str]) -> None: ...
    >>> secret_parameters(send)
    (1, 'password', 2, 'card')
    """
    parameters = list(inspect.signature(func).parameters.values())
    if parameters and _text(parameters[0].annotation).rpartition(".")[2] == "TaskContext":
        # A worker passes it, not the caller.
        del parameters[0]
    found: list[int | str] = []
    for position, parameter in enumerate(parameters):
        if tells_of_a_secret(parameter.name) or _is_marked(parameter.annotation):
            found += [position, parameter.name]
    return tuple(found)


def _is_marked(annotation: Any) -> bool:
    # As text it has not been worked out; what it names may exist for type checkers only.
    if isinstance(annotation, str):
        return re.search(r"\bSecret\[", annotation) is not None
    return _MARK in getattr(annotation, "__metadata__", ())


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
