"""Every row of `docs/reference/requirements.md` is there once and names tests that exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from omniq.storage.base import BaseStorage

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "requirements.md"
SOURCES = (ROOT / "tests", ROOT / "src" / "omniq" / "testing" / "contract")

ROWS = {"S000": 36, "S001": 14, "S002": 13, "S003": 35, "S004": 78}
"""How many rows each part of the design has."""

VERBS = {
    "enqueue": ["task"],
    "dequeue": ["now"],
    "mark_running": ["task_id"],
    "mark_done": ["task_id", "result"],
    "mark_failed": ["task_id", "error", "will_retry"],
    "get_result": ["task_id"],
    "purge_results": ["older_than"],
    "reschedule": ["task_id", "new_eta"],
}


class Row(NamedTuple):
    """A row of the page: its id, the sentence that says what it asks for, the tests it names."""

    id: str
    sentence: str
    tests: list[str]


def rows() -> list[Row]:
    """Return all rows of the page."""
    found = re.findall(r"^\| (S\d{3}-\d+) \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.M)
    parts = [(row, rest.split(" | ")) for row, rest in found]
    return [
        Row(row, sentence.strip(), re.findall(r"`(test_\w+)`", shown))
        for row, (sentence, shown, *_) in parts
    ]


def known_tests() -> set[str]:
    """Return the names of all functions in the tests and in the contract suite."""
    names: set[str] = set()
    for folder in SOURCES:
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(node.name)
    return names


def test_every_requirement_has_its_row_once():
    expected = [
        f"{part}-{number}" for part, count in ROWS.items() for number in range(1, count + 1)
    ]
    found = Counter(row.id for row in rows())

    assert sorted(found) == sorted(expected)
    assert [row for row, count in found.items() if count > 1] == []


def test_every_row_names_tests_and_each_of_them_exists():
    known = known_tests()
    without = [row.id for row in rows() if not row.tests]
    missing = {
        row.id: unknown
        for row in rows()
        if (unknown := [name for name in row.tests if name not in known])
    }

    assert without == []
    assert missing == {}


def test_every_row_says_what_it_asks_for_in_a_sentence():
    sentences = [row.sentence for row in rows()]

    assert [text for text in sentences if not text.endswith(".") or len(text.split()) < 5] == []
    assert [text for text, count in Counter(sentences).items() if count > 1] == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "src/omniq/worker").glob("*.py")), ids=lambda path: path.stem
)
def test_the_modules_of_the_pool_are_small(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 450


@pytest.mark.parametrize("verb", VERBS)
def test_the_eight_verbs_are_as_the_design_says(verb):
    method = getattr(BaseStorage, verb)
    parameters = list(inspect.signature(method).parameters)

    assert inspect.iscoroutinefunction(method)
    assert parameters == ["self", *VERBS[verb]]
