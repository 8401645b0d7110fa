"""Every requirement is shown by tests that exist: `docs/reference/requirements.md` is true."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

from omniq.storage.base import BaseStorage

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "requirements.md"
SOURCES = (ROOT / "tests", ROOT / "src" / "omniq" / "testing" / "contract")

SPANS = {
    "S000": [(1, 36)],
    "S001": [(1, 14)],
    "S002": [(1, 13)],
    "S003": [(1, 35)],
    "S004": [(1, 78)],
}

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


def rows() -> list[tuple[str, list[str]]]:
    """Each row of the page with the tests it names."""
    lines = re.findall(r"^\| (S\d{3}-\d+) \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.M)
    return [(row, re.findall(r"`(test_\w+)`", rest.split(" | ")[1])) for row, rest in lines]


def known_tests() -> set[str]:
    names: set[str] = set()
    for folder in SOURCES:
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(node.name)
    return names


def test_every_requirement_has_its_row_once():
    wanted = [
        f"{seed}-{number}"
        for seed, spans in SPANS.items()
        for first, last in spans
        for number in range(first, last + 1)
    ]
    found = Counter(row for row, _ in rows())

    assert sorted(found) == sorted(wanted)
    assert [row for row, count in found.items() if count > 1] == []


def test_every_row_names_tests_and_each_of_them_exists():
    known = known_tests()
    without = [row for row, named in rows() if not named]
    missing = {
        row: gone
        for row, named in rows()
        if (gone := [name for name in named if name not in known])
    }

    assert without == []
    assert missing == {}


@pytest.mark.parametrize("verb", VERBS)
def test_the_eight_verbs_are_as_the_design_says(verb):
    method = getattr(BaseStorage, verb)
    parameters = list(inspect.signature(method).parameters)

    assert inspect.iscoroutinefunction(method)
    assert parameters == ["self", *VERBS[verb]]
