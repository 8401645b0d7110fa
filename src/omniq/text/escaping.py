"""Escapes text that others chose, for terminals and logs."""

from __future__ import annotations


def visible(text: str, *, keep: str = "") -> str:
    """The text with everything escaped that a terminal would execute instead of showing it.

    Control characters, escape sequences, characters that change the direction of writing or that
    have no width: every caller that can enqueue a task can choose the text of its error. `keep`
    lists characters to leave as they are, such as line ends.

    >>> visible("\\x1b[2Jall is well\\u202e")
    '\\\\x1b[2Jall is well\\\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode()
        for each in text
    )
