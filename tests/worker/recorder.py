"""What the sample tasks of a test have done, and gates that hold them until the test opens them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 30.0
"""Seconds after which a test that waits for a condition fails."""


class RunRecorder:
    """Records the runs of sample tasks. Safe to use from all threads and event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = 0
        self._gates: dict[str, threading.Event] = {}
        self.ran: list[tuple[str, float]] = []
        self.facts: dict[str, Any] = {}
        self.inside = 0
        self.most_inside = 0

    def note(self, name: str) -> int:
        """Record that a task of that name runs now; returns which run of that name it is, from 1."""
        with self._lock:
            self.ran.append((name, time.monotonic()))
            return sum(other == name for other, _ in self.ran)

    def names(self) -> list[str]:
        with self._lock:
            return [name for name, _ in self.ran]

    def times(self, name: str) -> list[float]:
        """When tasks of that name started, on the monotonic clock."""
        with self._lock:
            return [moment for other, moment in self.ran if other == name]

    def enter(self, name: str) -> int:
        """Count a task of that name as inside; returns what it passes to `leave`."""
        self.note(name)
        with self._lock:
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            return self._generation

    def leave(self, generation: int) -> None:
        with self._lock:
            # An abandoned thread may outlast its test.
            self.inside -= generation == self._generation

    def clear(self) -> None:
        """Forget everything, at the start of a test."""
        with self._lock:
            self._generation += 1
            self._gates, self.ran, self.facts = {}, [], {}
            self.inside = self.most_inside = 0

    def gate(self, name: str) -> threading.Event:
        """The event that holds tasks of that name until it is set."""
        with self._lock:
            return self._gates.setdefault(name, threading.Event())

    def open_all(self) -> None:
        with self._lock:
            gates = list(self._gates.values())
        for gate in gates:
            gate.set()


RECORDER = RunRecorder()


async def until(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Return the value of the condition as soon as it is true; fails after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < deadline, f"the condition was not true within {patience} s"
        await asyncio.sleep(0.002)
    return value


def blocking_until(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """The same for tests without an event loop."""
    return asyncio.run(until(condition, patience))


async def a_while(seconds: float = 0.1) -> None:
    """Let time pass, during which something must not happen."""
    await asyncio.sleep(seconds)
