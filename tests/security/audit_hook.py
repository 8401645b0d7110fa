"""Records the dangerous operations of this process by a Python audit hook."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_DANGEROUS = ("pickle.", "marshal.", "os.exec", "os.system", "os.spawn", "os.posix_spawn",
              "subprocess.", "ctypes.dlopen", "code.__new__", "exec", "compile")  # fmt: skip

_events: list[str] | None = None
_is_hooked = False


def _hook(event: str, arguments: object) -> None:
    if _events is not None and event.startswith(_DANGEROUS):
        _events.append(f"{event} {arguments!r:.200}")


@contextmanager
def audited() -> Iterator[list[str]]:
    """Yield a list of the dangerous operations inside the block."""
    global _events, _is_hooked
    if not _is_hooked:
        # A hook cannot be removed; outside of a block it does nothing.
        sys.addaudithook(_hook)
        _is_hooked = True
    _events = []
    try:
        yield _events
    finally:
        _events = None
