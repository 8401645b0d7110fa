"""Runs the sweep of `syscalls.py` as a test, in a separate process because it forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.fault("F52")
def test_the_file_store_is_intact_after_a_failure_or_crash_at_any_system_call():
    sweep = subprocess.run(
        [sys.executable, "-m", "tests.faults.syscalls"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    if sweep.stdout.startswith("skipped:"):
        pytest.skip(sweep.stdout.strip())

    assert sweep.returncode == 0, sweep.stdout[-10_000:] + sweep.stderr[-5_000:]
