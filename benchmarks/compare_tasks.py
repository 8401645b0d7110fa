"""The task of `benchmarks.compare`: does nothing, and reports what the worker spent on all of them.

The first run notes the CPU time, the clock and the counters of `/proc/self/io`; the last one writes
the differences to the file that `COMPARE_REPORT` names. `COMPARE_SERVER` is the process id of the
store's server, if it has one.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from benchmarks.processes import exact_cpu_seconds
from omniq import task

_SERVER = os.environ.get("COMPARE_SERVER", "")
_COUNT = int(os.environ.get("COMPARE_TASKS", "0"))
_ran = 0
_before: dict[str, float] = {}


def counters() -> dict[str, float]:
    """What this process and the server have spent so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    io = {name: float(value) for name, value in (line.split(": ") for line in lines)}
    return {
        "cpu": time.process_time(),
        "server": exact_cpu_seconds(int(_SERVER)) if _SERVER else 0.0,
        "seconds": time.monotonic(),
        "calls": io["syscr"] + io["syscw"],
        "bytes": io["rchar"] + io["wchar"],
    }


def report(spent: dict[str, float]) -> None:
    """Write what was spent, whole, to the file that is waited for."""
    path = Path(os.environ["COMPARE_REPORT"])
    path.with_suffix(".new").write_text(json.dumps(spent))
    path.with_suffix(".new").rename(path)


@task
async def add_one(number: int) -> int:
    """A task with a result."""
    return number + 1


@task
async def noop(number: int) -> None:
    """Count this run; the first and the last of all tasks read the counters."""
    global _ran
    if _ran == 0:
        _before.update(counters())
    _ran += 1
    if _ran == _COUNT:
        report({name: value - _before[name] for name, value in counters().items()})
