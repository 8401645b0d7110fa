"""Warnings for users: old names that still work for one release, and whose line a warning names."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


def warn_renamed(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Warn that `old` is now `new`. `stacklevel` 2 names the caller of the deprecated function."""
    warnings.warn(
        f"{old} is deprecated and will be removed in omniq 0.2: use {new}",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def callers_level() -> int:
    """The `stacklevel` of the first caller outside omniq, as far as there is one in this thread.

    The script of the command line is none: no line of it is the user's.
    """
    frame: FrameType | None = sys._getframe(1)
    level, module = 1, ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] != "omniq":
            break
        frame, level, module = frame.f_back, level + 1, name
    return 1 if frame is None or module.startswith("omniq.cli") else level
