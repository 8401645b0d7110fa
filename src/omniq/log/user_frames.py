"""The part of a traceback that the author of a task needs: the frames of their code.

It works on text, since the traceback of a task may come from a child process. Frames of omniq, and
those that lead from a thread or an event loop to the task, are left out.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_HEADER = re.compile(r"[ |]*(\+ Exception Group )?Traceback \(most recent call last\):")
_DIVIDER = re.compile(r" *\+[+-]+( (\d+|\.\.\.) -+)?")
# A place without a function is that of a SyntaxError: with the text that was compiled, maybe an argument.
_FRAME = re.compile(
    r'(?P<lead>[ |]*?)  File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<name>.*)'
)
_REPEATED = re.compile(r"[ |]*\[Previous line repeated \d+ more times?\]")
_BETWEEN = frozenset(
    {
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    }
)
_OMNIQ = f"{Path(__file__).parents[1]}/"
_RUNNERS = ("asyncio/", "concurrent/futures/", "threading.py", "contextlib.py", "uvloop/")
"""Files of Python that call a task. Before the first frame of the task they are left out."""

_INSTALLED = ("site-packages", "dist-packages")


class Frame(NamedTuple):
    """One frame: where it is, and its lines of the traceback."""

    file: str
    line: int
    name: str
    lines: list[str]

    @property
    def is_own(self) -> bool:
        """Whether the frame is omniq's."""
        return self.file.startswith(_OMNIQ)

    @property
    def is_runner(self) -> bool:
        """Whether it is Python's, on the way to the task."""
        return (
            any(
                self.file.startswith(f"{folder}/{runner}")
                for folder in _library_folders()
                for runner in _RUNNERS
            )
            or "/uvloop/" in self.file
        )

    @property
    def is_users(self) -> bool:
        """Whether it is code of the application: not omniq's, Python's or an installed package's."""
        if self.is_own or self.file.startswith("<"):
            return False
        if any(f"/{folder}/" in self.file for folder in _INSTALLED):
            return False
        return not any(self.file.startswith(f"{folder}/") for folder in _library_folders())

    @property
    def place(self) -> str:
        """Where it is, for people: relative to the current folder if it lies below it."""
        path = Path(self.file)
        try:
            shown = str(path.relative_to(Path.cwd()))
        except (OSError, ValueError):
            shown = self.file
        return f"{shown}:{self.line} in {self.name}"


def where(traceback: str, *, first_only: bool = False) -> str:
    """The innermost place in the application's code; else the innermost place at all.

    `first_only`: reads nothing after the first exception's frames; see `user_frames`.
    """
    frames = [each for each in _parsed(traceback, first_only=first_only) if isinstance(each, Frame)]
    users = [frame for frame in frames if frame.is_users]
    innermost = (users or [frame for frame in frames if not frame.is_own] or frames)[-1:]
    return innermost[0].place if innermost else ""


def user_frames(traceback: str, shown: Callable[[str], str] | None) -> list[str]:
    """The lines of a traceback without the frames of omniq and of executors.

    `shown` makes the text of an exception, such as "ValueError: …", fit to be written, as one line. None
    hides it: then only the frames of the first exception are returned, because behind them nothing
    tells a frame from a text that looks like one.
    """
    parts = list(_parsed(traceback, first_only=shown is None))
    has_task = any(isinstance(part, Frame) and not _is_left_out(part) for part in parts)
    lines: list[str] = []
    has_begun = False
    for part in parts:
        if isinstance(part, str):
            has_begun = has_begun and not _HEADER.fullmatch(part)
            lines.append(part if _is_structure(part) or shown is None else shown(part))
        elif not has_task:
            lines += part.lines
        elif not part.is_own and (has_begun or not part.is_runner):
            has_begun = True
            lines += part.lines
    return lines


def _is_structure(line: str) -> bool:
    """Whether the line belongs to every traceback, and is not the text of an exception."""
    bare = line.strip(" |")
    return not bare or bare in _BETWEEN or bool(_HEADER.fullmatch(line) or _DIVIDER.fullmatch(line))


def _is_left_out(frame: Frame) -> bool:
    return frame.is_own or frame.is_runner


def _parsed(traceback: str, *, first_only: bool) -> Iterator[Frame | str]:
    """Yield the frames and, as text, what stands between them; a text of several lines as one."""
    frame: Frame | None = None
    text: list[str] = []
    for line in traceback.splitlines():
        found = _FRAME.fullmatch(line)
        if found is not None and not text:
            if frame is not None:
                yield frame
            frame = Frame(found["file"], int(found["line"]), found["name"], [line])
            lead = found["lead"]
        elif frame is not None and (line.startswith(f"{lead}    ") or _REPEATED.fullmatch(line)):
            frame.lines.append(line)
        else:
            if frame is not None:
                yield frame
                frame = None
                if first_only:
                    return
            if line.strip(" |") and _is_structure(line):
                yield from _joined(text)
                text = []
                yield line
            else:
                text.append(line)
    if frame is not None:
        yield frame
    elif not first_only:
        yield from _joined(text)


def _joined(text: list[str]) -> Iterator[str]:
    """The lines of a text as one, and the empty lines around it, which belong to the traceback."""
    while text and not text[0].strip(" |"):
        yield text.pop(0)
    after = []
    while text and not text[-1].strip(" |"):
        after.append(text.pop())
    if text:
        yield "\n".join(text)
    yield from after


@cache
def _library_folders() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
