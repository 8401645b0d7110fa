"""Simulated fleets of many seeds, each with other faults, violate nothing."""

from __future__ import annotations

import pytest

from chaos.simulated import Fleet, failure_of

SEEDS = 20
DEEP_SEEDS = 2_000
BATCH = 20


def batches(first: int, count: int) -> list[range]:
    return [range(start, start + BATCH) for start in range(first, first + count, BATCH)]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seeds", batches(0, SEEDS), ids=str)
def test_a_fleet_keeps_its_promises(seeds):
    assert list(filter(None, map(failure_of, seeds))) == []


@pytest.mark.deep
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seeds", batches(SEEDS, DEEP_SEEDS - SEEDS), ids=str)
def test_many_fleets_keep_their_promises(seeds):
    assert list(filter(None, map(failure_of, seeds))) == []


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_the_seeds_cover_every_kind_of_fault():
    """A simulation without faults would prove nothing."""
    wanted = {"kill", "stop", "term", "cut", "stale", "zombie", "dead", "unknown"}
    met: set[str] = set()
    # Only about one seed in sixteen has an enqueue whose reply is lost and that the store has made.
    for seed in range(100):
        if met >= wanted:
            break
        verdict = Fleet(seed).run()
        met |= set(verdict.faults)
        met |= {"stale"} if verdict.stale_refused else set()
        met |= {"zombie"} if verdict.zombie_runs else set()
        met |= {"dead"} if verdict.dead else set()
        met |= {"unknown"} if verdict.unknown_resolved else set()

    assert met >= wanted
