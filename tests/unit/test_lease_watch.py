"""When an owner has lost its lease, as one pool sees it."""

from __future__ import annotations

import pytest

from omniq.storage.backend import Lease
from omniq.testing.clock import ManualClock
from omniq.worker import lease_watch
from omniq.worker.lease_watch import LeaseWatch

LEASE = 10.0
SECOND = 1_000_000


class Watched:
    """A watch, and the time that passes."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.outcomes = 0
        self.watch = LeaseWatch(self.clock, LEASE, lambda: self.outcomes > 0)
        self.watch.owner = "me"

    def after(self, seconds: float, *, heard: bool = True) -> None:
        """Let time pass, with an answer every second if the store is `heard`."""
        for _ in range(int(seconds)):
            self.clock.advance(1)
            if heard:
                self.watch.answered(is_renewal=True)

    def has_ended(self, owner: str = "other", *, is_live: bool = False, **facts: int) -> bool:
        return self.watch.why_ended(Lease(owner, None, is_live, **facts)) is not None


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_without_a_gap_the_clock_of_the_store_decides(watched):
    assert watched.has_ended()
    assert not watched.has_ended(is_live=True)
    watched.after(30)
    assert watched.has_ended()


def test_a_pool_never_takes_its_own_tasks(watched):
    assert not watched.has_ended("me")


@pytest.mark.parametrize(("silence", "is_gap"), [(5, False), (6, True)])
def test_a_silence_of_more_than_half_a_lease_is_a_gap(watched, silence, is_gap):
    watched.after(silence, heard=False)

    assert watched.has_ended() is not is_gap
    assert watched.watch.may_recover is not is_gap


def test_a_late_answer_to_the_recovery_itself_ends_a_gap(watched):
    watched.after(20, heard=False)

    assert not watched.has_ended()


def test_after_a_gap_an_owner_is_left_alone_for_one_lease(watched):
    watched.after(20, heard=False)
    assert not watched.has_ended()
    watched.after(10)
    assert not watched.has_ended()
    watched.after(1)
    assert watched.has_ended()


def test_an_owner_that_is_first_seen_late_after_a_gap_is_left_alone_for_one_lease(watched):
    watched.after(20, heard=False)
    watched.after(10)
    assert not watched.has_ended()
    watched.after(11)
    assert watched.has_ended()


def test_an_owner_whose_lease_ends_more_than_a_lease_after_a_gap_is_not_left_alone(watched):
    watched.after(20, heard=False)
    assert not watched.has_ended(is_live=True)
    watched.after(12)
    assert watched.has_ended()


def test_an_owner_is_left_alone_once_whatever_gaps_follow(watched):
    watched.after(20, heard=False)
    assert not watched.has_ended()
    watched.after(6, heard=False)
    assert not watched.has_ended()
    watched.after(6, heard=False)
    assert watched.has_ended()


def test_an_owner_that_has_renewed_is_left_alone_after_the_next_gap_too(watched):
    watched.after(20, heard=False)
    assert not watched.has_ended()
    watched.after(5)
    assert not watched.has_ended(is_live=True)
    watched.after(20, heard=False)
    assert not watched.has_ended()


def test_after_a_gap_a_pool_renews_and_records_before_it_takes_anything(watched):
    watched.outcomes = 1
    assert watched.watch.may_recover
    watched.after(20, heard=False)
    watched.watch.answered()
    assert not watched.watch.may_recover
    watched.watch.answered(is_renewal=True)
    assert not watched.watch.may_recover
    watched.outcomes = 0
    assert watched.watch.may_recover


def test_a_busy_pool_recovers_once_a_lease_whatever_gaps_follow(watched):
    """Its store takes more than half a lease for each answer, and outcomes wait all the time."""
    watched.outcomes = 1
    may_recover = []
    for _ in range(8):
        watched.after(6, heard=False)
        watched.watch.answered(is_renewal=True)
        may_recover.append(watched.watch.may_recover)

    assert may_recover == [False, False, True] * 2 + [False, False]


def test_the_memory_for_owners_is_bounded(watched, monkeypatch):
    monkeypatch.setattr(lease_watch, "_MOST_OWNERS", 3)
    for owner in range(10):
        watched.has_ended(str(owner), is_live=True, until=1, length=SECOND)

    assert len(watched.watch._renewals) <= 3


def test_a_first_connection_that_had_to_wait_is_a_gap(watched):
    watched.watch.had_to_wait()

    assert not watched.watch.may_recover
    assert not watched.has_ended()


def test_a_clock_of_the_store_that_jumps_ahead_is_a_gap(watched):
    now = watched.clock.boot_micros() + 500 * SECOND
    assert not watched.has_ended(is_live=True, store_now=now)
    watched.after(1)
    now += 3_600 * SECOND

    assert not watched.has_ended(store_now=now)
    assert not watched.has_ended("third", store_now=now)
    watched.after(11)
    assert watched.has_ended(store_now=now + 11 * SECOND)


@pytest.mark.parametrize(("jump", "is_gap"), [(5, False), (6, True)])
def test_a_jump_is_a_gap_if_it_ends_leases_that_are_renewed_in_time(watched, jump, is_gap):
    now = watched.clock.boot_micros()
    watched.has_ended(is_live=True, store_now=now)
    watched.after(1)

    assert watched.has_ended(store_now=now + (1 + jump) * SECOND) is not is_gap


def test_a_lease_that_is_not_renewed_for_its_length_has_ended_also_if_the_clock_went_back(watched):
    facts = {"until": 10**15, "length": 10 * SECOND, "is_live": True}
    for _ in range(11):
        assert not watched.has_ended(**facts)
        watched.after(1)

    assert watched.has_ended(**facts)
    assert not watched.has_ended(**facts | {"until": 10**15 + 1})


def test_what_nobody_could_renew_in_a_gap_is_not_overdue(watched):
    facts = {"until": 10**15, "length": 10 * SECOND, "is_live": True}
    assert not watched.has_ended(**facts)
    watched.after(30, heard=False)
    assert not watched.has_ended(**facts)
    watched.after(9)
    assert not watched.has_ended(**facts)
