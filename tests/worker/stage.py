"""Where tasks and tests of one process meet: who ran, who runs now, and who may go on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 8.0
"""Seconds after which a test that waits in vain fails."""


class Stage:
    """What the sample tasks have done. Safe to use from all threads and event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scene = 0
        self._gates: dict[str, threading.Event] = {}
        self.ran: list[tuple[str, float]] = []
        self.facts: dict[str, Any] = {}
        self.inside = 0
        self.most_inside = 0

    def note(self, name: str) -> int:
        """A task of that name runs now; which run of that name it is, from 1."""
        with self._lock:
            self.ran.append((name, time.monotonic()))
            return sum(other == name for other, _ in self.ran)

    def names(self) -> list[str]:
        with self._lock:
            return [name for name, _ in self.ran]

    def times(self, name: str) -> list[float]:
        """When tasks of that name began, on the monotonic clock."""
        with self._lock:
            return [moment for other, moment in self.ran if other == name]

    def enter(self, name: str) -> int:
        """A task of that name is inside from now on; what it has to show when it leaves."""
        self.note(name)
        with self._lock:
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            return self._scene

    def leave(self, scene: int) -> None:
        with self._lock:
            # A thread that was given up may outlast its test.
            self.inside -= scene == self._scene

    def clear(self) -> None:
        """Begin with an empty stage."""
        with self._lock:
            self._scene += 1
            self._gates, self.ran, self.facts = {}, [], {}
            self.inside = self.most_inside = 0

    def gate(self, name: str) -> threading.Event:
        """What holds tasks of that name until it is set."""
        with self._lock:
            return self._gates.setdefault(name, threading.Event())

    def open_all(self) -> None:
        with self._lock:
            gates = list(self._gates.values())
        for gate in gates:
            gate.set()


STAGE = Stage()


async def until(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Return what the condition gives as soon as that is true; fails after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.002)
    return value


def blocking_until(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """The same for tests without an event loop."""
    return asyncio.run(until(condition, patience))


async def a_while(seconds: float = 0.1) -> None:
    """Let time pass, for what must not happen in it."""
    await asyncio.sleep(seconds)
