"""A row changes only as the rules say: tokens grow, charges are made once, the right task is charged."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniq.clock import from_micros
from omniq.models import LEGAL_TRANSITIONS, Limit, TaskStatus
from omniq.outcomes import Rescheduled, Retried, Succeeded
from omniq.storage import row_rules
from omniq.storage.row_rules import MAX_HISTORY, Row
from omniq.testing.builders import (
    FINAL_KINDS,
    RELEASING_KINDS,
    OutcomeKind,
    a_result,
    a_task,
    an_error,
    an_outcome,
)

NOW = 1_000_000_000
LATER = from_micros(NOW + 60_000_000)
ALL_KINDS: tuple[OutcomeKind, ...] = (*FINAL_KINDS, *RELEASING_KINDS, "held")


def a_row(task_id: str = "a", **fields) -> Row:
    task = a_task(task_id, created_at=from_micros(NOW), **fields)
    return row_rules.row_of(task, b"body", now=NOW, default_ttl=60_000_000, nonce="n")


def a_claimed_row(task_id: str = "a", owner: str = "me", **fields) -> Row:
    row = a_row(task_id, **fields)
    row_rules.claim(row, owner, NOW)
    return row


def as_task(row: Row):
    return row_rules.task_of(row, a_task(row.id))


def test_a_task_without_an_eta_is_due_now_and_visible_at_any_time():
    row = a_row()

    assert (row.due, row.visible) == (NOW, 0)
    row = a_row(eta=LATER)
    assert row.due == row.visible == NOW + 60_000_000


def test_the_ttl_of_a_task_overrides_the_default():
    assert a_row().result_ttl == 60_000_000
    assert a_row(result_ttl=0).result_ttl == 0
    assert a_row(result_ttl=1.5).result_ttl == 1_500_000


def test_rows_sort_by_priority_then_turn_then_order_of_enqueue():
    rows = [a_row("late"), a_row("urgent", priority=5), a_row("early"), a_row("second")]
    for seq, row in enumerate(rows):
        row.seq = seq
    assert rows[2].turn == rows[2].due
    rows[2].turn -= 1

    assert [row.id for row in sorted(rows, key=lambda row: row.order)] == [
        "urgent",
        "early",
        "late",
        "second",
    ]


def test_a_claim_sets_owner_and_the_next_token():
    row = a_claimed_row()

    assert (row.status, row.owner, row.token, row.started_at) == (
        TaskStatus.RUNNING,
        "me",
        1,
        NOW,
    )


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_an_outcome_belongs_to_one_owner_and_one_token(kind):
    row = a_claimed_row()
    outcome = an_outcome(kind, as_task(row), LATER)

    assert row_rules.is_current(row, outcome, "me")
    assert not row_rules.is_current(row, outcome, "you")
    row.token += 1
    assert not row_rules.is_current(row, outcome, "me")


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_settled_outcome_is_known_as_recorded_until_the_next_claim(kind):
    row = a_claimed_row()
    outcome = an_outcome(kind, as_task(row), LATER)
    assert not row_rules.was_recorded(row, outcome)
    settled = row_rules.settle(row, outcome, NOW)
    if settled.finish is not None:
        row = row_rules.finished_row(row, settled.finish, b"", NOW).row

    assert row_rules.was_recorded(row, outcome) == (kind != "held")
    if kind in RELEASING_KINDS:
        row_rules.claim(row, "you", NOW)
        assert not row_rules.was_recorded(row, outcome)


@given(st.lists(st.sampled_from([*ALL_KINDS, "lost"]), max_size=40))
def test_every_sequence_of_changes_is_legal_and_the_token_only_grows(steps):
    row = a_row()
    for step in steps:
        before, token = row.status, row.token
        if row.owner is None:
            row_rules.claim(row, "me", NOW)
            assert row.token == token + 1
            before = TaskStatus.RUNNING
        if row.status is TaskStatus.RETRYING and step == "succeeded":
            # A run that was recorded as failed does not succeed afterwards.
            continue
        if step == "lost":
            ((_, settled),) = row_rules.give_back([row], NOW, 3)
        else:
            settled = row_rules.settle(row, an_outcome(step, as_task(row), LATER), NOW)
        if settled.finish is not None:
            assert settled.finish.status in LEGAL_TRANSITIONS[before]
            return
        assert row.status is before or row.status in LEGAL_TRANSITIONS[before]
        assert (row.owner is None) == (step != "held")


@given(st.lists(st.sampled_from(["retried", "released", "snoozed", "rescheduled"]), max_size=60))
def test_attempts_count_the_failures_and_the_history_keeps_the_first_and_the_newest(steps):
    row = a_row()
    for step in steps:
        row_rules.claim(row, "me", NOW)
        row_rules.settle(row, an_outcome(step, as_task(row), LATER), NOW)
    failures = steps.count("retried")
    numbers = [attempt.number for attempt in row.history]

    assert row.attempts == failures
    assert len(numbers) == min(failures, MAX_HISTORY)
    assert numbers == sorted(set(numbers))
    assert not numbers or (numbers[0], numbers[-1]) == (1, failures)


def test_a_failure_is_charged_once_however_the_task_ends():
    for last in ("held", "retried", "failed"):
        row = a_claimed_row()
        first = row_rules.settle(row, an_outcome("held", as_task(row), LATER), NOW)
        second = row_rules.settle(row, an_outcome(last, as_task(row), LATER), NOW)

        assert (row.attempts, len(row.history)) == (1, 1)
        assert (first.effect, second.effect) == ("failure", "neither")


@pytest.mark.parametrize("kind", [*RELEASING_KINDS, "held"])
def test_a_cancelled_run_is_not_retried(kind):
    row = a_claimed_row()
    row.cancel_requested = True
    settled = row_rules.settle(row, an_outcome(kind, as_task(row), LATER), NOW)

    assert settled.finish is not None
    assert settled.finish.status is TaskStatus.CANCELLED
    assert settled.finish.dead is None


def test_a_repeating_task_is_reset_after_a_success():
    row = a_claimed_row(interval=60)
    row.attempts, row.crashes = 2, 1
    settled = row_rules.settle(row, Succeeded("a", 1, a_result(a_task("a")), LATER, b"42"), NOW)

    assert settled.finish is None
    assert settled.result == b"42"
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 0, 0)
    moved = Rescheduled("a", 1, from_micros(NOW))
    assert row_rules.is_current(row, moved, "me")
    assert not row_rules.is_current(row, Retried("a", 1, an_error()), "me")


def test_a_dead_owner_is_charged_with_all_it_ran_when_none_is_suspect():
    rows = [a_claimed_row("a"), a_claimed_row("b")]
    row_rules.give_back(rows, NOW, 3)

    assert [(row.crashes, row.attempts, row.status) for row in rows] == [
        (1, 0, TaskStatus.RETRYING)
    ] * 2
    assert [(row.owner, row.visible, row.due) for row in rows] == [(None, 0, NOW)] * 2


def test_only_the_suspect_is_charged_when_there_is_one():
    rows = [a_claimed_row("suspect"), a_claimed_row("bystander")]
    rows[0].crashes = 1
    row_rules.give_back(rows, NOW, 3)

    assert [row.crashes for row in rows] == [2, 0]
    assert (rows[1].status, rows[1].attempts, rows[1].history) == (TaskStatus.PENDING, 0, ())


def test_too_many_crashes_are_a_dead_letter():
    row = a_claimed_row()
    row.crashes = 2
    ((_, settled),) = row_rules.give_back([row], NOW, 3)

    assert settled.finish is not None
    assert settled.finish.dead is not None
    assert settled.finish.dead.failure_reason == "crashed"
    assert row.settled == 0


def test_a_held_retry_is_not_charged_for_the_loss_of_its_owner():
    row = a_claimed_row()
    row_rules.settle(row, Retried("a", 1, an_error()), NOW)
    row_rules.give_back([row], NOW + 5, 3)

    assert (row.attempts, row.crashes, row.owner, row.due) == (1, 0, None, NOW + 5)


def test_a_retried_dead_row_has_no_failures_and_keeps_its_token():
    row = a_claimed_row()
    row_rules.settle(row, an_outcome("failed", as_task(row), LATER), NOW)
    before = copy.copy(row)
    edited = a_row(priority=7, unique="key", limits=(Limit(key="few", max_running=1),))
    edited.body = b"edited"
    row_rules.retry_dead(row, NOW + 9, edited=edited)

    assert (row.status, row.attempts, row.history, row.settled) == (TaskStatus.PENDING, 0, (), 0)
    assert (row.token, row.seq, row.due, row.body) == (before.token, before.seq, NOW + 9, b"edited")
    assert (row.priority, row.unique, row.gates) == (7, "key", edited.gates)


def test_expiry_is_reached_at_its_instant():
    row = a_row(expires=from_micros(NOW) + timedelta(microseconds=5))

    assert not row_rules.is_expired(row, NOW + 4)
    assert row_rules.is_expired(row, NOW + 5)
    assert not row_rules.is_expired(a_row(), 2**62)


def test_a_live_row_has_a_result_only_while_it_retries():
    row = a_claimed_row()
    assert row_rules.retrying_result(row) is None
    row_rules.settle(row, Retried("a", 1, an_error("first")), NOW)
    result = row_rules.retrying_result(row)

    assert result is not None
    assert (result.status, result.error, result.attempts) == (
        TaskStatus.RETRYING,
        an_error("first"),
        1,
    )


@pytest.mark.parametrize("crashes_before", [0, 2])
def test_a_lost_worker_does_not_change_the_breakers(crashes_before):
    row = a_claimed_row()
    row.crashes = crashes_before

    ((_, settled),) = row_rules.give_back([row], NOW, 3)

    assert settled.effect == "neither"
