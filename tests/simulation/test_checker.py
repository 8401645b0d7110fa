"""The checker finds every kind of broken promise that is planted in a good history, and no other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chaos.checker import Promises, check
from chaos.history import Event, journal_file, read_history
from chaos.work import Plan, answer

LEASE = 10.0


class Page:
    """A history that is written by hand, a tenth of a second for each event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.at = 0.0

    def add(self, what: str, task_id: str = "", token: int = 0, **facts: Any) -> Page:
        self.at = facts.pop("at", self.at + 0.1)
        by = facts.pop("by", "worker-1")
        self.events.append(Event(self.at, by, what, task_id, token, **facts))
        return self

    def enqueue(self, task_id: str, **plan: Any) -> Page:
        value = msgspec.to_builtins(Plan(**plan))
        self.add("enqueue.try", task_id, by="producer", value=value)
        return self.add("enqueue.ok", task_id, by="producer")

    def claim(self, task_id: str, token: int = 1, by: str = "worker-1", **facts: Any) -> Page:
        self.add("claim", task_id, token, by=by, owner=f"owner of {by}", **facts)
        return self.add("start", task_id, token, by=by)

    def lease(self, by: str = "worker-1", seconds: float = LEASE) -> Page:
        return self.add("lease", by=by, owner=f"owner of {by}", until=self.at + seconds)

    def end(self, task_id: str, token: int = 1, how: str = "returned", what: str = "done") -> Page:
        self.add("end", task_id, token, value=how)
        return self.add(what, task_id, token)

    def final(self, task_id: str, token: int = 1, **facts: Any) -> Page:
        value = {"status": "success", "attempts": 0, "crashes": 0, **facts}
        if value["status"] == "success":
            value.setdefault("result", [answer(task_id, ""), token])
        return self.add("final", task_id, token, by="reader", value=value)

    def done(self, task_id: str, **plan: Any) -> Page:
        return self.enqueue(task_id, **plan).lease().claim(task_id).end(task_id)

    def codes(self, **promises: Any) -> set[str]:
        return {v.code for v in check(self.events, Promises(**promises)).violations}


def test_a_good_history_breaks_no_promise():
    page = Page().done("a").enqueue("b", failures=1).claim("b").end("b", 1, "raised", "retried")
    page.claim("b", 2).end("b", 2).final("a").final("b", 2, attempts=1)
    page.add("counted", value={"success": 2, "pending": 0})

    verdict = check(page.events, Promises(drain=1, no_zombies=True))
    assert (verdict.violations, verdict.ok, verdict.runs) == ([], 2, 3)


def test_what_was_acknowledged_and_is_gone_is_lost():
    assert Page().done("a").codes() == {"I1"}


def test_what_has_ended_and_was_purged_is_not_lost_but_what_has_not_ended_is():
    page = Page().done("a").enqueue("b").lease().claim("b")

    lost = [v.subject for v in check(page.events, Promises(forgets=True)).violations]
    assert lost == ["b"]


def test_a_nominal_time_whose_task_has_ended_and_was_purged_is_not_missing():
    page = Page().lease().claim("s@1").end("s@1").claim("s@2")
    page.add("schedule", "s", value=[(1.0, "s@1"), (2.0, "s@2")])

    (missing,) = check(page.events, Promises(forgets=True)).violations
    assert (missing.code, missing.text) == ("I11", "2.0: has no task")


def test_what_never_ends_is_lost():
    page = Page().enqueue("a").lease().claim("a").final("a", status="running", result=None)
    assert page.codes() == {"I1"}


def test_what_nobody_knows_the_end_of_may_be_there_or_not():
    page = Page().add("enqueue.try", "a", value={}).add("enqueue.try", "b", value={})
    verdict = check(page.lease().claim("a").end("a").final("a").events)

    assert (verdict.violations, verdict.unknown_resolved) == ([], 1)


def test_what_nobody_enqueued_is_a_phantom():
    assert Page().lease().claim("a").end("a").final("a").codes() == {"I2"}


def test_what_was_refused_may_not_be_there():
    page = Page().add("enqueue.try", "a", value={}).add("enqueue.refused", "a")
    assert page.final("a", 0, result=[answer("a", ""), 0]).codes() == {"I2"}


def test_two_ends_of_one_task_are_one_too_many():
    page = Page().done("a").claim("a", 2).end("a", 2).final("a", 2)
    assert "I3" in page.codes()


def test_a_dead_letter_that_was_retried_may_end_once_more():
    page = Page().enqueue("a", fatal=True).lease()
    for token in (1, 2):
        page.claim("a", token).end("a", token, "raised", "dead").add("revive.try", "a")
    assert page.final("a", 2, status="failed", attempts=1).codes() == set()


def test_an_end_that_was_told_is_the_end_that_is_kept():
    page = Page().done("a").final("a", status="failed", result=None, attempts=0)
    assert "I3" in page.codes()


def test_nothing_is_cancelled_that_nobody_cancelled():
    page = Page().enqueue("a").final("a", 0, status="cancelled")
    assert page.codes() == {"I3"}


def test_what_was_cancelled_is_not_claimed_any_more():
    page = Page().enqueue("a").add("cancel.try", "a").add("cancel.ok", "a", value=True).lease()
    page.add("store.claim", "a", 1, owner="owner of worker-1").claim("a").end("a").final("a")
    assert page.codes() == {"I3"}


def test_a_failure_that_is_not_charged_is_noticed():
    page = Page().enqueue("a", failures=1).lease().claim("a").end("a", 1, "raised", "retried")
    assert page.claim("a", 2).end("a", 2).final("a", 2).codes() == {"I4"}


def test_a_charge_without_a_failure_is_noticed():
    assert Page().done("a").final("a", attempts=1).codes() == {"I4"}


def test_a_claim_that_two_were_given_is_noticed():
    page = Page().enqueue("a").lease().claim("a").claim("a", 1, by="worker-2").end("a").final("a")
    assert "I5" in page.codes()


def test_a_claim_while_the_lease_of_the_last_one_lasts_is_noticed():
    page = Page().enqueue("a").lease().claim("a").lease("worker-2").claim("a", 2, by="worker-2")
    assert "I5" in page.end("a", 2).final("a", 2).codes()


def test_a_claim_after_the_lease_of_a_killed_worker_is_none_to_complain_of():
    page = Page().enqueue("a").lease().claim("a").add("kill", value="worker-1", by="nemesis")
    page.lease("worker-2").claim("a", 2, by="worker-2", at=LEASE + 1).end("a", 2)

    verdict = check(page.final("a", 2).events, Promises(recovery=LEASE + 1))
    assert verdict.violations == []
    assert len(verdict.recoveries) == 1


def test_a_stale_outcome_that_was_accepted_is_noticed():
    page = Page().enqueue("a").lease().claim("a").claim("a", 2, by="worker-2", at=LEASE + 1)
    page.end("a", 2).add("end", "a", 1, value="returned").add("done", "a", 1)
    assert {"I3", "I6"} <= page.final("a", 2).codes()


def test_a_result_of_an_old_claim_is_noticed():
    page = Page().enqueue("a").lease().claim("a").add("kill", value="worker-1")
    page.claim("a", 2, by="worker-2", at=LEASE + 1).add("kill", value="worker-2")
    assert page.final("a", 2, result=[answer("a", ""), 1]).codes() == {"I6"}


def test_a_run_that_outlives_its_lease_is_a_zombie_and_its_worker_must_have_stood_still():
    page = Page().enqueue("a").lease().claim("a").claim("a", 2, by="worker-2", at=LEASE + 1)
    page.end("a", 2).add("end", "a", 1, value="stopped").add("stale", "a", 1).final("a", 2)
    excused = Event(1.0, "nemesis", "stop", until=LEASE, value="worker-1")

    assert page.codes(no_zombies=True) == {"I7"}
    verdict = check([*page.events, excused], Promises(no_zombies=True))
    assert (verdict.violations, verdict.zombie_runs, verdict.stale_refused) == ([], 1, 1)


def test_a_result_that_does_not_follow_from_the_arguments_is_noticed():
    assert Page().done("a").final("a", result=["wrong", 1]).codes() == {"I8"}


def test_a_late_recovery_is_noticed():
    page = Page().enqueue("a").lease().claim("a").add("kill", value="worker-1")
    page.claim("a", 2, by="worker-2", at=5 * LEASE).end("a", 2).final("a", 2)
    assert page.codes(recovery=LEASE + 1) == {"I9"}


def test_a_recovery_beside_a_stopped_process_is_counted_apart():
    page = Page().enqueue("a").lease().claim("a").add("kill", value="worker-1")
    page.add("stop", value="worker-3", until=30.0)
    page.claim("a", 2, by="worker-2", at=5 * LEASE).end("a", 2).final("a", 2)

    verdict = check(page.events, Promises(recovery=LEASE + 1))
    assert (verdict.violations, len(verdict.apart), verdict.recoveries) == ([], 1, [])


def test_a_recovery_on_a_machine_that_stalls_is_counted_apart():
    page = Page().enqueue("a").lease().claim("a").add("kill", value="worker-1")
    page.claim("a", 2, by="worker-2", at=5 * LEASE).end("a", 2).final("a", 2)
    page.add("stall", by="metronome", value="machine", until=20.0)

    verdict = check(page.events, Promises(recovery=LEASE + 1))
    assert (verdict.violations, len(verdict.apart)) == ([], 1)


@pytest.mark.parametrize("rows", [0, 2])
def test_a_row_that_a_task_did_not_write_once_is_noticed(rows):
    page = Page().done("a", writes=True).final("a").add("written", "a", value=rows)
    assert page.codes() == {"I20"}


def test_a_row_of_a_task_that_did_not_succeed_is_noticed():
    page = Page().enqueue("a", writes=True).add("cancel.try", "a")
    page.final("a", 0, status="cancelled").add("written", "a", value=1)
    assert page.codes() == {"I20"}


def test_a_row_that_was_written_once_is_none_to_complain_of():
    page = Page().done("a", writes=True).final("a").add("written", "a", value=1)
    page.done("b", writes=True).add("written", "b", value=1)
    assert page.codes(forgets=True) == set()


def test_a_run_before_its_time_is_noticed():
    assert Page().done("a", eta=50.0).final("a").codes() == {"I10"}


def test_a_nominal_time_without_a_task_is_noticed():
    page = Page().add("schedule", "s", value=[(60.0, "s.60"), (120.0, "s.120")])
    page.add("fired", "s.60", value="s", until=60.0).final("s.60", 1, result=[60.0, 1])
    assert page.codes() == {"I11"}


def test_a_nominal_time_before_a_schedule_was_placed_needs_no_task():
    page = Page().add("placed", "s", until=90.0)
    page.add("schedule", "s", value=[(60.0, "s.60"), (120.0, "s.120")])
    assert page.final("s.120", result=[120.0, 1]).codes() == set()


def test_a_nominal_time_with_two_tasks_is_noticed():
    page = Page().add("schedule", "s", value=[(60.0, "s.60")])
    for task_id in ("s.60", "s.60b"):
        page.add("fired", task_id, value="s", until=60.0).final(task_id, result=[60.0, 1])
    assert page.codes() == {"I11"}


def test_a_time_that_is_not_the_schedules_is_noticed():
    page = Page().add("schedule", "s", value=[(60.0, "s.60.0"), (120.0, "s.120.0")])
    for nominal in (60.0, 90.0, 120.0):
        page.add("fired", f"s.{nominal}", value="s", until=nominal)
        page.final(f"s.{nominal}", result=[nominal, 1])
    assert page.codes() == {"I11"}


def test_two_of_one_unique_key_beside_each_other_are_noticed():
    page = Page().enqueue("a", unique="k").enqueue("b", unique="k").lease().claim("a").claim("b")
    assert page.end("a").end("b").final("a").final("b").codes() == {"I12"}


def test_a_sequence_out_of_order_is_noticed():
    page = Page().enqueue("a", sequence="s").enqueue("b", sequence="s").lease()
    for task_id in ("b", "a"):
        page.add("store.claim", task_id, 1, owner="owner of worker-1").claim(task_id)
    assert page.end("a").end("b").final("a").final("b").codes() == {"I13"}


def test_a_group_that_is_too_wide_is_noticed():
    page = Page().lease()
    for task_id in "abc":
        page.enqueue(task_id, group="g", width=2).claim(task_id)
    for task_id in "abc":
        page.end(task_id).final(task_id)
    assert page.codes() == {"I14"}


def test_a_rate_that_is_too_high_is_noticed():
    page = Page().lease()
    for task_id in "abc":
        page.enqueue(task_id, group="g", width=2, span=5.0)
        page.add("store.claim", task_id, 1, owner="owner of worker-1")
        page.claim(task_id).end(task_id).final(task_id)
    assert page.codes() == {"I14"}


def test_counts_that_do_not_add_up_are_noticed():
    page = Page().done("a").final("a").add("counted", value={"success": 2})
    assert page.codes() == {"I15"}


def test_a_step_that_is_done_again_is_noticed():
    page = Page().enqueue("a", steps=3).lease().claim("a")
    for number in (0, 1, 2):
        page.add("step", "a", 1, value=number)
    page.add("kill", value="worker-1").claim("a", 2, by="worker-2", at=LEASE + 1)
    page.add("step", "a", 2, value=1)
    assert page.end("a", 2).final("a", 2).codes() == {"I16"}


def test_a_run_with_too_few_faults_does_not_count():
    page = Page().done("a").final("a").add("kill", value="worker-9")
    page.add("passed", value={"record_and_claim.before": 5})
    assert page.codes(at_least={"kill": 2}) == {"I17"}
    assert page.codes(failpoints=("record_and_claim.before",)) == {"I17"}
    assert (
        page.codes(at_least={"kill": 1}, failpoints=("record_and_claim.before",), passes=5) == set()
    )


def test_a_queue_that_does_not_drain_is_noticed():
    page = Page().enqueue("a").lease().add("calm").claim("a", at=100.0).end("a").final("a")
    assert page.codes(drain=20.0) == {"I18"}


@pytest.mark.parametrize("what", ["files", "threads", "megabytes"])
def test_resources_that_do_not_come_back_are_noticed(what):
    before = {"files": 10, "threads": 3, "megabytes": 50}
    page = Page().add("resources", value=before).add("resources", value={**before, what: 999})
    assert page.codes() == {"I19"}


def test_the_counter_example_is_a_small_part_of_the_history():
    page = Page()
    for number in range(50):
        page.done(f"t{number}").final(f"t{number}")
    page.done("a").final("a", result=["wrong", 1])

    example = check(page.events).counter_example
    assert {event.id for event in example} == {"a"}
    assert len(example) <= 3


def test_a_journal_survives_its_writer_and_a_torn_line_is_none(tmp_path):
    path = tmp_path / "events"
    journal_file("worker-1", path).note("start", "a", 1, value={"of": [1]})
    with path.open("ab") as file:
        file.write(b'{"at":1.0,"by":"wor')

    (event,) = read_history([path])
    assert (event.by, event.what, event.id, event.value) == ("worker-1", "start", "a", {"of": [1]})
