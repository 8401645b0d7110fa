"""Styled text for a terminal: its width, its wrapped lines, and how it is printed.

Widths are cells of a terminal: a wide character, such as 漢, takes two.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Iterator
from typing import TextIO

_CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "magenta": "35",
    "cyan": "36",
}


class Text:
    """Text in parts, each with a style such as `bold red`. A value: every method returns a new one."""

    __slots__ = ("parts", "plain")

    def __init__(self, content: str = "", style: str = "") -> None:
        self.parts: tuple[tuple[str, str], ...] = ((content, style),) if content else ()
        self.plain = content

    @classmethod
    def of(cls, *parts: Text | str) -> Text:
        """These parts, one after the other."""
        made = cls()
        texts = [cls(part) if isinstance(part, str) else part for part in parts]
        made.parts = tuple(part for text in texts for part in text.parts)
        made.plain = "".join(content for content, _ in made.parts)
        return made

    @classmethod
    def join(cls, separator: str, texts: Iterable[Text | str]) -> Text:
        """The texts with the separator between them."""
        parts: list[Text | str] = []
        for text in texts:
            parts += [separator, text] if parts else [text]
        return cls.of(*parts)

    @property
    def width(self) -> int:
        return width_of(self.plain)

    def between(self, start: int, end: int) -> Text:
        """The characters from `start` up to `end`, with their styles."""
        made, parts, at = Text(), [], 0
        for content, style in self.parts:
            piece = content[max(start - at, 0) : max(end - at, 0)]
            at += len(content)
            if piece:
                parts.append((piece, style))
        made.parts, made.plain = tuple(parts), self.plain[start:end]
        return made

    def wrapped(self, width: int) -> list[Text]:
        """Its lines, none wider than that. Breaks at spaces, and within words that are too long."""
        return [self.between(start, end) for start, end in _lines(self.plain, width)]

    def styled(self, style: str) -> Text:
        """The same text, in this style where a part has none."""
        made = Text()
        made.parts = tuple((content, own or style) for content, own in self.parts)
        made.plain = self.plain
        return made

    def rendered(self, has_colours: bool) -> str:
        """What a terminal gets."""
        if not has_colours:
            return self.plain
        return "".join(_coloured(content, style) for content, style in self.parts)


def _coloured(content: str, style: str) -> str:
    if not style:
        return content
    codes = ";".join(_CODES[name] for name in style.split())
    return f"\x1b[{codes}m{content}\x1b[0m"


def width_of(content: str) -> int:
    """The width of the text in cells of a terminal.

    >>> width_of("abc"), width_of("漢字"), width_of("e\\u0301")
    (3, 4, 1)
    """
    return len(content) if content.isascii() else sum(map(_cells, content))


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(content: str, width: int) -> str:
    """The beginning of the text that fits, with … at its end if something is missing.

    >>> cut("a long name", 7), cut("short", 7)
    ('a long…', 'short')
    """
    if width_of(content) <= width:
        return content
    return content[: _fitting(content, 0, len(content), width - 1)] + "…"


def _lines(content: str, width: int) -> Iterator[tuple[int, int]]:
    """Where each line of the wrapped text begins and ends."""
    start = 0
    for line in content.split("\n"):
        yield from _wrapped_line(content, start, start + len(line), max(width, 2))
        start += len(line) + 1


def _wrapped_line(content: str, start: int, end: int, width: int) -> Iterator[tuple[int, int]]:
    while width_of(content[start:end]) > width:
        limit = _fitting(content, start, end, width)
        space = content.rfind(" ", start, limit + 1)
        if content[start : max(space, start)].strip():
            yield start, start + len(content[start:space].rstrip())
            start = space + 1
        else:
            yield start, limit
            start = limit
    yield start, end


def _fitting(content: str, start: int, end: int, width: int) -> int:
    """The end of the longest piece from `start` on that is not wider than that."""
    if content.isascii():
        return min(end, start + width)
    used = 0
    for at in range(start, end):
        used += _cells(content[at])
        if used > width:
            return at
    return end


def has_colours(stream: TextIO) -> bool:
    """Whether colours may be written to the stream: a terminal, and no NO_COLOR.

    FORCE_COLOR asks for them also where there is no terminal.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
