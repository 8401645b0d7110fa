"""A gate admits exactly as many tasks as it may, and says when to check again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniq import gate_rules
from omniq.gate_rules import FOREVER, BreakerState, Gate, GateState
from omniq.models import BreakerRule, Limit
from omniq.storage.gate_states import GateStates
from omniq.storage.row_rules import Row
from omniq.storage.tables import Tables, TablesSection
from omniq.testing.builders import a_task

RUNNING = Gate("running:k", "running", 2)
RATE = Gate("rate:k", "rate", 3, 10)
BREAKER = Gate("breaker:b", "breaker", 2, 100)


def a_row(task_id: str, gates: tuple[Gate, ...]) -> Row:
    return Row(
        id=task_id,
        queue="default",
        priority=0,
        func_path="tests.f",
        due=0,
        visible=0,
        created_at=0,
        gates=gates,
    )


def an_open_breaker(opened_at: int = 0) -> GateState:
    state = GateState()
    for number in range(BREAKER.size):
        gate_rules.leave(BREAKER, state, f"t{number}", 1, "failure", opened_at, "Timeout")
    return state


def test_a_task_has_a_gate_for_each_breaker_and_limit():
    task = a_task(
        breakers=(BreakerRule(name="b", max_failures=4, reset_timeout=2.5),),
        limits=(Limit(key="k", max_running=3), Limit(key="k", rate=5, per=60)),
    )

    assert gate_rules.gates_of(task) == (
        Gate("breaker:b", "breaker", 4, 2_500_000),
        Gate("running:k", "running", 3),
        Gate("rate:k", "rate", 5, 60_000_000),
    )
    assert gate_rules.gates_of(a_task()) == ()


@given(st.integers(1, 10**7), st.floats(0.001, 10_000))
def test_a_high_rate_has_a_short_log_and_is_never_exceeded(rate, per):
    (gate,) = gate_rules.gates_of(a_task(limits=(Limit(key="k", rate=rate, per=per),)))

    assert gate.size <= 1000
    assert gate.size / gate.span <= rate / round(per * 1_000_000) * (1 + 1e-9)


def test_a_running_limit_counts_the_running_tasks():
    state = GateState()
    gate_rules.enter(RUNNING, state, "a", 1, 0)
    gate_rules.enter(RUNNING, state, "b", 1, 0)

    assert gate_rules.room(RUNNING, state, 0) == 0
    assert gate_rules.ask_again_at(RUNNING, state, 0) == FOREVER
    gate_rules.leave(RUNNING, state, "a", 7, "success", 0)
    assert gate_rules.room(RUNNING, state, 0) == 0
    gate_rules.leave(RUNNING, state, "a", 1, "success", 0)
    gate_rules.leave(RUNNING, state, "a", 1, "success", 0)
    assert gate_rules.room(RUNNING, state, 0) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
@given(steps=st.lists(st.integers(0, 6), max_size=60))
def test_no_span_has_more_starts_than_the_rate_and_none_is_refused_without_need(size, steps):
    gate, state = Gate("rate:k", "rate", size, 10), GateState()
    now = 1_000
    starts: list[int] = []
    for step in steps:
        now += step
        free = size - len([start for start in starts if start > now - gate.span])
        assert gate_rules.room(gate, state, now) == free
        if free:
            gate_rules.enter(gate, state, "t", 1, now)
            starts.append(now)
        else:
            again = gate_rules.ask_again_at(gate, state, now)
            assert gate_rules.room(gate, state, again - 1) == 0
            assert gate_rules.room(gate, state, again) > 0

    for start in starts:
        assert sum(start <= other < start + gate.span for other in starts) <= size


@pytest.mark.parametrize("size", [1, 2, 3])
@given(steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), max_size=60))
def test_no_span_has_more_starts_when_claims_overtake_each_other(size, steps):
    """A claim reads the clock, and reaches the gate after claims that read it later."""
    gate, state = Gate("rate:k", "rate", size, 10), GateState()
    clock = 1_000
    starts: list[int] = []
    for step, late in steps:
        clock += step
        now = clock - late
        if gate_rules.room(gate, state, now):
            gate_rules.enter(gate, state, "t", 1, now)
            starts.append(now)

    for start in starts:
        assert sum(start <= other < start + gate.span for other in starts) <= size


def test_a_clock_that_was_set_back_does_not_block_a_rate_for_long():
    state = GateState()
    for _ in range(RATE.size):
        gate_rules.enter(RATE, state, "t", 1, 1_000_000)
    assert gate_rules.room(RATE, state, 500) == RATE.size
    gate_rules.enter(RATE, state, "t", 1, 500)

    assert gate_rules.room(RATE, state, 500 + RATE.span) == RATE.size


def test_a_breaker_opens_after_max_failures_in_a_row():
    state = GateState()
    gate_rules.leave(BREAKER, state, "a", 1, "failure", 0)
    gate_rules.leave(BREAKER, state, "b", 1, "success", 0)
    gate_rules.leave(BREAKER, state, "c", 1, "failure", 0)
    assert state.breaker is BreakerState.CLOSED
    gate_rules.leave(BREAKER, state, "d", 1, "neither", 0)
    gate_rules.leave(BREAKER, state, "e", 1, "failure", 5, "Timeout")

    assert (state.breaker, state.opened_at, state.reason) == (BreakerState.OPEN, 5, "Timeout")
    assert gate_rules.room(BREAKER, state, 104) == 0
    assert gate_rules.ask_again_at(BREAKER, state, 6) == 105
    assert gate_rules.room(BREAKER, state, 105) == 1


def test_a_half_open_breaker_has_one_probe_at_a_time():
    state = an_open_breaker()
    gate_rules.enter(BREAKER, state, "probe", 1, 100)

    assert state.breaker is BreakerState.HALF_OPEN
    assert gate_rules.room(BREAKER, state, 10_000) == 0
    assert gate_rules.ask_again_at(BREAKER, state, 10_000) == FOREVER


def test_a_probe_that_succeeds_closes_the_breaker():
    state = an_open_breaker()
    gate_rules.enter(BREAKER, state, "probe", 1, 100)
    gate_rules.leave(BREAKER, state, "probe", 1, "success", 120)

    assert (state.breaker, state.failures, state.reason) == (BreakerState.CLOSED, 0, "")
    assert gate_rules.room(BREAKER, state, 120) == FOREVER


def test_a_failed_probe_opens_the_breaker_for_another_span():
    state = an_open_breaker()
    gate_rules.enter(BREAKER, state, "probe", 1, 100)
    gate_rules.leave(BREAKER, state, "probe", 1, "failure", 120, "Timeout")

    assert (state.breaker, state.wake_at) == (BreakerState.OPEN, 220)


def test_after_a_probe_without_an_outcome_the_next_one_may_probe_at_once():
    state = an_open_breaker()
    gate_rules.enter(BREAKER, state, "probe", 1, 100)
    gate_rules.leave(BREAKER, state, "probe", 1, "neither", 120)

    assert (state.breaker, state.reason) == (BreakerState.OPEN, "Timeout")
    assert gate_rules.room(BREAKER, state, 120) == 1


@pytest.mark.parametrize("effect", ["success", "failure", "neither"])
def test_only_the_probe_changes_a_breaker_that_is_not_closed(effect):
    state = an_open_breaker()
    gate_rules.leave(BREAKER, state, "late", 1, effect, 50)
    assert (state.breaker, state.opened_at) == (BreakerState.OPEN, 0)
    gate_rules.enter(BREAKER, state, "probe", 1, 100)
    gate_rules.leave(BREAKER, state, "late", 1, effect, 110)

    assert state.breaker is BreakerState.HALF_OPEN
    assert state.holders == [("probe", 1)]


async def test_the_first_gate_without_room_blocks_and_gets_a_wake_up_time():
    gates = GateStates(TablesSection(Tables(), now=6))
    rows = [a_row(f"t{number}", gates=(RUNNING, RATE)) for number in range(2)]
    rows += [a_row(f"r{number}", gates=(RATE,)) for number in range(2)]
    late = [a_row("rate-is-full", gates=(RATE,)), a_row("both-are-full", gates=(RUNNING, RATE))]
    await gates.load([*rows, *late])

    assert [gates.enter(row) for row in [*rows, *late]] == [True, True, True, False, False, False]

    assert [row.parked for row in rows] == [None, None, None, RATE.key]
    assert [row.parked for row in late] == [RATE.key, RUNNING.key]
    due = {change.key: change.due for change in gates.changes()}
    assert due == {RATE.key: 16, RUNNING.key: None}
