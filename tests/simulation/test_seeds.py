"""Fleets of many seeds, each treated badly in its own way, keep every promise."""

from __future__ import annotations

import pytest

from chaos.simulated import Fleet, failing

SEEDS = 200
DEEP_SEEDS = 5_000
LOT = 20


def lots(first: int, count: int) -> list[range]:
    return [range(begin, begin + LOT) for begin in range(first, first + count, LOT)]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seeds", lots(0, SEEDS), ids=str)
def test_a_fleet_keeps_its_promises(seeds):
    assert list(filter(None, map(failing, seeds))) == []


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", lots(SEEDS, DEEP_SEEDS - SEEDS), ids=str)
def test_many_fleets_keep_their_promises(seeds):
    assert list(filter(None, map(failing, seeds))) == []


@pytest.mark.timeout(60)
def test_the_seeds_meet_every_kind_of_trouble():
    """A simulation in which nothing happens would keep every promise."""
    met: set[str] = set()
    for seed in range(30):
        verdict = Fleet(seed).play()
        met |= set(verdict.faults)
        met |= {"stale"} if verdict.stale_refused else set()
        met |= {"zombie"} if verdict.zombie_runs else set()
        met |= {"dead"} if verdict.dead else set()
        met |= {"unknown"} if verdict.unknown_resolved else set()

    assert met >= {"kill", "stop", "term", "cut", "stale", "zombie", "dead", "unknown"}
