"""Every mutant still applies: one that does not would test nothing, without a warning."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATCHES = {patch.stem: patch for patch in sorted(HERE.glob("**/*.patch"))}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, outside of any repository: there `git apply` is a plain patch program."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(HERE.parents[1] / "src", folder / "src")
    return folder


@pytest.mark.parametrize("name", PATCHES)
def test_the_mutant_applies(name, copy):
    command = ["git", "apply", "--check", "--unidiff-zero", str(PATCHES[name])]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
