"""What is published says nothing about where and how it was written, and leaves nothing undone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "chaos", ".ci")
SUFFIXES = {
    "",
    ".cfg",
    ".html",
    ".js",
    ".css",
    ".lua",
    ".md",
    ".patch",
    ".py",
    ".sh",
    ".sql",
    ".toml",
}

UNPUBLISHED = {"__pycache__", ".environments"}

# Put together here, so that this file does not contain what it looks for.
WORDS = [
    "/" + r"work/(main|shared|\.)",
    "/" + "root/",
    "/" + "opt/",
    "/" + r"home/\w",
    "py" + r"pi\.",
    "python" + "hosted",
    r"(?<!user-)\b(sub)?age" + r"nts?\b",
    r"\b(this|another|previous|earlier) " + "session",
    r"\b(anth" + r"ropic|cla" + r"ude|open" + r"ai|chat" + r"gpt|co" + r"pilot)\b",
    r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
]


def published() -> list[Path]:
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    files = [path for path in (*ROOT.iterdir(), *inside) if path.is_file()]
    return sorted(
        path for path in files if path.suffix in SUFFIXES and not UNPUBLISHED & {*path.parts}
    )


@pytest.mark.parametrize("path", published(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_published_file_says_nothing_it_should_not(path):
    text = path.read_text(encoding="utf-8")
    found = [
        f"line {number}: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), start=1)
        if any(re.search(word, line, re.IGNORECASE) for word in WORDS)
    ]

    assert not found
