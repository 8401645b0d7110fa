"""Two versions of omniq on one store: do they work beside each other, and is what cannot work refused?

    python -m chaos.versions c54d015
    python -m chaos.versions c54d015 --backend sqlite --backend file

The store is made by the older version, whose producer enqueues, and whose worker begins to run the tasks. This
checkout upgrades the store where that takes a command, enqueues, and starts its worker beside the older one. The
older producer enqueues once more, and may be refused. Then both workers are killed in the middle of their tasks,
and a worker of each version is started again. At the end each task that was acknowledged has run, and none waits.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.compare import checkout
from benchmarks.stores import ROOT
from chaos.stores import DEFAULT_BACKENDS, open_store
from omniq import TaskQueue

COUNT = 20
"""Tasks that a producer enqueues."""

_PATIENCE = 60.0
_LEASE = "5"
_TASKS = """
import os, time
from omniq import task

@task(max_retries=100)
def note(name, trace):
    time.sleep(0.05)
    file = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, f"{os.environ['VERSION']} {name}\\n".encode())
    os.close(file)
"""
_PRODUCER = """
import sys
from omniq import TaskQueue
from version_tasks import note

url, trace, first, count = sys.argv[1:]
with TaskQueue(url) as queue:
    for number in range(int(first), int(first) + int(count)):
        queue.enqueue(note, str(number), trace)
        print(number, flush=True)
"""


class Fleet:
    """The processes of both versions on one store."""

    def __init__(self, url: str, folder: Path, sources: dict[str, Path]) -> None:
        self._url, self._folder, self._sources = url, folder, sources
        self._trace = folder / "trace"
        self._trace.touch()
        (folder / "version_tasks.py").write_text(_TASKS)
        (folder / "producer.py").write_text(_PRODUCER)
        self._next = 0
        self.acknowledged: set[str] = set()
        self.refusals: list[str] = []

    def runs(self) -> list[tuple[str, str]]:
        """The version and the task of each run that has ended."""
        lines = self._trace.read_text().splitlines()
        return [(version, name) for version, name in map(str.split, lines)]

    def call(self, version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python with that version."""
        command = [sys.executable, *arguments]
        return subprocess.run(
            command,
            env=self._environment(version),
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
        )

    def produce(self, version: str) -> None:
        """Enqueue tasks, until an enqueue is refused."""
        first, self._next = self._next, self._next + COUNT
        done = self.call(
            version, "producer.py", self._url, str(self._trace), str(first), str(COUNT)
        )
        self.acknowledged.update(done.stdout.split())
        if done.returncode:
            self.refusals.append(f"the {version} producer: {_last_line(done.stderr)}")

    def start_worker(self, version: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "omniq", "worker", "version_tasks", "--url", self._url]
        options = ["--concurrency", "2", "--poll-interval", "0.2", "--lease", _LEASE]
        with (self._folder / f"{version}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *options],
                env=self._environment(version),
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )

    def end(self, version: str, worker: subprocess.Popen[bytes]) -> None:
        """Kill the worker. One that has ended by itself was refused."""
        if worker.poll() is None:
            worker.send_signal(signal.SIGKILL)
        elif worker.returncode:
            log = (self._folder / f"{version}.log").read_text(errors="replace")
            self.refusals.append(f"the {version} worker: {_last_line(log)}")
        worker.wait()

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Wait until that holds; returns whether it does."""
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def has_started(self, version: str) -> bool:
        return "worker.started" in (self._folder / f"{version}.log").read_text(errors="replace")

    def has_run_all(self) -> bool:
        return self.acknowledged <= {name for _, name in self.runs()}

    def _environment(self, version: str) -> dict[str, str]:
        path = os.pathsep.join(map(str, (self._sources[version], self._folder)))
        return {**os.environ, "PYTHONPATH": path, "VERSION": version}


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else ""


def meet(url: str, folder: Path, older: Path, *, needs_upgrade: bool) -> tuple[bool, list[str]]:
    """Have both versions work on the empty store at the URL; whether all went well, and what happened."""
    fleet = Fleet(url, folder, {"older": older, "newer": ROOT / "src"})
    fleet.produce("older")
    workers = [("older", fleet.start_worker("older"))]
    fleet.wait(lambda: len(fleet.runs()) >= COUNT // 4)
    if needs_upgrade:
        upgraded = fleet.call("newer", "-m", "omniq", "schema", "upgrade", "--url", url)
        if upgraded.returncode:
            fleet.refusals.append(f"upgrade: {_last_line(upgraded.stderr)}")
    workers.append(("newer", fleet.start_worker("newer")))
    fleet.wait(lambda: fleet.has_started("newer"))
    fleet.produce("newer")
    fleet.produce("older")
    ran_together = fleet.wait(fleet.has_run_all)
    together = Counter(version for version, _ in fleet.runs())
    fleet.produce("newer")
    fleet.wait(lambda: len(fleet.runs()) > together.total())
    for version, worker in workers:
        fleet.end(version, worker)
    workers = [(version, fleet.start_worker(version)) for version in ("newer", "older")]
    ran_at_last = fleet.wait(fleet.has_run_all)
    with TaskQueue(url) as queue:
        is_empty = fleet.wait(
            lambda: (
                not any(
                    count
                    for status, count in queue.stats().by_status.items()
                    if not status.is_final
                )
            )
        )
    for version, worker in workers:
        fleet.end(version, worker)
    runs = Counter(name for _, name in fleet.runs())
    lines = [
        f"{len(fleet.acknowledged & runs.keys())} of {len(fleet.acknowledged)} acknowledged tasks ran, "
        f"beside each other {dict(together)}, at the end {dict(Counter(version for version, _ in fleet.runs()))}",
        *(f"refused: {refusal}" for refusal in dict.fromkeys(fleet.refusals)),
    ]
    if not ran_together:
        lines.append("WRONG: tasks did not run while both workers were there")
    if not (ran_at_last and is_empty):
        lines.append("WRONG: tasks were lost, or wait for ever")
    return ran_together and ran_at_last and is_empty, lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos.versions", description=__doc__.split("\n")[0])
    parser.add_argument("revision", help="the commit of the older version")
    parser.add_argument("--backend", choices=DEFAULT_BACKENDS, action="append", help="default: all")
    options = parser.parse_args()
    is_good = True
    with checkout(options.revision) as older:
        for backend in options.backend or DEFAULT_BACKENDS:
            with tempfile.TemporaryDirectory(prefix="versions-") as name:
                folder = Path(name)
                with open_store(backend, folder) as store:
                    went_well, lines = meet(
                        store.url, folder, older, needs_upgrade=backend == "postgres"
                    )
            is_good = is_good and went_well
            print(f"{backend} with {options.revision}:", *lines, sep="\n  ", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
