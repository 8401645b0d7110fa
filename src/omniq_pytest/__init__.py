"""Fixtures for tests of your own code. pytest finds them automatically where omniq is installed.

| fixture | value |
|---|---|
| `omniq_queue` | a `ManualQueue`: in memory, blocking; tasks run only when the test runs them |
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

# The fixtures import omniq, and this module does not: pytest imports it in every run where omniq is
# installed, also in runs that do not use it. It is a package beside omniq, because the import of any
# module of omniq imports omniq.


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
    """A queue in memory for async code, with any plugin that runs async tests."""
    from omniq.testing.manual import AsyncManualQueue

    queue = AsyncManualQueue(clock=omniq_clock)
    # A storage in memory is not bound to an event loop, so the test may run on any loop.
    asyncio.run(queue.open())
    yield queue
    asyncio.run(queue.close())
