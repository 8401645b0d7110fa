"""Writes docs/reference/canvas.md, the table of Celery's tests of its canvas. `python -m tests.canvas.page` runs it."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.canvas.cases import CASES, LEFT_OUT
from tests.canvas.graphs import ECHOES, GRAPHS

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "canvas.md"
_PARTS = ("simple", "chain", "chain_tail", "group")

_HEAD = """# Canvas of Celery, case by case

Celery has {count} integration tests of its canvas (`t/integration/test_canvas.py`). omniq's tests express {covered} of them as
[flows](../guides/workflows.md), with the same graphs and results, except that the results of nested groups stay nested lists. For the other {left} the table says why not. A name is the class and the test
without their prefixes. `tests/canvas/page.py` writes this page.

| Celery's test | omniq |
|---|---|
"""


def tests_of_cases() -> dict[str, str]:
    """By case: the test that stands for it."""
    found = {case: graph.build.__name__ for graph in GRAPHS for case in graph.cases}
    found |= dict.fromkeys(ECHOES, "test_each_call_runs_once_and_groups_run_in_order")
    tree = ast.parse((HERE / "test_canvas.py").read_text(encoding="utf-8"))
    for function in tree.body:
        if isinstance(function, ast.AsyncFunctionDef | ast.FunctionDef):
            for case in _marked(function):
                found[case] = function.name
    return found


def _marked(function: ast.AST) -> list[str]:
    """The cases that the marks of a test name."""
    marked: list[str] = []
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "canvas":
            for argument in call.args:
                if isinstance(argument, ast.Constant):
                    marked.append(str(argument.value))
                elif isinstance(argument, ast.JoinedStr):
                    beginning = argument.values[0]
                    assert isinstance(beginning, ast.Constant)
                    marked += [f"{beginning.value!s}{part}" for part in _PARTS]
    return marked


def text() -> str:
    tests = tests_of_cases()
    rows = []
    for case in CASES:
        if case in tests:
            words = tests[case].removeprefix("test_").replace("_", " ")
            where = "test_canvas" if tests[case].startswith("test_") else "graphs"
            rows.append(f"| `{case}` | [{words}](../../tests/canvas/{where}.py) |")
        else:
            rows.append(f"| `{case}` | not covered: {LEFT_OUT[case]} |")
    head = _HEAD.format(count=len(CASES), covered=len(tests), left=len(LEFT_OUT))
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
