"""Break omniq on purpose, in many ways, and report which test detects each break.

Each `*.patch` in this folder says in its first line what it breaks, and in its second on which
backend. The patch is applied to a copy of `src`, which must then fail in the contract suite of that
backend or in its state machine; the table names the first test of each that fails. The patches in
`protocol` break a part of the protocol that all backends share (claim, record, renew, recover,
retry, schedules), and the history checker must detect it in a simulated fleet; the table names the
first seed, and the broken promise. Exits with 1 if a mutant survives, or no longer applies.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARALLEL_MUTANTS = 2

CONTRACTS = {
    "memory": "tests/storage/test_memory.py",
    "sqlite": "tests/storage/test_sqlite_contract.py",
    "file": "tests/storage/test_file_contract.py tests/storage/test_file_put_back.py",
    "log": "tests/storage/test_log_commits.py tests/storage/test_log_append_order.py",
    "s3": "tests/storage/test_s3_trimming.py",
    "versions": "tests/worker/test_versions.py",
    "operations": "tests/worker/test_check.py tests/worker/test_bulk.py",
}
SUITES = ("contract", "machine")
SIMULATION = "simulation"
SEEDS = 400
"""Simulated fleets in which a mutant of the protocol has to show itself. The rarest does so in one of 250."""
FIRST_FAILING_SEED = f"""
from chaos.simulated import failure_of
print(next(filter(None, map(failure_of, range({SEEDS}))), ""))
"""


@dataclass(frozen=True)
class Mutant:
    """A patch, or None for the unchanged copy, which must pass."""

    name: str
    backend: str
    patch: Path | None

    @property
    def suites(self) -> tuple[str, ...]:
        if self.backend == SIMULATION:
            return (SIMULATION,)
        # A state machine never stands still for hours, runs no functions, and has no operators.
        return ("contract",) if self.backend in ("s3", "versions", "operations") else SUITES

    @classmethod
    def read(cls, patch: Path) -> Mutant:
        if patch.parent.name == "protocol":
            return cls(patch.stem, SIMULATION, patch)
        backend = re.search(r"^Backend: (\w+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
        if backend is None or backend[1] not in CONTRACTS:
            raise SystemExit(
                f"{patch.name}: its second line must be 'Backend: ' and one of {CONTRACTS}"
            )
        return cls(patch.stem, backend[1], patch)


@dataclass(frozen=True)
class Verdict:
    """The result for a mutant: for each suite the test that failed, "" when none did."""

    mutant: Mutant
    caught_by: dict[str, str]
    error: str = ""

    @property
    def is_caught(self) -> bool:
        return not self.error and any(self.caught_by.values())


def main() -> int:
    began = time.monotonic()
    mutants = [Mutant.read(patch) for patch in sorted(HERE.glob("**/*.patch"))]
    if names := sys.argv[1:]:
        mutants = [mutant for mutant in mutants if mutant.name in names]
    with ThreadPoolExecutor(PARALLEL_MUTANTS) as pool:
        backends = dict.fromkeys(mutant.backend for mutant in mutants)
        unchanged = [Mutant("unchanged", backend, None) for backend in backends]
        for verdict in pool.map(judge, unchanged):
            if verdict.error or any(verdict.caught_by.values()):
                print(f"the unchanged copy fails on {verdict.mutant.backend}; fix that first")
                print(verdict.error or "\n".join(verdict.caught_by.values()))
                return 1
        width = max(len(mutant.name) for mutant in mutants)
        print(f"{'mutant':{width}}  {'where':10}  caught by")
        verdicts = []
        for verdict in pool.map(judge, mutants):
            verdicts.append(verdict)
            print_verdict(verdict, width)
    caught = sum(verdict.is_caught for verdict in verdicts)
    seconds = time.monotonic() - began
    print(f"{caught} of {len(verdicts)} mutants caught, in {seconds:.0f} s")
    return 0 if caught == len(verdicts) else 1


def print_verdict(verdict: Verdict, width: int) -> None:
    mutant = verdict.mutant
    if verdict.error:
        print(f"{mutant.name:{width}}  {mutant.backend:10}  ERROR: {verdict.error}", flush=True)
        return
    if not verdict.is_caught:
        print(f"{mutant.name:{width}}  {mutant.backend:10}  SURVIVED", flush=True)
        return
    names = (mutant.name, mutant.backend)
    for suite in mutant.suites:
        # The state machine runs other examples each time, and may miss what the contract detects.
        what = verdict.caught_by[suite] or f"(not by the {suite} suite this time)"
        print(f"{names[0]:{width}}  {names[1]:10}  {what}", flush=True)
        names = ("", "")


def judge(mutant: Mutant) -> Verdict:
    """Apply the mutant to a copy of the sources, and run its suites on that."""
    with tempfile.TemporaryDirectory(prefix="omniq-mutant-") as name:
        folder = Path(name)
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        if mutant.patch is not None and (error := apply(mutant.patch, folder)):
            return Verdict(mutant, {}, error)
        caught_by = {}
        for suite in mutant.suites:
            failed, error = run(mutant.backend, suite, folder)
            if error:
                return Verdict(mutant, {}, error)
            caught_by[suite] = failed
        return Verdict(mutant, caught_by)


def apply(patch: Path, folder: Path) -> str:
    """Apply the patch to the copy; returns the error, or an empty string."""
    done = subprocess.run(
        # Outside of any repository, `git apply` is a plain patch program that is strict.
        ["git", "apply", "--unidiff-zero", "--verbose", str(patch)],
        cwd=folder,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else f"does not apply any more: {done.stderr.strip()}"


def run(backend: str, suite: str, folder: Path) -> tuple[str, str]:
    """Run a suite up to its first failure; returns the failed test, and any other error."""
    command = ["-m", "pytest", *selection(backend, suite), *OPTIONS]
    if suite == SIMULATION:
        command = ["-c", FIRST_FAILING_SEED]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(folder / "src"), str(ROOT))),
            "PYTHONDONTWRITEBYTECODE": "1",
            # Examples that fail here must not be replayed on an unchanged omniq.
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if suite == SIMULATION and done.returncode == 0:
        return done.stdout.strip().partition("; ")[0], ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is not None:
        return failed[1], ""
    if done.returncode != 0:
        return "", f"the {suite} suite did not run:\n{(done.stdout + done.stderr)[-2000:]}"
    return "", ""


def selection(backend: str, suite: str) -> list[str]:
    if suite == "contract":
        # The same contract with every write synced detects nothing more, and is slow.
        return [*CONTRACTS[backend].split(), "-k", "not Synced"]
    return [
        "tests/properties/test_state_machine.py", "-k", f"test_a_backend_answers and {backend}",
        "-p", "tests.mutants.first_failing_example",
    ]  # fmt: skip


OPTIONS = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:randomly", "-p", "no:cacheprovider")

if __name__ == "__main__":
    sys.exit(main())
