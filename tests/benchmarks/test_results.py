"""The page of results agrees with its numbers, and each target with the figures it compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import registry, stores
from benchmarks.measurements import Numbers
from benchmarks.page import page
from benchmarks.targets import check_targets

FOLDER = Path(registry.__file__).parent
PEERS = sorted(path for path in registry.PEERS.glob("*.py") if path.stem != "__init__")


def drains(ours: list[float], theirs: list[float]) -> Numbers:
    numbers = Numbers({})
    for subject, values in (("omniq", ours), ("pgqueuer", theirs)):
        for value in values:
            numbers.add("postgres", subject, {"drain": value})
    return numbers


def postgres_target(numbers: Numbers):
    return next(
        target
        for target in check_targets(numbers, registry.all_peers())
        if target.against == "pgqueuer"
    )


def test_the_page_agrees_with_its_numbers():
    numbers = Numbers.read(FOLDER / "results.json")

    assert (FOLDER / "RESULTS.md").read_text(encoding="utf-8") == page(
        numbers, registry.all_peers()
    )


@pytest.mark.parametrize("path", PEERS, ids=lambda path: path.stem)
def test_a_peer_file_has_everything_that_the_harness_needs(path):
    peer = registry.read(path)

    assert peer.functions >= registry.REQUIRED_FUNCTIONS
    assert peer.stores
    assert set(peer.stores) <= set(stores.STORES)
    assert peer.packages
    assert peer.tuned
    assert peer.keeps


def test_each_round_is_compared_with_the_same_round_of_the_peer():
    """A machine that becomes slower from round to round affects both."""
    target = postgres_target(drains([40_000, 20_000, 10_000], [20_000, 10_000, 5_000]))

    assert target.value == pytest.approx(2.0)
    assert target.is_met


def test_a_target_that_is_not_met_is_listed_on_the_page():
    numbers = drains([15_000], [10_000])

    assert postgres_target(numbers).is_met is False
    assert (
        "- PostgreSQL drain: **1.50 ×**, target ≥ 1.60 × (compared with pgqueuer)"
        in page(numbers, registry.all_peers()).splitlines()
    )


def test_a_target_without_a_measurement_is_neither_met_nor_missed():
    target = postgres_target(drains([15_000], []))

    assert (target.value, target.is_met) == (None, None)


def test_a_partial_run_replaces_only_the_figures_that_it_measured():
    numbers, newer = drains([1.0], [2.0]), drains([3.0], [])
    numbers.failures = {"postgres omniq drain": "old", "postgres saq drain": "stays"}
    numbers.update(newer)

    assert numbers.values("postgres", "omniq", "drain") == [3.0]
    assert numbers.values("postgres", "pgqueuer", "drain") == [2.0]
    assert numbers.failures == {"postgres saq drain": "stays"}
