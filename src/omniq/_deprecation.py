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
