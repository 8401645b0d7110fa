"""`Demand`: every transition of its diagram, and that no order of events loses a wake-up."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omniq.worker.demand import Call, Demand, DemandState

IDLE, WANTED, CLAIMED = DemandState.IDLE, DemandState.WANTED, DemandState.CLAIMED


def make_demand(concurrency: int = 4, most_per_call: int = 4) -> Demand:
    return Demand(concurrency=concurrency, most_per_call=most_per_call, poll_interval=1.0)


def send(demand: Demand, claims: int = 4, outcomes: int = 0) -> Call:
    call = Call(claims, outcomes)
    demand.sent(call)
    return call


def idle_demand() -> Demand:
    demand = make_demand()
    demand.replied(send(demand), 0, now=0.0)
    return demand


# The transitions


def test_a_new_demand_wants_a_claim_for_all_slots():
    demand = make_demand()

    assert demand.state is WANTED
    assert demand.claimable(running=0) == 4


def test_a_wake_up_makes_an_idle_demand_wanted():
    demand = idle_demand()
    demand.wake_up()

    assert demand.state is WANTED


def test_a_wake_up_makes_a_claimed_demand_wanted():
    demand = make_demand()
    send(demand)
    demand.wake_up()

    assert demand.state is WANTED


def test_a_wake_up_leaves_a_wanted_demand_wanted():
    demand = make_demand()
    demand.wake_up()

    assert demand.state is WANTED


def test_a_claim_that_is_sent_makes_a_wanted_demand_claimed():
    demand = make_demand()
    send(demand)

    assert demand.state is CLAIMED


def test_a_call_that_only_records_changes_nothing():
    demand = make_demand()
    call = send(demand, claims=0, outcomes=2)
    before_reply = demand.state
    demand.replied(call, 0, now=1.0)

    assert (before_reply, demand.state) == (WANTED, WANTED)


def test_a_claim_of_an_idle_demand_leaves_it_idle_whatever_the_reply():
    demand = idle_demand()
    states = []
    for claimed in (4, 3, 0):
        call = send(demand)
        states.append(demand.state)
        demand.replied(call, claimed, now=1.0)
        states.append(demand.state)

    assert set(states) == {IDLE}


def test_a_full_reply_makes_a_claimed_demand_wanted():
    demand = make_demand()
    demand.replied(send(demand), 4, now=0.0)

    assert demand.state is WANTED


@pytest.mark.parametrize("claimed", [0, 3])
def test_a_short_or_empty_reply_without_a_wake_up_since_makes_it_idle(claimed):
    demand = make_demand()
    demand.wake_up()
    demand.replied(send(demand), claimed, now=0.0)

    assert demand.state is IDLE
    assert demand.claimable(running=0) == 0


@pytest.mark.parametrize("claimed", [0, 3, 4])
def test_a_reply_after_a_wake_up_leaves_the_demand_wanted(claimed):
    demand = make_demand()
    call = send(demand)
    demand.wake_up()
    demand.replied(call, claimed, now=0.0)

    assert demand.state is WANTED


def test_a_short_reply_leaves_it_claimed_when_a_later_claim_serves_the_wake_up():
    demand = make_demand(concurrency=8)
    demand.replied(send(demand), 4, now=0.0)
    first = send(demand)
    demand.wake_up()
    send(demand)
    demand.replied(first, 0, now=0.0)

    assert demand.state is CLAIMED


def test_a_full_reply_after_a_short_one_leaves_it_idle():
    """The storage sends a wake-up for tasks that became due between the two claims."""
    demand = make_demand(concurrency=8)
    demand.replied(send(demand), 4, now=0.0)
    first, second = send(demand), send(demand)
    demand.replied(first, 0, now=0.0)
    demand.replied(second, 4, now=0.0)

    assert demand.state is IDLE


def test_a_short_reply_after_a_full_one_makes_it_idle():
    demand = make_demand(concurrency=8)
    demand.replied(send(demand), 4, now=0.0)
    first, second = send(demand), send(demand)
    demand.replied(first, 4, now=0.0)
    demand.replied(second, 3, now=0.0)

    assert demand.state is IDLE


def test_a_failed_claim_leaves_it_claimed_and_frees_its_slots():
    demand = make_demand()
    call = send(demand)
    demand.failed(call)

    assert demand.state is CLAIMED
    assert demand.claimable(running=0) == 4


@pytest.mark.parametrize("demand", [make_demand(), idle_demand()])
def test_nothing_is_claimed_while_paused(demand):
    demand.pause()
    demand.wake_up()

    assert demand.claimable(running=0, even_if_idle=True) == 0


def test_a_resumed_worker_claims_again():
    demand = idle_demand()
    demand.pause()
    demand.resume()

    assert demand.state is WANTED
    assert demand.claimable(running=0) == 4


def test_resuming_a_worker_that_was_not_paused_changes_nothing():
    demand = idle_demand()
    demand.resume()

    assert demand.state is IDLE


# How many


def test_running_tasks_and_calls_in_flight_occupy_slots():
    demand = make_demand(concurrency=10, most_per_call=10)
    send(demand, claims=0, outcomes=3)

    assert demand.claimable(running=2) == 5


def test_a_call_occupies_what_it_records_or_what_it_claims_whichever_is_more():
    assert Call(claims=2, outcomes=5).slots == 5
    assert Call(claims=5, outcomes=2).slots == 5


def test_a_freed_slot_can_be_claimed():
    demand = make_demand()

    assert [demand.claimable(running=running) for running in (4, 3, 0)] == [0, 1, 4]


def test_no_call_claims_more_than_its_part():
    demand = make_demand(concurrency=10, most_per_call=6)

    assert demand.claimable(running=0) == 6


def test_one_claim_is_in_flight_until_a_full_reply():
    demand = make_demand(concurrency=8)
    first = send(demand)
    after_short_or_no_reply = demand.claimable(running=0)
    demand.replied(first, 4, now=0.0)
    send(demand, claims=2)

    assert after_short_or_no_reply == 0
    assert demand.claimable(running=4) == 2


def test_a_caller_that_must_know_whether_the_queue_is_empty_may_claim_when_idle():
    assert idle_demand().claimable(running=1, even_if_idle=True) == 3


# Polling


def test_a_poll_is_due_at_once_and_then_an_interval_after_the_last_reply():
    demand = make_demand()
    at_start = demand.until_poll(now=0.0)
    demand.replied(send(demand), 0, now=5.0)

    assert at_start <= 0
    assert demand.until_poll(now=5.25) == 0.75
    assert demand.until_poll(now=7.0) == -1.0


def test_a_reply_without_a_claim_does_not_postpone_the_poll():
    demand = make_demand()
    demand.replied(send(demand), 0, now=5.0)
    demand.replied(send(demand, claims=0, outcomes=1), 0, now=5.5)

    assert demand.until_poll(now=6.0) == 0.0


def test_immediate_wake_ups_that_bring_no_task_are_slowed_down():
    demand = idle_demand()
    pauses = [demand.pause_before_wakeup(waited=0.0) for _ in range(5)]
    after_a_wait = demand.pause_before_wakeup(waited=0.5)

    assert [pause > 0 for pause in pauses] == [False, False, False, True, True]
    assert after_a_wait == 0.0
    assert demand.pause_before_wakeup(waited=0.0) == 0.0


def test_immediate_wake_ups_that_bring_tasks_are_not_slowed_down():
    demand = make_demand()
    demand.replied(send(demand), 4, now=0.0)

    assert not any(demand.pause_before_wakeup(waited=0.0) for _ in range(10))


# Any order of events


class AnyOrder(RuleBasedStateMachine):
    """Two loops, a storage that answers when it likes, wake-ups at any time, pauses, failures."""

    def __init__(self) -> None:
        super().__init__()
        self.demand = make_demand(concurrency=6, most_per_call=3)
        self.running = 0
        self.calls: list[Call] = []
        self.backing_off = 0
        self.is_unserved = True
        """Whether no claim was sent since the last wake-up."""

    @rule()
    def wake_up(self) -> None:
        self.demand.wake_up()
        self.is_unserved = True

    @precondition(lambda self: len(self.calls) < 2)
    @rule(outcomes=st.integers(0, 3))
    def send(self, outcomes: int) -> None:
        outcomes = min(outcomes, self.running)
        self.running -= outcomes
        claims = self.demand.claimable(self.running)
        if outcomes or claims:
            self.calls.append(send(self.demand, claims, outcomes))
            self.is_unserved = self.is_unserved and not claims

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def reply(self, data: st.DataObject) -> None:
        call = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        claimed = data.draw(st.integers(0, call.claims))
        self.demand.replied(call, claimed, now=0.0)
        self.running += claimed

    @precondition(lambda self: self.calls)
    @rule()
    def fail(self) -> None:
        self.demand.failed(self.calls.pop())
        self.backing_off += 1

    @precondition(lambda self: self.backing_off)
    @rule()
    def end_back_off(self) -> None:
        self.backing_off -= 1
        self.wake_up()

    @rule()
    def pause(self) -> None:
        self.demand.pause()

    @rule()
    def resume(self) -> None:
        self.is_unserved = self.is_unserved or self.demand.is_paused
        self.demand.resume()

    @invariant()
    def a_wake_up_without_a_claim_since_is_remembered(self) -> None:
        assert self.demand.is_wanted or not self.is_unserved

    @invariant()
    def a_wake_up_leads_to_another_claim_once_a_slot_is_free(self) -> None:
        """Whatever the calls in flight reply, and whenever they do."""
        if not self.is_unserved or self.demand.is_paused or self.calls:
            return
        assert self.demand.claimable(running=0) > 0

    @invariant()
    def no_more_slots_are_used_than_there_are(self) -> None:
        assert self.running + sum(call.slots for call in self.calls) <= 6

    @invariant()
    def nothing_is_claimed_when_idle(self) -> None:
        assert not self.demand.is_idle or self.demand.claimable(self.running) == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(
    replies=st.lists(st.integers(0, 3), min_size=2, max_size=2),
    first_is_answered_first=st.booleans(),
    position=st.integers(0, 2),
)
def test_a_wake_up_at_any_time_after_a_claim_was_sent_leads_to_another_claim(
    replies: list[int], first_is_answered_first: bool, position: int
) -> None:
    demand = make_demand(concurrency=6, most_per_call=3)
    demand.replied(send(demand, claims=3), 3, now=0.0)
    calls = [send(demand, claims=3), send(demand, claims=3)]
    order = calls if first_is_answered_first else calls[::-1]
    for step, (call, claimed) in enumerate(zip(order, replies, strict=True)):
        if step == position:
            demand.wake_up()
        demand.replied(call, claimed, now=0.0)
    if position == 2:
        demand.wake_up()

    assert demand.claimable(running=0) == 3
