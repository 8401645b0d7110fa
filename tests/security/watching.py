"""Hears of everything dangerous that this process does: Python tells its audit hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_DANGEROUS = ("pickle.", "marshal.", "os.exec", "os.system", "os.spawn", "os.posix_spawn",
              "subprocess.", "ctypes.dlopen", "code.__new__", "exec", "compile")  # fmt: skip

_heard: list[str] | None = None
_is_hooked = False


def _hook(event: str, arguments: object) -> None:
    if _heard is not None and event.startswith(_DANGEROUS):
        _heard.append(f"{event} {arguments!r:.200}")


@contextmanager
def watched() -> Iterator[list[str]]:
    """What dangerous things were done inside the block."""
    global _heard, _is_hooked
    if not _is_hooked:
        # A hook cannot be taken away again; outside of a block it does nothing.
        sys.addaudithook(_hook)
        _is_hooked = True
    _heard = []
    try:
        yield _heard
    finally:
        _heard = None
