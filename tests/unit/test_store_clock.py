"""The time of a store is known from its replies, whatever this machine's wall clock says."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omniq.storage.store_clock import StoreClock, is_stale
from omniq.testing.clock import ManualClock

HOUR = 3_600_000_000


def test_before_the_first_reply_it_is_the_clock_of_this_machine() -> None:
    clock = ManualClock()

    assert StoreClock(clock).micros() == clock.micros()


def test_it_is_the_time_of_the_store_and_goes_on_with_the_boot_clock() -> None:
    clock = ManualClock()
    store = StoreClock(clock)
    there = clock.micros() + HOUR
    store.observe(there, sent_at=clock.boot_micros())
    clock.advance(timedelta(seconds=5))

    assert store.micros() == there + 5_000_000
    assert store.now() == clock.now() + timedelta(hours=1)


def test_a_slow_reply_does_not_change_a_time_that_may_be_right() -> None:
    clock = ManualClock()
    store = StoreClock(clock)
    store.observe(clock.micros(), sent_at=clock.boot_micros())
    sent_at, there = clock.boot_micros(), clock.micros()
    clock.advance(timedelta(seconds=2))
    store.observe(there, sent_at=sent_at)

    assert store.micros() == clock.micros()


def test_it_is_never_ahead_of_the_store() -> None:
    clock = ManualClock()
    store = StoreClock(clock)
    sent_at = clock.boot_micros()
    clock.advance(timedelta(seconds=2))
    store.observe(clock.micros(), sent_at=sent_at)
    assert store.micros() == clock.micros(), "the store may have read its clock just now"
    store.observe(clock.micros() - 1, sent_at=clock.boot_micros())

    assert store.micros() == clock.micros() - 1


def test_replies_together_say_more_than_each_of_them() -> None:
    clock = ManualClock()
    store = StoreClock(clock)
    sent_at = clock.boot_micros()
    clock.advance(timedelta(seconds=2))
    store.observe(clock.micros() - 1_000_000, sent_at=sent_at)
    assert store.is_rough()
    store.observe(clock.micros(), sent_at=clock.boot_micros() - 1_000)

    assert store.micros() == clock.micros()
    assert not store.is_rough()


def test_a_clock_of_the_store_that_was_set_is_followed() -> None:
    clock = ManualClock()
    store = StoreClock(clock)
    store.observe(clock.micros(), sent_at=clock.boot_micros())
    store.observe(clock.micros() - HOUR, sent_at=clock.boot_micros())

    assert store.micros() == clock.micros() - HOUR


def test_an_observation_is_stale_after_a_minute() -> None:
    clock = ManualClock()
    store = StoreClock(clock)
    assert is_stale(store)
    store.observe(clock.micros(), sent_at=clock.boot_micros())
    clock.advance(timedelta(seconds=60))
    assert not is_stale(store)
    clock.advance(timedelta(seconds=1))

    assert is_stale(store)
    assert not is_stale(clock), "a clock that the storage was given is always right"


@pytest.mark.parametrize("micros", [-1, 0, 7, 10**15, 10**17])
def test_a_time_of_no_clock_is_refused_and_not_used(micros):
    """A reply of another shape may begin with any number: with a time in 1970, what ends now had expired."""
    clock = StoreClock(ManualClock())
    before = clock.micros()
    with pytest.raises(ValueError, match="impossible time"):
        clock.observe(micros, sent_at=clock.boot_micros())

    assert clock.micros() == before
