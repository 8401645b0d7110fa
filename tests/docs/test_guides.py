"""The code in the guides runs, block by block, and prints what the guide says it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = sorted((Path(__file__).parents[2] / "docs" / "guides").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_every_block_of_a_guide_runs(guide: Path, tmp_path: Path) -> None:
    """A block that begins with the name of a file is that file; the others are scripts, in order.

    A `text` block right after one is all that it prints.
    """
    scripts = []
    for number, (code, printed) in enumerate(BLOCK.findall(guide.read_text(encoding="utf-8"))):
        named = re.match(r"# (\w+\.py)\n", code)
        path = tmp_path / (named.group(1) if named else f"block{number}.py")
        path.write_text(code, encoding="utf-8")
        if not named:
            scripts.append((path, printed))

    for path, printed in scripts:
        done = subprocess.run(
            [sys.executable, path],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{path.read_text()}\n{done.stderr}"
        assert not printed or done.stdout == printed, path.read_text()
