"""The code of the README works unchanged in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import blocks

README = blocks.ROOT / "README.md"


@pytest.mark.timeout(120)
def test_every_block_of_the_readme_works_unchanged(tmp_path: Path) -> None:
    scripts = dict(blocks.write(README, tmp_path))

    first = blocks.run(tmp_path / "main.py")
    others = {path.stem: blocks.run(path) for path in scripts}

    assert re.fullmatch(r"[0-9A-Z]{26} 19\n", first)
    assert (tmp_path / ".omniq" / "omniq.db").exists()
    eta, pending, status = others["block3"].splitlines()
    assert eta.endswith("+00:00")
    assert (pending, status) == ("3", "cancelled")


def test_the_readme_names_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")

    assert "make demo" in text
    assert "make test" in text


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_the_quickstart_works_in_a_fresh_environment(tmp_path: Path) -> None:
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=120)
    python = environment / "bin" / "python"
    install: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        blocks.ROOT,
    ]
    subprocess.run(install, check=True, timeout=240)
    folder = tmp_path / "empty"
    folder.mkdir()
    blocks.write(README, folder)

    done = subprocess.run(
        [python, "main.py"], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )

    assert re.fullmatch(r"[0-9A-Z]{26} 19\n", done.stdout), done.stderr
