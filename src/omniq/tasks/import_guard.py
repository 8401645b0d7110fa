"""Refuses to enqueue and to start a worker while omniq imports a module for its tasks.

A script that does so at its top, without `if __name__ == "__main__":`, would do it again in every
process that imports it to run one of its tasks: each run would enqueue another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from omniq.errors import UnguardedModule

_T = TypeVar("_T")

_IMPORTED: ContextVar[str] = ContextVar("omniq_imported", default="")
"""The module that is being imported. Code that the module runs, also in an event loop, sees it."""


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Import a module of the user inside this."""
    token = _IMPORTED.set(name)
    try:
        yield
    finally:
        _IMPORTED.reset(token)


def is_importing() -> bool:
    """Whether this is code that a module runs while omniq imports it."""
    return bool(_IMPORTED.get())


def refuse_during_import(what: str) -> None:
    """Raise `UnguardedModule` if a module does this while omniq imports it."""
    if name := _IMPORTED.get():
        raise UnguardedModule(name, what)


@contextmanager
def refuse_enqueue(tasks: list[_T]) -> Iterator[list[_T]]:
    """A wrapper for the enqueues of a queue that was opened during an import."""
    refuse_during_import("enqueues")
    yield tasks
