"""Writes the Python blocks of a page as files into a folder, and runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)

# A user may not have these plugins, and loading them takes longer than the tests.
_PLUGINS = ("cacheprovider", "randomly", "xdist", "hypothesispytest", "anyio", "timeout")
_WITHOUT = [part for name in _PLUGINS for part in ("-p", f"no:{name}")]


def write(page: Path, folder: Path) -> list[tuple[Path, str]]:
    """Write every block to a file; return the scripts, each with its expected output.

    A block that starts with the name of a file is that file, for other blocks to import; a file
    named `test_….py` is also a script. All other blocks are scripts, named by their number.
    """
    scripts = []
    for number, (code, printed) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8"))):
        named = re.match(r"# (\w+\.py)\n", code)
        path = folder / (named.group(1) if named else f"block{number}.py")
        path.write_text(code, encoding="utf-8")
        if not named or is_test(path):
            scripts.append((path, printed))
    return scripts


def is_test(script: Path) -> bool:
    return script.name.startswith("test_")


def run(*scripts: Path, **environment: str) -> str:
    """Run a script, or pytest on files of tests, without failure; return the output."""
    command = ["-m", "pytest", "-q", *_WITHOUT] if is_test(scripts[0]) else []
    done = subprocess.run(
        [sys.executable, *command, *(script.name for script in scripts)],
        cwd=scripts[0].parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{scripts[0].read_text()}\n{done.stdout}\n{done.stderr}"
    return done.stdout
