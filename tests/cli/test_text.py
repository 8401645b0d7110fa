"""Styled text and tables at any width."""

from __future__ import annotations

import pytest

from omniq.cli.tables import Listing, Pairs, lines_of
from omniq.cli.text import Text, width_of


def plain(thing: Listing | Pairs | Text | str, width: int) -> list[str]:
    return [line.plain for line in lines_of(thing, width)]


@pytest.mark.parametrize("width", [2, 3, 7, 20])
@pytest.mark.parametrize(
    "content",
    ["", "a", "one two three four", "漢字かな交じり文 and more", "x" * 50, "  indented text"],
)
def test_wrapped_lines_fit_and_lose_nothing_but_spaces(content, width):
    lines = Text(content).wrapped(width)

    assert all(line.width <= width for line in lines)
    assert "".join(line.plain for line in lines).replace(" ", "") == content.replace(" ", "")


def test_text_breaks_at_spaces_and_keeps_its_own_lines():
    assert plain("one two three", 8) == ["one two", "three"]
    assert plain("    raise Error\nnext", 40) == ["    raise Error", "next"]
    assert plain(Text("a" * 10), 4) == ["aaaa", "aaaa", "aa"]


def test_styles_survive_joining_and_wrapping():
    text = Text.of(Text("red one", "red"), " plain ", Text("bold", "bold"))

    first, second = text.wrapped(10)
    assert first.rendered(True) == "\x1b[31mred one\x1b[0m"
    assert second.rendered(True) == "plain \x1b[1mbold\x1b[0m"
    assert text.rendered(False) == "red one plain bold"


def test_a_table_aligns_wide_characters_and_numbers():
    rows = [("漢字", 5, "x"), ("ab", 1_000, "y")]

    assert plain(Listing(("name", ">count", "last"), rows), 80) == [
        "name  count  last",
        "漢字      5  x",
        "ab     1000  y",
    ]


def test_the_last_cell_wraps_below_itself():
    rows = [("id-1", "run", "an error that goes on for a while")]

    assert plain(Listing(("id", "what", "error"), rows), 34) == [
        "id    what  error",
        "id-1  run   an error that goes on",
        "            for a while",
    ]


def test_pairs_leave_out_what_is_empty_and_wrap_values():
    shown = plain(Pairs([("id", "1"), ("empty", ""), ("a longer name", "w " * 20)]), 36)

    assert shown[0] == "id             1"
    assert shown[1].startswith("a longer name  w w")
    assert all(width_of(line) <= 36 for line in shown)
    assert "empty" not in "".join(shown)
