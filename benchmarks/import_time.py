"""How long `import omniq` takes, compared with its dependencies: asyncio, msgspec and loguru.

CPU time of new processes, in pairs, so that other load on the machine affects both.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys

PAIRS = 21
LIMIT = 1.4
ALLOWED = "import asyncio, msgspec, loguru"


def seconds(code: str) -> float:
    """Return the CPU time of a process that runs this code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Print the medians; exit with 1 if the ratio exceeds the limit."""
    pairs = [(seconds(ALLOWED), seconds("import omniq")) for _ in range(PAIRS)]
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    theirs, ours = (statistics.median(side) * 1000 for side in zip(*pairs, strict=True))
    print(f"{ALLOWED:34} {theirs:6.1f} ms")
    print(f"{'import omniq':34} {ours:6.1f} ms   {ratio:.2f} × (at most {LIMIT})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
