"""Short runs of `python -m chaos`: real processes, real signals, the same checker."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chaos.nemesis import failpoints_of
from chaos.stores import BACKENDS, TRANSACTIONAL


def run_chaos(backend: str, *options: str) -> subprocess.CompletedProcess[str]:
    # The time of recovery is measured by longer runs, on a machine that is not busy.
    command = [sys.executable, "-m", "chaos", "--backend", backend, "--slack", "60", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_killed_workers_lose_nothing():
    done = run_chaos("sqlite", "--kills", "30", "--stops", "0", "--point-kills", "0")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "every promise was kept" in done.stdout


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fleet_survives_kills_stops_and_restarts(backend):
    done = run_chaos(
        backend, "--kills", "100", "--stops", "10", "--restarts", "3", "--point-kills", "0"
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_failpoint_of_the_sources_is_known(backend):
    names = failpoints_of(backend)

    assert {"enqueue.before", "record_and_claim.after", "renew.before", "recover.after"} <= set(
        names
    )
    assert not any(name.startswith(other) for other in set(BACKENDS) - {backend} for name in names)
    assert ("transaction.before" in names) == (backend in TRANSACTIONAL)
