"""Every example runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(os.environ.get("TESTED_EXAMPLES", Path(__file__).parents[2] / "examples"))
"""The examples, or the broken copy that `tests/mutants/test_example_mutants.py` makes."""


@pytest.mark.timeout(120)
def test_the_demo_kills_a_worker_and_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omniq", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "got SIGKILL" in done.stdout
    assert "Warning" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_the_outbox_keeps_orders_and_tasks_together(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "transactional_outbox.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused  dodo" in done.stdout
    assert done.stdout.endswith("2 orders, 2 parcels\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_the_document_pipeline_resumes_at_the_step_that_failed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "document_pipeline" / "main.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        block.splitlines()[0]: block for block in re.split(r"\n(?=process-|cmd-)", done.stdout)
    }
    assert "attempt 1  partial" in found["process-minutes"]
    assert "in add_search_terms; already done: update_document_content" in found["process-minutes"]
    waited = re.search(r"success on attempt 2, ([\d.]+) s after", found["process-minutes"])
    assert waited is not None
    assert float(waited.group(1)) >= 1.0
    assert "safe to retry from beginning" in found["process-memo"]
    assert "but step post_comment failed: HTTPError" in found["process-letter"]
    assert "dead letter (permanent) after 1 attempt" in done.stdout
    assert "success on attempt 1" in found["process-contract"]
    assert "success on attempt 2" in found["cmd-summarize-thesis"]
    assert done.stdout.endswith("26 calls took effect, 0 of them twice\n")
    assert list(tmp_path.iterdir()) == []
