"""What a child process for `executor="process"` may use at most: memory, processes and open files.

The kernel enforces the limits. A task that reaches one gets `MemoryError`, or an `OSError` from the call that
starts a process or opens a file; other tasks and the worker are not affected.
"""

from __future__ import annotations

import os

from omniq.errors import SettingsError
from omniq.settings import Settings

CHILD_LIMITS = ("child_memory_limit", "child_process_limit", "child_file_limit")
"""The settings with the limits."""


def check_child_limits(settings: Settings) -> None:
    """Raise `SettingsError` if the kernel would not enforce the limits of these settings."""
    if not any(getattr(settings, name) for name in CHILD_LIMITS):
        return
    try:
        import resource  # noqa: F401
    except ImportError as error:
        given = next(name for name in CHILD_LIMITS if getattr(settings, name))
        raise SettingsError(f"{given}: this system cannot limit a process") from error
    if settings.child_process_limit is not None and os.getuid() == 0:
        raise SettingsError(
            "child_process_limit: the kernel does not limit the processes of root; run the worker as another user"
        )


def limit_this_process(settings: Settings) -> None:
    """Apply the limits to this process, and to those that it starts."""
    if not any(getattr(settings, name) for name in CHILD_LIMITS):
        return
    import resource

    kinds = (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE)
    for kind, name in zip(kinds, CHILD_LIMITS, strict=True):
        most = getattr(settings, name)
        if most is None:
            continue
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(kind, (most, most))
