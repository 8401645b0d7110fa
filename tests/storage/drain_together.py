"""Several processes that drain one store at the same time, for backends that processes can share.

    python -m tests.storage.drain_together URL

is one of them: it claims and finishes tasks until it finds none, and prints the id of each task it
has claimed. `drain_together` fills a store, starts several processes and collects their output.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from omniq.models import Task, TaskResult, TaskStatus
from omniq.outcomes import Outcome, Succeeded
from omniq.storage import open_storage

BATCH = 10
REFUSED = "refused:"


@dataclass
class Drained:
    """How often each task was claimed, how many outcomes were refused, and the errors."""

    claims: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    errors: str = ""


async def drain_together(url: str, *, processes: int, tasks: int) -> Drained:
    """Enqueue `tasks` tasks, and let `processes` processes start to drain them at the same time."""
    async with open_storage(url) as storage:
        await storage.enqueue_many([Task(func_path="m.f", args=(n,)) for n in range(tasks)])
    return await asyncio.to_thread(_drain_in_processes, url, processes)


def _drain_in_processes(url: str, processes: int) -> Drained:
    children = [_start(url) for _ in range(processes)]
    for child in children:
        # Each prints a line when it is ready; only then do all of them start.
        assert child.stdout is not None
        child.stdout.readline()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    drained = Drained()
    for child in children:
        output, errors = child.communicate()
        fields = output.split()
        if REFUSED in fields:
            drained.refused += int(fields[fields.index(REFUSED) + 1])
            fields = fields[: fields.index(REFUSED)]
        drained.claims.update(fields)
        drained.errors += errors
        if child.returncode:
            drained.errors += f"a process ended with {child.returncode}\n"
    return drained


def _start(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.storage.drain_together", url],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def _drain(url: str) -> None:
    async with open_storage(url) as storage:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        claimed: list[str] = []
        outcomes: list[Outcome] = []
        refused = 0
        while True:
            recorded, tasks = await storage.record_and_reserve(outcomes, BATCH)
            refused += recorded.count(False)
            if not tasks:
                break
            claimed += [task.id for task in tasks]
            outcomes = [
                Succeeded(
                    task.id, task.token, TaskResult(task_id=task.id, status=TaskStatus.SUCCESS)
                )
                for task in tasks
            ]
        sys.stdout.write(" ".join([*claimed, REFUSED, str(refused)]))


if __name__ == "__main__":
    asyncio.run(_drain(sys.argv[1]))
