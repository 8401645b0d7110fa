"""The keys of a live view: q and Ctrl-C quit."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from omniq.concurrency.futures import finish


@contextmanager
def quit_key() -> Iterator[asyncio.Future[None]]:
    """A future that is done when the user presses q or Ctrl-C. Restores the terminal on exit."""
    loop = asyncio.get_running_loop()
    pressed: asyncio.Future[None] = loop.create_future()

    stop = partial(finish, pressed)
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        if sys.stdin.isatty():
            with _single_keys(loop, sys.stdin.fileno(), stop):
                yield pressed
        else:
            yield pressed
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def _single_keys(
    loop: asyncio.AbstractEventLoop, terminal: int, stop: Callable[[], None]
) -> Iterator[None]:
    """Read single key presses without echo."""

    def read() -> None:
        keys = os.read(terminal, 64)
        if not keys or keys[:1] in b"qQ\x04":
            stop()

    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        loop.add_reader(terminal, read)
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
