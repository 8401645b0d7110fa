"""The comparison with other queues: how runs are counted, and that the page matches the results."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from chaos.peers import adapters
from chaos.peers.counting import Kill, Note, count, read_notes
from chaos.peers.fleet import Round, run_round
from chaos.peers.page import PAGE, page
from chaos.peers.record import keys, read
from chaos.peers.registry import PEERS

ADAPTERS = sorted(
    path for path in Path(adapters.__file__).parent.glob("*.py") if path.stem != "__init__"
)


def notes(text: str) -> list[Note]:
    """Parse notes: `a+` is acknowledged, `a1(` starts and `a1)` ends in session 1; one per second."""
    whats = {"+": "acknowledged", "(": "start", ")": "end"}
    return [
        Note(whats[word[-1]], word[0], float(at), int(word[1:-1] or 0))
        for at, word in enumerate(text.split())
    ]


def test_a_task_that_was_acknowledged_and_never_ended_is_lost():
    counted = count(notes("a+ b+ a1( b2( b2)"), [Kill(1, 4.5)], {})

    assert (counted.acknowledged, counted.finished, counted.lost) == (2, 1, 1)
    assert (counted.interrupted, counted.recoveries, counted.recovery_p50) == (1, 0, None)


def test_a_task_that_the_store_still_has_is_not_lost():
    counted = count(notes("a+ b+ c+ c1( c1)"), [], {"a": "held", "b": "failed", "c": "failed"})

    assert (counted.held, counted.failed, counted.lost, counted.finished) == (1, 1, 0, 1)


def test_a_task_that_was_never_acknowledged_cannot_be_lost():
    counted = count(notes("a1("), [Kill(1, 1.5)], {})

    assert (counted.acknowledged, counted.lost) == (0, 0)


def test_only_complete_runs_count_as_run_twice():
    counted = count(notes("a+ b+ a1( b1( b1) a2( b2( a2) b2)"), [Kill(1, 4.5)], {})

    assert (counted.started_again, counted.ran_twice, counted.interrupted) == (2, 1, 1)


def test_recovery_time_is_from_the_kill_to_the_next_start_on_another_worker():
    counted = count(notes("a+ b+ a1( b1( c+ a2( a2) b3( b3)"), [Kill(1, 3.5)], {})

    assert (counted.recovery_p50, counted.recovery_max) == (2.5, 3.5)


def test_a_truncated_line_is_ignored(tmp_path):
    written = tmp_path / "notes"
    written.write_text("start a 2.5 7\nacknowledged a 1.0 6\nend a 3")

    assert read_notes(written) == [Note("acknowledged", "a", 1.0, 6), Note("start", "a", 2.5, 7)]


def test_every_peer_has_an_adapter_and_every_adapter_a_peer():
    assert {path.stem for path in ADAPTERS} == {peer.adapter for peer in PEERS}


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_an_adapter_has_its_verbs_and_at_most_a_hundred_lines(path):
    text = path.read_text(encoding="utf-8")
    functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}

    assert {"produce", "work", "left"} <= functions
    assert len(text.splitlines()) <= 100


def test_the_page_matches_the_results():
    assert PAGE.read_text(encoding="utf-8") == page(read()), "run `python -m chaos.peers --page`"


def test_every_combination_was_run_with_the_published_settings():
    published = {
        (peer.name, profile.name): (profile.settings, profile.returns_after)
        for peer in PEERS
        for profile in peer.profiles
    }
    rows = read().rows

    assert [row.key for row in rows] == keys()
    for row in rows:
        assert (row.settings, row.returns_after) == published[row.peer, row.profile]
        assert row.count.kills >= 20
        assert row.count.interrupted > 0


def test_the_versions_in_the_results_are_the_pinned_ones():
    pinned = {peer.name: peer.requirements for peer in PEERS}

    for row in read().rows:
        for requirement in pinned[row.peer]:
            name, _, version = requirement.partition("==")
            assert row.versions[name.partition("[")[0]] == version


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_a_round_of_omniq_loses_nothing(tmp_path):
    played = Round("omniq", Path(sys.executable), "SQLite", {"lease": 1}, 2.0, kills=5, seed=7)

    counted = run_round(played, tmp_path)

    assert (counted.kills, counted.finished) == (5, counted.acknowledged)
    assert counted.recoveries == counted.interrupted
