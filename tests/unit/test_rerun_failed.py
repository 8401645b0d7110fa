"""CI runs a few failed tests again, and stays red for everything else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])

FLAKY = """
from pathlib import Path

def test_flaky():
    seen = Path(__file__).with_suffix(".seen")
    passes = seen.exists()
    seen.touch()
    assert passes

def test_good():
    pass
"""
SKIPPED = """
from pathlib import Path
import pytest

def test_skips_itself_the_second_time():
    seen = Path(__file__).with_suffix(".seen")
    if seen.exists():
        pytest.skip("no")
    seen.touch()
    raise AssertionError
"""
WRONG = "def test_wrong():\n    assert False\n"
MANY = "import pytest\n\n@pytest.mark.parametrize('n', range(6))\ndef test_many(n):\n    assert False\n"
CRASH = "import os\n\ndef test_crash():\n    os._exit(1)\n"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def rerun(tmp_path):
    def run(*sources: str, processes: int = 0) -> subprocess.CompletedProcess[str]:
        for number, source in enumerate(sources):
            (tmp_path / f"test_{number}.py").write_text(source)
        # Other plugins do not matter here, and each costs time at every start.
        return subprocess.run(
            [sys.executable, "-m", "tests.rerun_failed", "-q", "-p", "xdist", "-n", str(processes)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": ROOT, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=100,
        )

    return run


def test_a_test_that_passes_the_second_time_is_named(rerun):
    done = rerun(FLAKY, processes=2)

    assert done.returncode == 0, done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "PASSED ONLY THE SECOND TIME, when run alone: ",
        "  test_0.py::test_flaky",
    ]


def test_a_test_that_fails_twice_is_a_failure(rerun):
    done = rerun(FLAKY, WRONG)

    assert done.returncode == 1
    assert "run again, alone: " in done.stdout
    assert "failed the second time, too" in done.stdout
    assert "PASSED ONLY" not in done.stdout


@pytest.mark.deep
def test_a_test_that_is_skipped_the_second_time_is_a_failure(rerun):
    done = rerun(SKIPPED)

    assert done.returncode == 1
    assert "1 skipped" in done.stdout


@pytest.mark.deep
@pytest.mark.parametrize(
    ("source", "processes", "reason"),
    [
        (MANY, 0, "more than 5 tests failed"),
        (CRASH, 2, "a process crashed while it ran"),
        ("import nowhere_to_be_found", 2, "failed"),
    ],
)
def test_nothing_else_is_run_again(rerun, source, processes, reason):
    done = rerun(FLAKY, source, processes=processes)

    assert done.returncode != 0
    assert "run again, alone" not in done.stdout
    assert reason in done.stdout


@pytest.mark.deep
@pytest.mark.parametrize("processes", [0, 2])
def test_an_error_of_the_collection_stays_one(rerun, processes):
    done = rerun("import nowhere_to_be_found", processes=processes)

    assert done.returncode != 0
    assert "run again, alone" not in done.stdout
