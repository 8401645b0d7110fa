"""A module of a user: one task, and much that is not a task."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from os import system
from subprocess import run as run_anything

from omniq import task

partial_system = partial(os.system, "true")

__all__ = ["good", "run_anything", "system"]


@task
def good(number: int) -> int:
    return number + 1


def generator() -> Iterator[int]:
    yield 1


class Tool:
    def method(self) -> None:
        """Must not be reachable."""


TOOL = Tool()


class _Magic:
    def __call__(self) -> None:
        """Must not be reachable."""


magic = _Magic()
