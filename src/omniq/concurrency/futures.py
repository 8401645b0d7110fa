"""Completes futures that may already be cancelled or completed by another caller."""

from __future__ import annotations

import asyncio
from typing import TypeVar

_T = TypeVar("_T")


def set_result(future: asyncio.Future[_T], result: _T) -> None:
    """Set the result, unless the future is done."""
    if not future.done():
        future.set_result(result)


def finish(future: asyncio.Future[None]) -> None:
    """Complete a future that carries no value, unless it is done."""
    if not future.done():
        future.set_result(None)
