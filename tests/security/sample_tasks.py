"""A user's module: one task, and much that is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from os import system
from subprocess import run as run_anything

partial_system = partial(os.system, "true")

__all__ = ["good", "run_anything", "system"]


def good(number: int) -> int:
    return number + 1


def generator() -> Iterator[int]:
    yield 1


class Tool:
    def method(self) -> None:
        """Not to be reached."""


TOOL = Tool()


class _Magic:
    def __call__(self) -> None:
        """Not to be reached."""


magic = _Magic()
