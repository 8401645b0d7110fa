"""`python -m chaos.peers`: kill the workers of each queue, and count.

make chaos-peers                          all of them, about three quarters of an hour
python -m chaos.peers rq omniq            some; the rest of the page does not change
python -m chaos.peers huey --kills 5      a short run, which is not recorded
python -m chaos.peers --page              write the page again from the recorded rounds
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.environments import EnvironmentFailed
from chaos.peers.fleet import Round, RoundFailed, run_round
from chaos.peers.page import PAGE, page, table
from chaos.peers.record import Row, make_row, read, write
from chaos.peers.registry import DEFAULT, PEERS, SAFE, Peer, Profile

KILLS = 20


def main() -> int:
    options = _parse()
    selected = [] if options.page else options.name or [peer.adapter for peer in PEERS]
    rows, failed = list[Row](), False
    for peer in PEERS:
        for store, profile in _rounds(peer, options) if peer.adapter in selected else ():
            try:
                rows.append(_run_round(peer, store, profile, options))
            except (EnvironmentFailed, RoundFailed) as error:
                failed = True
                print(f"{peer.name} on {store}, {profile.name}: {error}", file=sys.stderr)
    if rows:
        print(table(rows))
    PAGE.write_text(page(read()), encoding="utf-8")
    return int(failed)


def _rounds(peer: Peer, options: argparse.Namespace) -> list[tuple[str, Profile]]:
    return [
        (store, profile)
        for profile in peer.profiles
        for store in peer.stores
        if options.store in (None, store) and options.profile in (None, profile.name)
    ]


def _run_round(peer: Peer, store: str, profile: Profile, options: argparse.Namespace) -> Row:
    folder = Path(tempfile.mkdtemp(prefix=f"omniq-peers-{peer.adapter}-"))
    setup = Round(
        adapter=peer.adapter,
        python=peer.python(),
        server=store,
        settings=profile.settings,
        returns_after=profile.returns_after,
        kills=options.kills,
        seed=options.seed,
    )
    row = make_row(peer, store, profile, options.seed, run_round(setup, folder))
    print(f"{table([row]).splitlines()[1]}", flush=True)
    if options.keep:
        print(f"  its events and logs are in {folder}")
    else:
        shutil.rmtree(folder)
    if options.kills >= KILLS:
        write(row)
    return row


def _parse() -> argparse.Namespace:
    names = [peer.adapter for peer in PEERS]
    parser = argparse.ArgumentParser(prog="chaos.peers", description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="*", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--store", choices=["SQLite", "PostgreSQL", "Redis"])
    parser.add_argument("--profile", choices=[DEFAULT, SAFE])
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the recorded events and logs")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    options = parser.parse_args()
    if unknown := set(options.name) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    sys.exit(main())
