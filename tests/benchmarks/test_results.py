"""The page of results cannot differ from its numbers, nor a line from what it compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import roster, stores
from benchmarks.measurements import Numbers
from benchmarks.must import judge
from benchmarks.page import page

FOLDER = Path(roster.__file__).parent
PEERS = sorted(path for path in roster.PEERS.glob("*.py") if path.stem != "__init__")


def drains(ours: list[float], theirs: list[float]) -> Numbers:
    numbers = Numbers({})
    for subject, values in (("omniq", ours), ("pgqueuer", theirs)):
        for value in values:
            numbers.add("postgres", subject, {"drain": value})
    return numbers


def postgres_line(numbers: Numbers):
    return next(line for line in judge(numbers, roster.roster()) if line.against == "pgqueuer")


def test_the_page_is_what_its_numbers_say():
    numbers = Numbers.read(FOLDER / "results.json")

    assert (FOLDER / "RESULTS.md").read_text(encoding="utf-8") == page(numbers, roster.roster())


@pytest.mark.parametrize("path", PEERS, ids=lambda path: path.stem)
def test_a_peer_says_what_the_harness_has_to_know(path):
    peer = roster.read(path)

    assert peer.functions >= roster.MUST_HAVE
    assert peer.stores
    assert set(peer.stores) <= set(stores.STORES)
    assert peer.packages
    assert peer.tuned
    assert peer.keeps


def test_rounds_are_compared_each_with_its_own():
    """A machine that grows slower from round to round does so for both."""
    line = postgres_line(drains([40_000, 20_000, 10_000], [20_000, 10_000, 5_000]))

    assert line.value == pytest.approx(2.0)
    assert line.holds


def test_a_line_below_its_bound_does_not_hold_and_is_named_on_the_page():
    numbers = drains([15_000], [10_000])

    assert postgres_line(numbers).holds is False
    assert (
        "- PostgreSQL drain: **1.50 ×** where ≥ 1.60 × is wanted (against pgqueuer)"
        in page(numbers, roster.roster()).splitlines()
    )


def test_what_was_not_measured_neither_holds_nor_fails():
    line = postgres_line(drains([15_000], []))

    assert (line.value, line.holds) == (None, None)


def test_a_partial_run_replaces_what_it_measured_and_nothing_else():
    numbers, newer = drains([1.0], [2.0]), drains([3.0], [])
    numbers.failures = {"postgres omniq drain": "old", "postgres saq drain": "stays"}
    numbers.update(newer)

    assert numbers.values("postgres", "omniq", "drain") == [3.0]
    assert numbers.values("postgres", "pgqueuer", "drain") == [2.0]
    assert numbers.failures == {"postgres saq drain": "stays"}
