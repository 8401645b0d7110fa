"""Compares omniq with peers in limits, debounce and batches, on one Redis server. Asserts nothing.

| figure | what it is |
|---|---|
| limits | drain of tasks of which one of each key runs at a time, 50 of a key; to docket |
| debounce | 50 submissions of each key, and their one run; to docket. Its seconds are those beside the time to settle |
| batch | drain in batches of 100; to celery-batches |

    python -m benchmarks.flow_peers [--figures limits,debounce,batch] [--tasks 10000] [--pairs 5]

For each pair: the rate of omniq to that of the peer, and the CPU time of the peer (client and server) to that of
omniq. A machine that is busy changes the first, and hardly the second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.environments import environment
from benchmarks.flow_peers.meter import SETTLE
from benchmarks.processes import exact_cpu_seconds
from benchmarks.stores import ROOT, Store, open_store

PEERS = {"limits": "docket", "debounce": "docket", "batch": "celery"}
PACKAGES = {
    "docket": ["pydocket", "hiredis"],
    "celery": ["celery[redis]", "celery-batches", "hiredis"],
}


def spent(side: str, python: Path, figure: str, count: int, store: Store) -> tuple[float, float]:
    """Seconds, and CPU seconds of the client and the server, of one side."""
    assert store.server is not None
    with store.fresh():
        before = exact_cpu_seconds(store.server.pid)
        process = subprocess.Popen(
            [str(python), "-m", f"benchmarks.flow_peers.{side}_side", figure, str(count)],
            env={
                **os.environ,
                "BENCH_URL": store.url,
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            # Celery prints a banner before.
            line = next((line for line in process.stdout if line.startswith("{")), "")
            server = exact_cpu_seconds(store.server.pid) - before
        finally:
            process.kill()
            process.wait()
        if not line:
            raise SystemExit(f"{side}_side {figure} failed")
        took = json.loads(line)
    if figure == "debounce":
        # What submissions cost is in their enqueue on one side, in the run on the other.
        seconds = took["fill"] + took["drain"] - SETTLE
        return seconds, took["fill_cpu"] + took["drain_cpu"] + server
    # The server's part of an enqueue is small, and alike on both sides.
    return took["drain"], took["drain_cpu"] + server


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flow_peers")
    parser.add_argument("--figures", default=",".join(PEERS), help="with commas")
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    with open_store("redis") as store:
        for figure in given.figures.split(","):
            peer = PEERS[figure]
            python = {
                "omniq": Path(sys.executable),
                peer: environment(f"flow-{peer}", PACKAGES[peer]),
            }
            rates, costs = [], []
            for pair in range(given.pairs):
                order = ("omniq", peer) if pair % 2 else (peer, "omniq")
                took = {
                    side: spent(side, python[side], figure, given.tasks, store) for side in order
                }
                (seconds, cpu), (peer_seconds, peer_cpu) = took["omniq"], took[peer]
                rates.append(peer_seconds / seconds)
                costs.append(peer_cpu / cpu)
                print(
                    f"{figure}: {given.tasks / seconds:,.0f} a second, {peer} {given.tasks / peer_seconds:,.0f}; "
                    f"CPU {cpu / given.tasks * 1e6:.0f} µs, {peer} {peer_cpu / given.tasks * 1e6:.0f}",
                    flush=True,
                )
            rate, cost = statistics.median(rates), statistics.median(costs)
            print(f"| {figure} | {peer} | {rate:.1f} x the rate | CPU 1 : {cost:.1f} |", flush=True)


if __name__ == "__main__":
    main()
