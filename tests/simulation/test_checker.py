"""The checker finds every kind of violation in a history, and reports no correct history."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chaos.checker import Promises, check
from chaos.history import Event, journal_file, read_history
from chaos.tasks import BATCH_SIZE, Plan, expected_value

LEASE = 10.0


class WrittenHistory:
    """A history written by hand, with a tenth of a second between events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.at = 0.0

    def add(self, what: str, task_id: str = "", token: int = 0, **facts: Any) -> WrittenHistory:
        self.at = facts.pop("at", self.at + 0.1)
        by = facts.pop("by", "worker-1")
        self.events.append(Event(self.at, by, what, task_id, token, **facts))
        return self

    def enqueue(self, task_id: str, **plan: Any) -> WrittenHistory:
        value = msgspec.to_builtins(Plan(**plan))
        self.add("enqueue.try", task_id, by="producer", value=value)
        return self.add("enqueue.ok", task_id, by="producer")

    def claim(
        self, task_id: str, token: int = 1, by: str = "worker-1", **facts: Any
    ) -> WrittenHistory:
        self.add("claim", task_id, token, by=by, owner=f"owner of {by}", **facts)
        return self.add("start", task_id, token, by=by)

    def lease(self, by: str = "worker-1", seconds: float = LEASE) -> WrittenHistory:
        return self.add("lease", by=by, owner=f"owner of {by}", until=self.at + seconds)

    def end(
        self, task_id: str, token: int = 1, how: str = "returned", what: str = "done"
    ) -> WrittenHistory:
        self.add("end", task_id, token, value=how)
        return self.add(what, task_id, token)

    def final(self, task_id: str, token: int = 1, **facts: Any) -> WrittenHistory:
        value = {"status": "success", "attempts": 0, "crashes": 0, **facts}
        if value["status"] == "success":
            value.setdefault("result", [expected_value(task_id, ""), token])
        return self.add("final", task_id, token, by="reader", value=value)

    def done(self, task_id: str, **plan: Any) -> WrittenHistory:
        return self.enqueue(task_id, **plan).lease().claim(task_id).end(task_id)

    def codes(self, **promises: Any) -> set[str]:
        return {v.code for v in check(self.events, Promises(**promises)).violations}


def test_a_correct_history_violates_nothing():
    history = (
        WrittenHistory()
        .done("a")
        .enqueue("b", failures=1)
        .claim("b")
        .end("b", 1, "raised", "retried")
    )
    history.claim("b", 2).end("b", 2).final("a").final("b", 2, attempts=1)
    history.add("counted", value={"success": 2, "pending": 0})

    verdict = check(history.events, Promises(drain=1, no_zombies=True))
    assert (verdict.violations, verdict.ok, verdict.runs) == ([], 2, 3)


def test_an_acknowledged_task_that_is_absent_is_lost():
    assert WrittenHistory().done("a").codes() == {"I1"}


def test_a_purged_task_is_lost_only_if_it_had_not_ended():
    history = WrittenHistory().done("a").enqueue("b").lease().claim("b")

    lost = [v.subject for v in check(history.events, Promises(purges_finished=True)).violations]
    assert lost == ["b"]


def test_a_nominal_time_whose_task_was_purged_after_its_end_is_not_missing():
    history = WrittenHistory().lease().claim("s@1").end("s@1").claim("s@2")
    history.add("schedule", "s", value=[(1.0, "s@1"), (2.0, "s@2")])

    (missing,) = check(history.events, Promises(purges_finished=True)).violations
    assert (missing.code, missing.text) == ("I11", "2.0: has no task")


def test_a_task_that_never_ends_is_lost():
    history = (
        WrittenHistory().enqueue("a").lease().claim("a").final("a", status="running", result=None)
    )
    assert history.codes() == {"I1"}


def test_an_enqueue_with_unknown_outcome_may_or_may_not_have_stored_its_task():
    history = WrittenHistory().add("enqueue.try", "a", value={}).add("enqueue.try", "b", value={})
    verdict = check(history.lease().claim("a").end("a").final("a").events)

    assert (verdict.violations, verdict.unknown_resolved) == ([], 1)


def test_a_task_that_was_never_enqueued_is_a_phantom():
    assert WrittenHistory().lease().claim("a").end("a").final("a").codes() == {"I2"}


def test_a_refused_task_must_not_be_stored():
    history = WrittenHistory().add("enqueue.try", "a", value={}).add("enqueue.refused", "a")
    assert history.final("a", 0, result=[expected_value("a", ""), 0]).codes() == {"I2"}


def test_a_task_that_ends_twice_is_a_violation():
    history = WrittenHistory().done("a").claim("a", 2).end("a", 2).final("a", 2)
    assert "I3" in history.codes()


def test_a_dead_letter_that_was_retried_may_end_once_more():
    history = WrittenHistory().enqueue("a", fatal=True).lease()
    for token in (1, 2):
        history.claim("a", token).end("a", token, "raised", "dead").add("retry_dead.try", "a")
    assert history.final("a", 2, status="failed", attempts=1).codes() == set()


def test_the_recorded_end_of_a_task_must_be_the_stored_one():
    history = WrittenHistory().done("a").final("a", status="failed", result=None, attempts=0)
    assert "I3" in history.codes()


def test_a_cancelled_task_that_was_never_cancelled_is_a_violation():
    history = WrittenHistory().enqueue("a").final("a", 0, status="cancelled")
    assert history.codes() == {"I3"}


def test_a_claim_of_a_cancelled_task_is_a_violation():
    history = (
        WrittenHistory()
        .enqueue("a")
        .add("cancel.try", "a")
        .add("cancel.ok", "a", value=True)
        .lease()
    )
    history.add("store.claim", "a", 1, owner="owner of worker-1").claim("a").end("a").final("a")
    assert history.codes() == {"I3"}


def test_a_failure_that_is_not_charged_is_noticed():
    history = (
        WrittenHistory()
        .enqueue("a", failures=1)
        .lease()
        .claim("a")
        .end("a", 1, "raised", "retried")
    )
    assert history.claim("a", 2).end("a", 2).final("a", 2).codes() == {"I4"}


def test_a_charge_without_a_failure_is_noticed():
    assert WrittenHistory().done("a").final("a", attempts=1).codes() == {"I4"}


def test_a_claim_given_to_two_workers_is_noticed():
    history = (
        WrittenHistory()
        .enqueue("a")
        .lease()
        .claim("a")
        .claim("a", 1, by="worker-2")
        .end("a")
        .final("a")
    )
    assert "I5" in history.codes()


def test_a_claim_that_comes_before_the_previous_one_is_allowed_only_if_its_worker_was_paused():
    history = WrittenHistory().enqueue("a").claim("a", 2, by="worker-2").end("a", 2)
    history.add("claim", "a", 1, owner="owner of worker-1").add("stale", "a", 1).final("a", 2)
    paused = Event(0.1, "nemesis", "stop", until=0.5, value="worker-1")

    assert history.codes() == {"I4"}
    assert check([*history.events, paused], Promises()).violations == []


def test_a_claim_before_the_previous_lease_has_expired_is_noticed():
    history = (
        WrittenHistory()
        .enqueue("a")
        .lease()
        .claim("a")
        .lease("worker-2")
        .claim("a", 2, by="worker-2")
    )
    assert "I5" in history.end("a", 2).final("a", 2).codes()


def test_a_claim_after_the_lease_of_a_killed_worker_is_correct():
    history = (
        WrittenHistory().enqueue("a").lease().claim("a").add("kill", value="worker-1", by="nemesis")
    )
    history.lease("worker-2").claim("a", 2, by="worker-2", at=LEASE + 1).end("a", 2)

    verdict = check(history.final("a", 2).events, Promises(recovery=LEASE + 1))
    assert verdict.violations == []
    assert len(verdict.recoveries) == 1


def test_a_stale_outcome_that_was_accepted_is_noticed():
    history = (
        WrittenHistory().enqueue("a").lease().claim("a").claim("a", 2, by="worker-2", at=LEASE + 1)
    )
    history.end("a", 2).add("end", "a", 1, value="returned").add("done", "a", 1)
    assert {"I3", "I6"} <= history.final("a", 2).codes()


def test_a_result_of_an_old_claim_is_noticed():
    history = WrittenHistory().enqueue("a").lease().claim("a").add("kill", value="worker-1")
    history.claim("a", 2, by="worker-2", at=LEASE + 1).add("kill", value="worker-2")
    assert history.final("a", 2, result=[expected_value("a", ""), 1]).codes() == {"I6"}


def test_a_run_that_outlives_its_lease_is_allowed_only_if_its_worker_was_paused():
    history = (
        WrittenHistory().enqueue("a").lease().claim("a").claim("a", 2, by="worker-2", at=LEASE + 1)
    )
    history.end("a", 2).add("end", "a", 1, value="stopped").add("stale", "a", 1).final("a", 2)
    excused = Event(1.0, "nemesis", "stop", until=LEASE, value="worker-1")

    assert history.codes(no_zombies=True) == {"I7"}
    verdict = check([*history.events, excused], Promises(no_zombies=True))
    assert (verdict.violations, verdict.zombie_runs, verdict.stale_refused) == ([], 1, 1)


def test_a_result_that_does_not_match_the_arguments_is_noticed():
    assert WrittenHistory().done("a").final("a", result=["wrong", 1]).codes() == {"I8"}


def test_a_late_recovery_is_noticed():
    history = WrittenHistory().enqueue("a").lease().claim("a").add("kill", value="worker-1")
    history.claim("a", 2, by="worker-2", at=5 * LEASE).end("a", 2).final("a", 2)
    assert history.codes(recovery=LEASE + 1) == {"I9"}


def test_a_recovery_beside_a_paused_process_is_counted_separately():
    history = WrittenHistory().enqueue("a").lease().claim("a").add("kill", value="worker-1")
    history.add("stop", value="worker-3", until=30.0)
    history.claim("a", 2, by="worker-2", at=5 * LEASE).end("a", 2).final("a", 2)

    verdict = check(history.events, Promises(recovery=LEASE + 1))
    assert (verdict.violations, len(verdict.excluded_recoveries), verdict.recoveries) == ([], 1, [])


def test_a_recovery_on_a_stalled_machine_is_counted_separately():
    history = WrittenHistory().enqueue("a").lease().claim("a").add("kill", value="worker-1")
    history.claim("a", 2, by="worker-2", at=5 * LEASE).end("a", 2).final("a", 2)
    history.add("stall", by="stall_detector", value="machine", until=20.0)

    verdict = check(history.events, Promises(recovery=LEASE + 1))
    assert (verdict.violations, len(verdict.excluded_recoveries)) == ([], 1)


@pytest.mark.parametrize("rows", [0, 2])
def test_a_row_that_was_not_written_exactly_once_is_noticed(rows):
    history = WrittenHistory().done("a", writes=True).final("a").add("written", "a", value=rows)
    assert history.codes() == {"I20"}


def test_a_row_of_a_task_that_did_not_succeed_is_noticed():
    history = WrittenHistory().enqueue("a", writes=True).add("cancel.try", "a")
    history.final("a", 0, status="cancelled").add("written", "a", value=1)
    assert history.codes() == {"I20"}


def test_a_row_that_was_written_once_is_correct():
    history = WrittenHistory().done("a", writes=True).final("a").add("written", "a", value=1)
    history.done("b", writes=True).add("written", "b", value=1)
    assert history.codes(purges_finished=True) == set()


def test_a_run_before_its_time_is_noticed():
    assert WrittenHistory().done("a", eta=50.0).final("a").codes() == {"I10"}


def test_a_task_that_begins_before_what_it_waits_for_is_noticed():
    history = WrittenHistory().enqueue("a").enqueue("b", after="a").lease().claim("b").end("b")
    history.claim("a").end("a").final("a").final("b")
    assert history.codes() == {"I21"}

    right = WrittenHistory().enqueue("a").enqueue("b", after="a").lease().claim("a").end("a")
    assert right.claim("b").end("b").final("a").final("b").codes() == set()


def test_a_task_that_was_not_released_is_noticed():
    history = WrittenHistory().done("a").enqueue("b", after="a").final("a")
    assert "I22" in history.final("b", 0, status="pending", result=None).codes()


def test_a_nominal_time_without_a_task_is_noticed():
    history = WrittenHistory().add("schedule", "s", value=[(60.0, "s.60"), (120.0, "s.120")])
    history.add("fired", "s.60", value="s", until=60.0).final("s.60", 1, result=[60.0, 1])
    assert history.codes() == {"I11"}


def test_a_nominal_time_before_a_schedule_was_placed_needs_no_task():
    history = WrittenHistory().add("placed", "s", until=90.0)
    history.add("schedule", "s", value=[(60.0, "s.60"), (120.0, "s.120")])
    assert history.final("s.120", result=[120.0, 1]).codes() == set()


def test_a_nominal_time_with_two_tasks_is_noticed():
    history = WrittenHistory().add("schedule", "s", value=[(60.0, "s.60")])
    for task_id in ("s.60", "s.60b"):
        history.add("fired", task_id, value="s", until=60.0).final(task_id, result=[60.0, 1])
    assert history.codes() == {"I11"}


def test_a_nominal_time_that_the_schedule_does_not_have_is_noticed():
    history = WrittenHistory().add("schedule", "s", value=[(60.0, "s.60.0"), (120.0, "s.120.0")])
    for nominal in (60.0, 90.0, 120.0):
        history.add("fired", f"s.{nominal}", value="s", until=nominal)
        history.final(f"s.{nominal}", result=[nominal, 1])
    assert history.codes() == {"I11"}


def test_two_live_tasks_with_one_unique_key_are_noticed():
    history = (
        WrittenHistory()
        .enqueue("a", unique="k")
        .enqueue("b", unique="k")
        .lease()
        .claim("a")
        .claim("b")
    )
    assert history.end("a").end("b").final("a").final("b").codes() == {"I12"}


def test_a_sequence_out_of_order_is_noticed():
    history = WrittenHistory().enqueue("a", sequence="s").enqueue("b", sequence="s").lease()
    for task_id in ("b", "a"):
        history.add("store.claim", task_id, 1, owner="owner of worker-1").claim(task_id)
    assert history.end("a").end("b").final("a").final("b").codes() == {"I13"}


def test_more_running_tasks_than_max_running_are_noticed():
    history = WrittenHistory().lease()
    for task_id in "abc":
        history.enqueue(task_id, group="g", width=2).claim(task_id)
    for task_id in "abc":
        history.end(task_id).final(task_id)
    assert history.codes() == {"I14"}


def test_a_rate_above_the_limit_is_noticed():
    history = WrittenHistory().lease()
    for task_id in "abc":
        history.enqueue(task_id, group="g", width=2, span=5.0)
        history.add("store.claim", task_id, 1, owner="owner of worker-1")
        history.claim(task_id).end(task_id).final(task_id)
    assert history.codes() == {"I14"}


def test_a_tenant_that_gets_more_than_its_share_is_noticed():
    history = WrittenHistory().lease()
    for number in range(6):
        history.enqueue(f"a{number}", tenant="a").enqueue(f"c{number}", tenant="c")
    right = ("a0", "c0", "a1", "a2", "c1", "a3")
    wrong = ("a0", "c0", "a1", "a2", "a3", "a4", "a5")

    assert _claimed_in_store(history, right) == set()
    assert _claimed_in_store(history, wrong) == {"I31"}
    # What a tenant has cancelled leaves it behind the others.
    history.add("cancel.try", "c5")
    assert _claimed_in_store(history, wrong) == set()


def _claimed_in_store(history, ids):
    copy = WrittenHistory()
    copy.events, copy.at = list(history.events), history.at
    for task_id in ids:
        copy.add("store.claim", task_id, 1, owner="owner of worker-1")
        copy.claim(task_id).end(task_id).final(task_id)
    return copy.codes() - {"I1"}


def test_a_task_that_was_released_is_not_counted_twice_and_one_that_is_retried_is():
    for outcome, codes in (("released", set()), ("retried", {"I31"})):
        history = WrittenHistory().lease()
        for number in range(6):
            history.enqueue(f"a{number}", tenant="a", failures=3).enqueue(f"b{number}", tenant="b")
        for token in range(1, 5):
            history.add("store.claim", "a0", token, owner="owner of worker-1")
            history.claim("a0", token).end("a0", token, "raised", outcome)
        assert history.codes() & {"I31"} == codes


def test_two_tasks_of_a_strict_sequence_at_the_same_time_are_noticed():
    history = WrittenHistory().enqueue("a", strict="s").enqueue("b", strict="s").lease()
    history.claim("a").claim("b").end("a").end("b")
    assert history.final("a").final("b").codes() == {"I32"}


@pytest.mark.parametrize("how", ["killed", "retried", "right", "unknown order"])
def test_a_task_that_begins_before_an_earlier_one_of_its_sequence_has_ended_is_noticed(how):
    history = WrittenHistory().enqueue("a", strict="s", failures=1).lease().claim("a")
    if how == "killed":
        history.add("kill", value="worker-1")
    else:
        history.end("a", 1, "raised", "retried")
    if how == "unknown order":
        history.events = [each for each in history.events if each.what != "enqueue.ok"]
        history.add("enqueue.try", "b", by="producer", value={"strict": "s"})
        history.add("enqueue.ok", "a", by="producer").add("enqueue.ok", "b", by="producer")
    else:
        history.enqueue("b", strict="s")
    order = "ab" if how == "right" else "ba"
    for task_id in order:
        token = 2 if task_id == "a" else 1
        history.add("claim", task_id, token, by="worker-2", at=history.at + 2 * LEASE)
        history.add("start", task_id, token, by="worker-2").end(task_id, token)

    codes = history.codes() & {"I32"}
    assert codes == ({"I32"} if how in ("killed", "retried") else set())


def test_more_units_than_a_limit_has_are_noticed():
    history = WrittenHistory().lease()
    for task_id, units in (("a", 2), ("b", 3)):
        history.enqueue(task_id, group="g", width=4, units=units).claim(task_id)
    assert history.end("a").end("b").final("a").final("b").codes() == {"I33"}

    alone = WrittenHistory().lease()
    for task_id, units in (("a", 2), ("b", 9), ("c", 2)):
        alone.enqueue(task_id, group="g", width=4, units=units).claim(task_id).end(task_id)
    assert alone.final("a").final("b").final("c").codes() == set()


@pytest.mark.parametrize("units", [(3, 2, 2), (9, 1)])
def test_more_units_than_a_rate_has_are_noticed(units):
    history = WrittenHistory().lease()
    for number, count in enumerate(units):
        task_id = f"t{number}"
        history.enqueue(task_id, group="g", width=5, span=5.0, units=count)
        history.add("store.claim", task_id, 1, owner="owner of worker-1")
        history.claim(task_id).end(task_id).final(task_id)
    assert history.codes() == {"I33"}


def _replaced(*, runs: str) -> WrittenHistory:
    """Three calls of one key: the first is inserted, the others replace it; it runs as `runs` says."""
    history = WrittenHistory().lease().enqueue("a", replaces="k")
    for task_id in "bc":
        value = msgspec.to_builtins(Plan(replaces="k"))
        history.add("enqueue.try", task_id, by="producer", value=value)
        history.add("enqueue.replaced", task_id, by="producer", value="a")
    history.add("claim", "a", 1, owner="owner of worker-1").add("start", "a", 1, value=runs)
    return history.end("a").final("a", result=[expected_value("a", runs), 1])


def test_a_run_with_arguments_that_were_replaced_is_noticed():
    assert _replaced(runs="c").codes() == set()
    assert _replaced(runs="b").codes() == {"I34"}
    assert _replaced(runs="a").codes() == {"I34"}


def test_arguments_that_were_acknowledged_and_are_never_run_are_noticed():
    history = WrittenHistory().lease()
    history.enqueue("a", replaces="k").add("claim", "a", 1, owner="owner of worker-1")
    history.add("start", "a", 1, value="a")
    value = msgspec.to_builtins(Plan(replaces="k"))
    history.add("enqueue.try", "b", by="producer", value=value)
    history.add("enqueue.replaced", "b", by="producer", value="a").end("a")
    assert history.final("a", result=[expected_value("a", "a"), 1]).codes() == {"I34"}


@pytest.mark.parametrize(
    ("value", "outcomes"),
    [("returned", ["retried"]), ("raised", ["done"]), ("raised", ["retried", "dead"])],
)
def test_an_item_of_a_batch_with_another_outcome_than_it_was_given_is_noticed(value, outcomes):
    history = WrittenHistory().enqueue("a", batch=True).lease()
    history.add("claim", "a", 1, owner="owner of worker-1").add("start", "a", 1, value="a/1")
    history.add("end", "a", 1, value=value)
    for outcome in outcomes:
        history.add(outcome, "a", 1)
    assert "I35" in history.codes()


def test_a_call_of_a_batch_with_too_many_items_is_noticed():
    history = WrittenHistory().lease()
    for number in range(BATCH_SIZE + 1):
        history.enqueue(f"t{number}", batch=True)
        history.add("claim", f"t{number}", 1, owner="owner of worker-1")
        history.add("start", f"t{number}", 1, value="t0/1")
    for number in range(BATCH_SIZE + 1):
        history.end(f"t{number}").final(f"t{number}")
    assert history.codes() == {"I35"}


@pytest.mark.parametrize(("acknowledged", "codes"), [(True, {"I36"}), (False, set())])
def test_a_claim_over_a_limit_that_was_lowered_is_noticed(acknowledged, codes):
    history = WrittenHistory().lease().add("limit.try", "g", value=1)
    if acknowledged:
        history.add("limit.ok", "g", value=1)
    for task_id in "ab":
        history.enqueue(task_id, group="g", width=2, changes=True)
        history.add("store.claim", task_id, 1, owner="owner of worker-1").claim(task_id)
    assert history.end("a").end("b").final("a").final("b").codes() == codes


def test_runs_that_had_begun_before_their_limit_was_lowered_may_go_on():
    history = WrittenHistory().lease()
    for task_id in "ab":
        history.enqueue(task_id, group="g", width=2, changes=True)
        history.add("store.claim", task_id, 1, owner="owner of worker-1").claim(task_id)
    history.add("limit.try", "g", value=1).add("limit.ok", "g", value=1)
    assert history.end("a").end("b").final("a").final("b").codes() == set()


def test_counts_that_do_not_add_up_are_noticed():
    history = WrittenHistory().done("a").final("a").add("counted", value={"success": 2})
    assert history.codes() == {"I15"}


def test_a_repeated_step_is_noticed():
    history = WrittenHistory().enqueue("a", steps=3).lease().claim("a")
    for number in (0, 1, 2):
        history.add("step", "a", 1, value=number)
    history.add("kill", value="worker-1").claim("a", 2, by="worker-2", at=LEASE + 1)
    history.add("step", "a", 2, value=1)
    assert history.end("a", 2).final("a", 2).codes() == {"I16"}


def test_a_run_with_too_few_faults_fails():
    history = WrittenHistory().done("a").final("a").add("kill", value="worker-9")
    history.add("passed", value={"record_and_claim.before": 5})
    assert history.codes(at_least={"kill": 2}) == {"I17"}
    assert history.codes(failpoints=("record_and_claim.before",)) == {"I17"}
    assert (
        history.codes(at_least={"kill": 1}, failpoints=("record_and_claim.before",), passes=5)
        == set()
    )


def test_a_queue_that_does_not_drain_is_noticed():
    history = (
        WrittenHistory().enqueue("a").lease().add("calm").claim("a", at=100.0).end("a").final("a")
    )
    assert history.codes(drain=20.0) == {"I18"}


@pytest.mark.parametrize("what", ["files", "threads", "megabytes"])
def test_leaked_resources_are_noticed(what):
    before = {"files": 10, "threads": 3, "megabytes": 50}
    history = (
        WrittenHistory()
        .add("resources", value=before)
        .add("resources", value={**before, what: 999})
    )
    assert history.codes() == {"I19"}


def test_the_counterexample_is_a_small_part_of_the_history():
    history = WrittenHistory()
    for number in range(50):
        history.done(f"t{number}").final(f"t{number}")
    history.done("a").final("a", result=["wrong", 1])

    example = check(history.events).counter_example
    assert {event.id for event in example} == {"a"}
    assert len(example) <= 3


def test_a_journal_survives_its_writer_and_a_torn_line_is_ignored(tmp_path):
    path = tmp_path / "events"
    journal_file("worker-1", path).note("start", "a", 1, value={"of": [1]})
    with path.open("ab") as file:
        file.write(b'{"at":1.0,"by":"wor')

    (event,) = read_history([path])
    assert (event.by, event.what, event.id, event.value) == ("worker-1", "start", "a", {"of": [1]})
