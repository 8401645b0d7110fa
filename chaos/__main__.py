"""`python -m chaos`: real processes, real signals, real servers, and one checker for all of it.

make chaos                     about a quarter of an hour: every backend under every kind of fault
make chaos HOURS=8             the same repeatedly, with different seeds
python -m chaos --backend sqlite --kills 20000 --stops 0
python -m chaos --backend s3 --kills 20000 --stops 0 --restarts 0 --point-kills 0 --slack 10
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from chaos.nemesis import FaultPlan, Run
from chaos.stores import BACKENDS, DEFAULT_BACKENDS, open_store


def main() -> int:
    options = _parse()
    until = time.monotonic() + options.hours * 3600
    seed, failed = options.seed, False
    while True:
        for backend in options.backend or DEFAULT_BACKENDS:
            failed |= not run_backend(backend, seed, options)
        if options.cuts and not options.backend:
            failed |= not cut_the_power(options.cuts)
        if time.monotonic() >= until:
            print("chaos: " + ("BROKEN" if failed else "every promise was kept"))
            return int(failed)
        seed += 1


def run_backend(backend: str, seed: int, options: argparse.Namespace) -> bool:
    """Run one backend with one seed; return whether it kept every promise."""
    plan = FaultPlan(
        kills=options.kills,
        stops=options.stops,
        restarts=options.restarts,
        point_kills=options.point_kills,
        slack=options.slack,
    )
    folder = Path(tempfile.mkdtemp(prefix=f"omniq-chaos-{backend}-"))
    began = time.monotonic()
    with open_store(backend, folder) as store:
        run = Run(store, folder, seed, plan)
        verdict = run.execute()
    seconds = time.monotonic() - began
    print(f"{backend}, seed {seed}, {seconds:.0f} s", flush=True)
    print("  " + ", ".join(f"{name} {took:.0f} s" for name, took in run.seconds.items()))
    for line in verdict.lines():
        print(f"  {line}")
    if run.deaths:
        fewest = min(run.deaths, key=lambda name: run.deaths[name])
        print(
            f"  deaths at {len(run.deaths)} failpoints: {sum(run.deaths.values())}, "
            f"fewest {run.deaths[fewest]} at {fewest}"
        )
    for event in verdict.counter_example:
        print(f"    {msgspec.json.encode(event).decode()}")
    if verdict.is_good:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"  its history is in {folder}")
    sys.stdout.flush()
    return verdict.is_good


def cut_the_power(cuts: int) -> bool:
    """Cut the power under file and SQLite; return whether all acknowledged writes survived."""
    command = [sys.executable, "-m", "tests.faults.powercut", "--cuts", str(cuts)]
    return subprocess.run(command, check=False).returncode == 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: all but s3")
    parser.add_argument("--hours", type=float, default=float(os.environ.get("HOURS") or 0))
    parser.add_argument("--kills", type=int, default=1000, help="SIGKILLs at random instants")
    parser.add_argument("--stops", type=int, default=50, help="SIGSTOPs past the lease")
    parser.add_argument("--restarts", type=int, default=20, help="of the server, by SIGKILL")
    parser.add_argument("--point-kills", type=int, default=20, help="at each failpoint")
    parser.add_argument("--slack", type=float, default=0.25, help="seconds, for recoveries")
    parser.add_argument("--cuts", type=int, default=200, help="of the power; needs root")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
