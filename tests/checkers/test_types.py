"""Type checkers accept the examples and right calls, and refuse wrong ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CALLS = Path(__file__).with_name("calls.txt")
EXAMPLES = ROOT / "examples"
PORTS = EXAMPLES / "ports"
CACHE = ROOT / ".mypy_cache" / "ports"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    # Stored as a text file: its errors are intended, and `make lint` checks all Python files.
    return Path(shutil.copy(CALLS, tmp_path / "calls.py"))


def refused_lines() -> set[int]:
    lines = CALLS.read_text(encoding="utf-8").splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}


def basedpyright(
    folder: Path, include: Sequence[Path], *, extra: Iterable[Path]
) -> list[dict[str, Any]]:
    """The errors that it reports for these files."""
    configuration = {
        "typeCheckingMode": "standard",
        "include": list(map(str, include)),
        # Django has no type annotations; types inferred from its source are wrong. The ports have
        # modules of the same names: each is checked by itself.
        "exclude": [str(EXAMPLES / "django_shop"), *([str(PORTS)] if EXAMPLES in include else [])],
        "extraPaths": [str(ROOT / "src"), *map(str, extra)],
    }
    project = folder / "pyrightconfig.json"
    project.write_text(json.dumps(configuration))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error"),
            *("--pythonpath", sys.executable, "--project", str(project)),
        ],
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)["generalDiagnostics"]
    return found


@pytest.mark.deep
def test_mypy_refuses_only_the_wrong_calls_and_accepts_the_examples(calls: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(calls), "examples"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )

    report = done.stdout + done.stderr
    errors = re.findall(r"^(\S+):(\d+): error: (.*)", report, re.M)
    # Compared by name: mypy's cache stores the folder of the first run.
    wrong = {int(line) for path, line, _ in errors if Path(path).name == calls.name}
    assert [error for error in errors if Path(error[0]).name != calls.name] == [], report
    assert wrong == refused_lines(), report


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(folder.name for folder in PORTS.glob("*/")))
def test_mypy_accepts_a_port(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml", "."],
        cwd=PORTS / name,
        env={**os.environ, "MYPYPATH": str(ROOT / "src"), "MYPY_CACHE_DIR": str(CACHE / name)},
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )

    assert done.stdout.startswith("Success"), done.stdout + done.stderr


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(folder.name for folder in PORTS.glob("*/")))
def test_basedpyright_accepts_a_port(name: str, tmp_path: Path) -> None:
    if name == "django_project":
        pytest.skip("Django has no type annotations; types inferred from its source are wrong")

    assert basedpyright(tmp_path, [PORTS / name], extra=[PORTS / name]) == []


@pytest.mark.deep
def test_basedpyright_refuses_only_the_wrong_calls_and_accepts_the_examples(
    calls: Path, tmp_path: Path
) -> None:
    found = basedpyright(tmp_path, [calls, EXAMPLES], extra=EXAMPLES.glob("*/"))

    lines = {each["range"]["start"]["line"] + 1 for each in found if each["file"] == str(calls)}
    assert lines == refused_lines()
    assert [each for each in found if each["file"] != str(calls)] == []
