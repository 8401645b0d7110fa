"""The README's code does what it says, pasted word for word into an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)


def run(script: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, block in enumerate(blocks()):
        named = re.match(r"# (\w+\.py)\n", block)
        (tmp_path / (named.group(1) if named else f"block{number}.py")).write_text(block)
    return tmp_path


@pytest.mark.timeout(60)
def test_one_minute_works_word_for_word(folder: Path) -> None:
    out = run("main.py", folder)

    assert re.fullmatch(r"[0-9A-Z]{26} 19\n", out)
    assert (folder / ".omniq" / "omniq.db").exists()


@pytest.mark.timeout(60)
def test_enqueue_and_ask_works_word_for_word(folder: Path) -> None:
    eta, pending, status = run("block3.py", folder).splitlines()

    assert eta.endswith("+00:00")
    assert pending == "3"
    assert status == "cancelled"


def test_the_readme_names_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")

    assert "make demo" in text
    assert "make test" in text
