"""The functions that this process has passed to a queue, which its own pools may run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

Listener = Callable[[], object]


class PassedFunctions:
    """Paths of functions. They are only added: a pool may run what was enqueued once."""

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        self._listeners: dict[object, Listener] = {}
        self._lock = threading.Lock()

    def add(self, func_path: str) -> None:
        """Note that this process has passed the function to a queue; calls the listeners if it is new."""
        with self._lock:
            if func_path in self._paths:
                return
            self._paths[func_path] = None
            listeners = list(self._listeners.values())
        for listener in listeners:
            listener()

    def subscribe(self, listener: Listener) -> Callable[[], object]:
        """Call the listener, in the thread that enqueues, after each new function; returns how to end it."""
        key = object()
        with self._lock:
            self._listeners[key] = listener
        return lambda: self._listeners.pop(key, None)

    def __contains__(self, func_path: object) -> bool:
        return func_path in self._paths

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._paths))


# Of the process, like `sys.modules`: a queue and the pool that runs its tasks need not know each other.
PASSED = PassedFunctions()
