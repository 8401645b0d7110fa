"""Fixtures for tests of your own code. pytest finds them by itself wherever omniq is installed.

| fixture | what a test gets |
|---|---|
| `omniq_queue` | a `ManualQueue`: in memory, blocking; nothing runs until the test says so |
| `async_omniq_queue` | the same for async tests: an `AsyncManualQueue` |
| `omniq_clock` | the `ManualClock` of both |

For fixtures with real servers see `omniq.testing.plugin`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from omniq.testing.clock import ManualClock
    from omniq.testing.manual import AsyncManualQueue, ManualQueue

# omniq is imported by the fixtures and not here: pytest imports this file in every run, also in
# those that need none of it.


@pytest.fixture
def omniq_clock() -> ManualClock:
    """A clock that stands still until the test moves it."""
    from omniq.testing.clock import ManualClock

    return ManualClock()


@pytest.fixture
def omniq_queue(omniq_clock: ManualClock) -> Iterator[ManualQueue]:
    """A queue in memory for blocking code."""
    from omniq.testing.manual import ManualQueue

    with ManualQueue(clock=omniq_clock) as queue:
        yield queue


@pytest.fixture
def async_omniq_queue(omniq_clock: ManualClock) -> Iterator[AsyncManualQueue]:
    """A queue in memory for async code, with whatever plugin runs async tests."""
    from omniq.testing.manual import AsyncManualQueue

    queue = AsyncManualQueue(clock=omniq_clock)
    # A storage in memory needs no event loop of its own: the test's loop may be any.
    asyncio.run(queue.open())
    yield queue
    asyncio.run(queue.close())
