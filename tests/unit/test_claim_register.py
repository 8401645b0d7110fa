"""The register of an owner's claims, compared with what its store says at each renewal."""

from __future__ import annotations

import pytest

from omniq.models import Task
from omniq.outcomes import Released
from omniq.storage.claim_register import Claim, ClaimRegister, Differences, Hand
from omniq.storage.types import Identity
from omniq.testing.builders import a_task

NOTHING = Differences()


class Pool:
    """A holder of claims, whose hands a test fills."""

    def __init__(self) -> None:
        self.held: dict[Claim, Hand] = {}

    def hands(self) -> dict[Claim, Hand]:
        return self.held


def claimed(task_id: str, token: int = 1) -> Task:
    return a_task(task_id, token=token)


@pytest.fixture
def identity() -> Identity:
    identity = Identity()
    identity.start("me", 0)
    return identity


@pytest.fixture
def register(identity: Identity) -> ClaimRegister:
    register = ClaimRegister(identity)
    assert register.claims == {}
    return register


@pytest.fixture
def pool(register: ClaimRegister) -> Pool:
    """A pool that runs task `a`."""
    pool = Pool()
    register.add([claimed("a")], "")
    register.pass_to(pool, [claimed("a")])
    pool.held["a", 1] = "run"
    return pool


def compare(register: ClaimRegister, **held: int) -> Differences:
    return register.compare(held, register.tick())


def test_what_is_in_a_hand_and_held_does_not_differ(register, pool):
    register.add([claimed("b")], "")

    for hand in ("run", "outcome"):
        pool.held["a", 1] = hand
        assert compare(register, a=1, b=1) == NOTHING
        assert compare(register, a=1, b=1) == NOTHING


def test_a_claim_that_nothing_here_has_is_unknown_at_the_second_renewal(register):
    assert compare(register, a=1) == NOTHING
    assert compare(register, a=1) == Differences(unknown=[("a", 1)])


def test_a_claim_that_its_pool_has_dropped_is_unknown(register, pool):
    pool.held.clear()

    assert compare(register, a=1) == NOTHING
    assert compare(register, a=1) == Differences(unknown=[("a", 1)])


def test_a_claim_of_a_pool_that_has_ended_is_unknown(register, pool):
    register.drop_all_of(pool)
    compare(register, a=1)

    assert compare(register, a=1) == Differences(unknown=[("a", 1)])


def test_a_claim_of_a_direct_verb_is_never_unknown(register):
    register.add([claimed("a")], "")
    compare(register, a=1)

    assert compare(register, a=1) == NOTHING


def test_a_claim_under_another_token_is_unknown(register, pool):
    pool.held.clear()
    compare(register, a=7)

    assert compare(register, a=7) == Differences(unknown=[("a", 7)])


def test_a_difference_that_ends_in_between_starts_again(register):
    compare(register, a=1)
    compare(register)

    assert compare(register, a=1) == NOTHING
    assert compare(register, a=1) == Differences(unknown=[("a", 1)])


def test_while_a_call_claims_that_was_under_way_at_the_first_renewal_nothing_is_unknown(register):
    with register.claiming():
        compare(register, a=1)
        assert compare(register, a=1) == NOTHING
        assert compare(register, a=1) == NOTHING

    assert compare(register, a=1) == Differences(unknown=[("a", 1)])


def test_a_call_that_began_after_the_first_renewal_delays_nothing(register):
    compare(register, a=1)
    with register.claiming():
        assert compare(register, a=1) == Differences(unknown=[("a", 1)])


def test_two_renewals_that_overlap_count_as_one(register):
    asked_at = register.tick()
    assert compare(register, a=1) == NOTHING

    assert register.compare({"a": 1}, asked_at) == NOTHING
    assert compare(register, a=1) == Differences(unknown=[("a", 1)])


def test_an_adopted_claim_is_in_a_hand(register, pool):
    compare(register, a=1, b=2)
    register.adopt(pool, compare(register, a=1, b=2).unknown)
    pool.held["b", 2] = "outcome"

    assert compare(register, a=1, b=2) == NOTHING
    assert compare(register, a=1, b=2) == NOTHING
    # No verb can record an outcome of it.
    assert register.task("b") is None


def test_a_run_that_the_store_does_not_hold_is_lost_at_the_second_renewal(register, pool):
    assert compare(register) == NOTHING
    assert compare(register) == Differences(lost=[("a", 1)])


def test_only_a_run_can_be_lost(register, pool):
    pool.held["a", 1] = "outcome"
    register.add([claimed("b")], "")
    compare(register)

    assert compare(register) == NOTHING


def test_a_run_that_was_claimed_after_the_renewal_was_asked_for_is_not_lost(register, pool):
    asked_at = [register.tick(), register.tick()]
    register.add([claimed("b")], "")
    register.pass_to(pool, [claimed("b")])
    pool.held["b", 1] = "run"

    assert register.compare({"a": 1}, asked_at[0]) == NOTHING
    assert register.compare({"a": 1}, asked_at[1]) == NOTHING


def test_a_run_whose_transaction_has_recorded_it_is_not_lost(register, pool):
    with register.in_transaction("a", 1):
        compare(register)
        assert compare(register) == NOTHING

    assert register.is_completed("a", 1)
    assert compare(register) == NOTHING
    register.drop_completed(Released("a", 1))
    assert register.claims == {}


def test_a_transaction_that_fails_completes_nothing(register, pool):
    with pytest.raises(ValueError, match="no"), register.in_transaction("a", 1):
        raise ValueError("no")

    assert not register.is_completed("a", 1)
    compare(register)
    assert compare(register) == Differences(lost=[("a", 1)])


def test_a_new_owner_has_no_claims_and_ignores_renewals_of_the_old_one(identity, register, pool):
    asked_at = register.tick()
    identity.replace("me", "me again", 0)

    assert register.claims == {}
    assert register.compare({"a": 1}, asked_at) == NOTHING
    assert compare(register, a=1) == NOTHING


def test_a_pool_is_alone_with_its_claims_until_a_verb_claims(register, pool):
    assert not register.has_others(pool)
    register.add([claimed("b")], "")

    assert register.has_others(pool)


def test_a_renewal_that_a_later_one_has_overtaken_says_nothing(register, pool):
    asked_at = register.tick()
    assert compare(register, a=1, gone=1) == NOTHING

    assert register.compare({"a": 1, "gone": 1}, asked_at) == NOTHING


def test_a_claim_that_was_made_again_meanwhile_is_not_released(register, pool):
    assert compare(register) == NOTHING
    asked_at = register.tick()
    register.drop([Released("a", 1)])
    register.add([claimed("a", 2)], "")
    register.pass_to(pool, [claimed("a", 2)])
    pool.held["a", 2] = "run"

    assert register.compare({"a": 1}, asked_at) == NOTHING
    register.adopt(pool, [("a", 1)])
    assert register.claims == {"a": 2}


def test_a_claim_that_differs_first_in_one_way_and_then_in_another_is_seen_once_in_each(register):
    pool = Pool()
    register.add([claimed("a")], "")
    register.pass_to(pool, [claimed("a")])
    pool.held["a", 1] = "run"
    assert compare(register) == NOTHING, "lost for the first time"
    register.drop([Released("a", 1)])
    pool.held.clear()

    assert compare(register, a=1) == NOTHING, "unknown for the first time"
    assert compare(register, a=1).unknown == [("a", 1)]
