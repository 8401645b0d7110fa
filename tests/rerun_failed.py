"""Run pytest; if only a few tests fail, run these again, alone and one after the other.

    python -m tests.rerun_failed [options of pytest]

Many tests use real processes, servers and time, so one of ten thousand may fail on a machine that is
busy with other work. It must pass when it runs alone. The end of the output names each test that
passed only the second time. All else fails as it does without this program: a test that fails twice,
more than a few failed tests, a test file that cannot be imported, a process of pytest-xdist that
crashes, an error of pytest itself.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

MOST = 5
"""The most failed tests that are run again; if more fail, something is broken."""


class Outcome:
    """A plugin of pytest that notes which tests fail, and what goes wrong beside them."""

    def __init__(self) -> None:
        self.failed: dict[str, None] = {}
        self.broken: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(f"{report.nodeid or 'the collection'} failed")

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self.broken.append(f"a process crashed while it ran {crashitem}")


def main(options: list[str]) -> int:
    outcome = Outcome()
    code = pytest.main(options, plugins=[outcome])
    failed = list(outcome.failed)
    if code != pytest.ExitCode.TESTS_FAILED:
        return int(code)
    if outcome.broken or len(failed) > MOST:
        reason = "; ".join(outcome.broken) or f"more than {MOST} tests failed"
        print(f"\nnothing is run again: {reason}", flush=True)
        return int(code)

    print(f"\nrun again, alone: {_list(failed)}", flush=True)
    if not _all_pass(options, failed):
        print("\nfailed the second time, too", flush=True)
        return int(code)
    print(f"\nPASSED ONLY THE SECOND TIME, when run alone: {_list(failed)}", flush=True)
    return int(pytest.ExitCode.OK)


def _all_pass(options: list[str], tests: list[str]) -> bool:
    """Run these tests in one new process; return whether each of them ran and passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", *options, "-n", "0", f"--junitxml={report}"]
        if subprocess.run([*command, *tests], check=False).returncode:
            return False
        suite = ElementTree.parse(report).find("testsuite")
        assert suite is not None
        return int(suite.attrib["tests"]) == len(tests) and suite.attrib["skipped"] == "0"


def _list(tests: list[str]) -> str:
    return "".join(f"\n  {test}" for test in tests)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
