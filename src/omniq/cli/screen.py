"""What a terminal shows for a while: live views and progress bars."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from omniq.cli.tables import Renderable, lines_of
from omniq.cli.text import Text, cut, has_colours
from omniq.clock import SYSTEM_CLOCK

_PIPE_WIDTH = 10_000
_BAR = 40
_REDRAW_SECONDS = 0.1

_CLEAR_LINE = "\x1b[2K"
"""Written before a line: after one that is as wide as the terminal, it would clear its last character."""


def width_for(stream: TextIO, in_pipe: int = _PIPE_WIDTH) -> int:
    """The width of the lines that the stream gets. In a pipe no line is cut or wrapped:

    a program that reads a table gets all of it.
    """
    if stream.isatty() or os.environ.get("COLUMNS"):
        return _size(stream).columns
    return in_pipe


def _size(stream: TextIO) -> os.terminal_size:
    """The size of the terminal that the stream is; COLUMNS and LINES override it."""
    found = shutil.get_terminal_size((0, 0))
    if found.columns and found.lines:
        return found
    try:
        own = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        own = os.terminal_size((80, 24))
    return os.terminal_size((found.columns or own.columns or 80, found.lines or own.lines or 24))


class Region:
    """Lines at the end of the output that are drawn again in place.

    Without a terminal only the last of them is printed, when the view ends.
    """

    def __init__(self) -> None:
        self._stream = sys.stdout
        self._is_tty = self._stream.isatty()
        self._height = 0
        self._last: list[str] = []

    def update(self, things: Iterable[Renderable]) -> None:
        width, colours = width_for(self._stream), has_colours(self._stream)
        lines = [line.rendered(colours) for thing in things for line in lines_of(thing, width)]
        self._last = lines
        if self._is_tty:
            back = f"\r\x1b[{self._height}A" if self._height else ""
            self._stream.write(
                back + "".join(f"{_CLEAR_LINE}{line}\n" for line in lines) + "\x1b[J"
            )
            self._stream.flush()
            self._height = len(lines)

    def end(self) -> None:
        if not self._is_tty:
            self._stream.write("".join(f"{line}\n" for line in self._last))


@contextmanager
def region() -> Iterator[Region]:
    """A view of a few lines below what was printed before; it stays when it ends."""
    view = Region()
    with _hidden_cursor(sys.stdout):
        yield view
    view.end()


class Screen:
    """The whole window, drawn again and again. What does not fit is left out at the bottom."""

    def update(self, things: Iterable[Renderable]) -> None:
        stream = sys.stdout
        size, colours = _size(stream), has_colours(stream)
        lines = [line for thing in things for line in lines_of(thing, size.columns)]
        if len(lines) > size.lines:
            lines = [*lines[: size.lines - 1], Text("…", "dim")]
        # Empty lines clear what was below.
        lines += [Text()] * (size.lines - len(lines))
        drawn = "\n".join(f"{_CLEAR_LINE}{line.rendered(colours)}" for line in lines)
        stream.write(f"\x1b[H{drawn}")
        stream.flush()


@contextmanager
def full_screen() -> Iterator[Screen]:
    """A view on the whole window; what was there before is restored when it ends."""
    sys.stdout.write("\x1b[?1049h")
    try:
        with _hidden_cursor(sys.stdout):
            yield Screen()
    finally:
        sys.stdout.write("\x1b[?1049l")
        sys.stdout.flush()


@contextmanager
def _hidden_cursor(stream: TextIO) -> Iterator[None]:
    is_tty = stream.isatty()
    if is_tty:
        stream.write("\x1b[?25l")
    try:
        yield
    finally:
        if is_tty:
            stream.write("\x1b[?25h")


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal. It disappears at the end."""
    stream = sys.stderr
    if not stream.isatty():
        yield lambda done, total: None
        return
    bar = _Bar(title, stream)
    try:
        with _hidden_cursor(stream):
            yield bar.update
    finally:
        stream.write("\r\x1b[K")
        stream.flush()


class _Bar:
    def __init__(self, title: str, stream: TextIO) -> None:
        self._title = title
        self._stream = stream
        self._began = SYSTEM_CLOCK.monotonic()
        self._drawn = -_REDRAW_SECONDS

    def update(self, done: int, total: int) -> None:
        elapsed = SYSTEM_CLOCK.monotonic() - self._began
        if done < total and elapsed - self._drawn < _REDRAW_SECONDS:
            return
        self._drawn = elapsed
        full = done * _BAR // total if total else _BAR
        left = f"{elapsed / done * (total - done):.0f} s left" if done < total and done else ""
        line = f"{self._title} {'█' * full}{'░' * (_BAR - full)} {done:,}/{total:,} {left}"
        self._stream.write(f"\r\x1b[K{cut(line, _size(self._stream).columns - 1)}")
        self._stream.flush()
