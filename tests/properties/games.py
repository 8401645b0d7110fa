"""Games of any moves in any order, played on a backend and on the model side by side."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from omniq.testing.state_machine import machine_for
from omniq.testing.state_machine_stores import OpenStore


def play(open_store: OpenStore, *, games: int, moves: int) -> None:
    run_state_machine_as_test(
        machine_for(open_store),
        settings=settings(
            max_examples=games,
            stateful_step_count=moves,
            # A game takes as long as the machine is busy; the test has a timeout of its own.
            deadline=None,
            # Every run plays other games: over time they reach what 200 fixed ones never would.
            # But what decides over a change plays the same ones each time: it judges the change,
            # and not its luck.
            derandomize="CI" in os.environ,
            print_blob=True,
            # The same: slow and large games are what this is for.
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
