"""Old names that still work for one release, with a `DeprecationWarning`."""

from __future__ import annotations

import warnings


def warn_renamed(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Warn that `old` is now `new`. `stacklevel` 2 names the caller of the deprecated function."""
    warnings.warn(
        f"{old} is deprecated and will be removed in omniq 0.2: use {new}",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def filter_by_function(func_path: str | None, task_type: str | None) -> str | None:
    """Return the path that dead letters are filtered by; `task_type` is its former name."""
    if task_type is None:
        return func_path
    warn_renamed("the argument task_type", "func_path", stacklevel=3)
    return task_type if func_path is None else func_path
