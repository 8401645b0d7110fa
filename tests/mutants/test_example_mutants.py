"""Breaks in the examples are detected by the tests of the examples.

Each `examples/*.diff` says in its first line what it breaks. It is applied to a copy of the
examples, on which `tests/docs/test_examples.py` must then fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATCHES = {patch.stem: patch for patch in sorted((HERE / "examples").glob("*.diff"))}
SELECTION = ("tests/docs/test_examples.py", "-k", "document_pipeline")
OPTIONS = ("-q", "--tb=line", "-p", "no:xdist", "-p", "no:cacheprovider")


def run_tests(examples: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *SELECTION, *OPTIONS],
        cwd=ROOT,
        env={**os.environ, "TESTED_EXAMPLES": str(examples)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PATCHES)
def test_the_tests_of_the_examples_detect_the_break(name, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    unchanged = run_tests(tmp_path / "examples")
    # Outside of any repository, `git apply` is a plain patch program that is strict.
    subprocess.run(["git", "apply", str(PATCHES[name])], cwd=tmp_path, check=True)
    broken = run_tests(tmp_path / "examples")

    assert unchanged.returncode == 0, unchanged.stdout
    assert broken.returncode == 1, broken.stdout
    assert "FAILED tests/docs/test_examples.py" in broken.stdout
