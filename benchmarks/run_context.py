"""The run that a peer's process belongs to: the store, its address, and the concurrency.

The producer and the workers of a peer import this in the peer's environment.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.start_times import StartTimes

STORE = os.environ.get("BENCH_STORE", "")
URL = os.environ.get("BENCH_URL", "")
FOLDER = Path(os.environ.get("BENCH_FOLDER", "."))
CONCURRENCY = 100

start_times = (
    StartTimes(Path(os.environ["BENCH_START_TIMES"])) if "BENCH_START_TIMES" in os.environ else None
)


def record_start(number: int) -> None:
    """Record the start of a task. Every task does this and nothing else."""
    assert start_times is not None
    start_times.record(number)


def use_uvloop() -> None:
    """Use uvloop for the event loops of this process, if it is installed."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()


def exec_module(*arguments: object) -> NoReturn:
    """Replace this process by `python -m` with these arguments: the command that a peer ships."""
    os.execv(sys.executable, [sys.executable, "-m", *map(str, arguments)])
