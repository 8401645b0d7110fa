"""The examples in docstrings give what they say.

pytest could collect them itself (`--doctest-modules`), but then it imports and searches every module
of the package, in each process of a run.
"""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    (ROOT / "src", "omniq/**/*.py"),
    (ROOT, "tests/**/*.py"),
    (ROOT, "chaos/*.py"),
    (ROOT, "benchmarks/*.py"),
)


def _modules_with_examples() -> list[str]:
    """Return the names of the modules whose text has an example."""
    return [
        ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
        for base, pattern in FILES
        for path in sorted(base.glob(pattern))
        if ">>> " in path.read_text(encoding="utf-8") and path != Path(__file__)
    ]


@pytest.mark.parametrize("name", _modules_with_examples())
def test_the_examples_of_a_module_give_what_they_say(name, capsys):
    result = doctest.testmod(importlib.import_module(name))

    assert result.attempted > 0, f"{name} has >>> outside of docstrings only"
    assert result.failed == 0, capsys.readouterr().out


def test_modules_with_examples_are_found():
    assert {"omniq.tasks.durations", "omniq.cli", "chaos.curves"} <= set(_modules_with_examples())
