"""The page about the command line cannot lie."""

from __future__ import annotations

from tests.cli.reference import PAGE, reference


def test_the_page_is_what_the_commands_say():
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "the commands have changed: python -m tests.cli.reference"
    )
