"""Versions of the arguments of a function: what `@task(version=…, upcasters=…)` says, checked and applied.

A task is stored with the version that its arguments have. A worker whose code has a later version changes
them, from one version to the next, before it makes the types of the annotations of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from omniq.errors import InvalidTask
from omniq.models import PermanentError

ANY_VERSION = 0
"""The version of a task whose arguments fit whatever version the code has."""

FIRST_VERSION = 1
"""The version of a function that names none, and of tasks that were stored without one."""


class Args:
    """The arguments of a call, as an upcaster returns them: `Args("eu", retries=2)`."""

    __slots__ = ("args", "kwargs")

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Args):
            return NotImplemented
        return (self.args, self.kwargs) == (other.args, other.kwargs)

    __hash__ = None  # type: ignore[assignment]


Upcaster = Callable[..., Args] | None
"""A function with the parameters of a version that returns the arguments of the next one.

It is called with the arguments as they are stored: plain data. None: the arguments stay as they are.
"""

Upcasters = Mapping[int, Upcaster]
"""The upcasters of a function, each by the version from which it leads to the next one."""

_Call = tuple[tuple[Any, ...], dict[str, Any]]


class WrongSignature(PermanentError):
    """The arguments of a stored task do not fit the function: running it again cannot help."""


def check_upcasters(version: int, upcasters: Upcasters | None) -> None:
    """Raise `InvalidTask` if there is no way from an older version to the version of the code."""
    if upcasters is None:
        if version > FIRST_VERSION:
            raise InvalidTask(
                f"version={version}: give upcasters as well, such as {{{version - 1}: function}}; "
                f"{{{version - 1}: None}} if the arguments of version {version - 1} still fit, and "
                "{} if no task of an older version is to run"
            )
        return
    late = [each for each in upcasters if each >= version]
    if late:
        raise InvalidTask(
            f"upcasters: there is one from version {max(late)}, but version={version} is the last one"
        )
    for each in range(min(upcasters, default=version), version):
        if each not in upcasters:
            raise InvalidTask(
                f"upcasters: there is none from version {each} to {each + 1}; add {each}: function, or "
                f"{each}: None if the arguments of version {each} still fit"
            )


def checked_upcasters(name: str, value: Any) -> Upcasters:
    """The upcasters as they were given. Raises `InvalidTask`."""
    if not isinstance(value, Mapping):
        raise InvalidTask(f"{name}: expected a dictionary, such as {{1: function}}")
    for version, upcaster in value.items():
        if not isinstance(version, int) or isinstance(version, bool) or version < FIRST_VERSION:
            raise InvalidTask(f"{name}: {version!r} is no version; versions are 1, 2, 3 …")
        if upcaster is not None and not callable(upcaster):
            raise InvalidTask(
                f"{name}[{version}]: expected a function that returns Args(…), or None"
            )
        if inspect.iscoroutinefunction(upcaster):
            raise InvalidTask(
                f"{name}[{version}]: expected a plain function; an upcaster only changes arguments"
            )
    return dict(value)


def upcast(
    func_path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    version: int,
    wanted: int,
    upcasters: Upcasters,
) -> _Call:
    """The arguments in the version that the code has. Raises `WrongSignature` if that is not possible."""
    if version == ANY_VERSION:
        return args, kwargs
    for each in range(version, wanted):
        if each not in upcasters:
            raise WrongSignature(
                f"{func_path}: the arguments of this task are of version {version}, and the code has "
                f"version {wanted}: no upcaster leads from version {each} to {each + 1}"
            )
        upcaster = upcasters[each]
        if upcaster is None:
            continue
        try:
            made = upcaster(*args, **kwargs)
        except Exception as error:
            raise WrongSignature(
                f"{func_path}: the upcaster from version {each} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, Args):
            raise WrongSignature(
                f"{func_path}: the upcaster from version {each} returned {type(made).__name__}, and not "
                "Args(…)"
            )
        args, kwargs = made.args, made.kwargs
    return args, kwargs
