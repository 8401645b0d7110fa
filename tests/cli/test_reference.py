"""The reference page of the command line matches the commands."""

from __future__ import annotations

from tests.cli.reference import PAGE, reference


def test_the_reference_page_matches_the_commands():
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "the commands have changed: python -m tests.cli.reference"
    )
