"""What a peer is told about its run: the store, where it is, and how wide it may work.

Imported inside a peer's own environment, by its producer and by its workers alike.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.marks import Marks

STORE = os.environ.get("BENCH_STORE", "")
URL = os.environ.get("BENCH_URL", "")
FOLDER = Path(os.environ.get("BENCH_FOLDER", "."))
CONCURRENCY = 100

marks = Marks(Path(os.environ["BENCH_MARKS"])) if "BENCH_MARKS" in os.environ else None


def mark(number: int) -> None:
    """What every task does, and all it does."""
    assert marks is not None
    marks.leave(number)


def use_uvloop() -> None:
    """For the event loops that this process makes, where uvloop is installed."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()


def become(*arguments: object) -> NoReturn:
    """Turn this process into `python -m` with these arguments: the command that a peer ships."""
    os.execv(sys.executable, [sys.executable, "-m", *map(str, arguments)])
