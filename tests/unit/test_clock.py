"""Instants are exact numbers, ids sort by time, and the manual clock moves only when the test moves it."""

from __future__ import annotations

import asyncio
import os
import threading
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniq.clock import (
    SYSTEM_CLOCK,
    SystemClock,
    encode_id,
    from_micros,
    seconds_to_micros,
    to_micros,
)
from omniq.models import check_id
from omniq.testing.clock import START, ManualClock


@given(st.datetimes(timezones=st.just(UTC)))
@pytest.mark.fault("F88")
def test_an_instant_survives_as_microseconds_exactly(instant):
    assert from_micros(to_micros(instant)) == instant


@given(st.floats(min_value=0, max_value=1e9))
def test_seconds_become_whole_microseconds(seconds):
    assert abs(seconds_to_micros(seconds) - seconds * 1e6) <= 0.5


@given(
    st.tuples(st.integers(0, 2**48 - 1), st.integers(0, 2**80 - 1)),
    st.tuples(st.integers(0, 2**48 - 1), st.integers(0, 2**80 - 1)),
)
def test_ids_sort_by_time_and_then_by_number(first, second):
    assert (encode_id(*first) < encode_id(*second)) == (first < second)
    assert len(encode_id(*first)) == 26


def test_ids_are_unique_sorted_and_valid_task_ids():
    clock = SystemClock()
    ids = [clock.new_id() for _ in range(5_000)]

    assert ids == sorted(set(ids))
    check_id(ids[0])


def test_ids_are_unique_across_threads():
    clock = SystemClock()
    made: list[str] = []
    threads = [
        threading.Thread(target=lambda: made.extend([clock.new_id() for _ in range(500)]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(made)) == 2_000


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_ids_of_a_forked_child_are_not_those_of_its_parent():
    clock = SystemClock()
    clock.new_id()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, "\n".join(clock.new_id() for _ in range(50)).encode())
        os._exit(0)
    os.close(writer)
    mine = {clock.new_id() for _ in range(50)}
    with os.fdopen(reader) as pipe:
        theirs = set(pipe.read().split())
    os.waitpid(child, 0)

    assert len(theirs) == 50
    assert not mine & theirs


def test_the_system_clocks_methods_agree():
    assert abs(to_micros(SYSTEM_CLOCK.now()) - SYSTEM_CLOCK.micros()) < 10_000_000
    assert SYSTEM_CLOCK.boot_micros() <= SYSTEM_CLOCK.boot_micros()
    assert SYSTEM_CLOCK.monotonic() <= SYSTEM_CLOCK.monotonic()
    assert SYSTEM_CLOCK.boot_id() == SystemClock().boot_id() != ""
    assert 0 <= SYSTEM_CLOCK.random() < 1


async def test_a_wait_ends_with_its_future_or_its_time_and_cancels_nothing():
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    assert not await SYSTEM_CLOCK.wait(future, 0)
    assert not future.cancelled()
    future.set_result(None)
    assert await SYSTEM_CLOCK.wait(future, None)
    await SYSTEM_CLOCK.sleep(0)


def test_the_manual_clock_stands_still_until_it_is_moved():
    clock = ManualClock()
    before = clock.now(), clock.micros(), clock.boot_micros(), clock.monotonic()

    assert before == (clock.now(), clock.micros(), clock.boot_micros(), clock.monotonic())
    clock.advance(1.5)
    clock.advance(timedelta(seconds=0.5))
    assert clock.now() == START + timedelta(seconds=2)
    assert clock.boot_micros() == before[2] + 2_000_000


def test_a_jump_moves_only_the_wall_clock_and_a_reboot_changes_the_boot_id():
    clock = ManualClock()
    boot, boot_id = clock.boot_micros(), clock.boot_id()
    clock.jump(timedelta(days=-1))

    assert (clock.now(), clock.boot_micros()) == (START - timedelta(days=1), boot)
    clock.reboot()
    assert clock.boot_id() != boot_id


def test_the_same_seed_draws_the_same_numbers_and_ids():
    first, second, other = ManualClock(seed=1), ManualClock(seed=1), ManualClock(seed=2)

    assert [first.random(), first.new_id()] == [second.random(), second.new_id()]
    assert first.random() != other.random()
    assert datetime.fromisoformat("2026-01-01T12:00:00+00:00") == START


async def test_sleepers_wake_in_the_order_of_their_deadlines():
    clock, woken = ManualClock(), []

    async def sleep(seconds):
        await clock.sleep(seconds)
        woken.append(seconds)

    sleepers = [asyncio.create_task(sleep(seconds)) for seconds in (3, 1, 2, 9)]
    await asyncio.sleep(0)
    clock.advance(3)
    await asyncio.gather(*sleepers[:3])

    assert woken == [1, 2, 3]
    assert not sleepers[3].done()
    clock.advance(6)
    await sleepers[3]


async def test_a_manual_wait_ends_with_its_future_or_when_the_clock_is_moved():
    clock = ManualClock()
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiter = asyncio.create_task(clock.wait(future, 5))
    await asyncio.sleep(0)
    clock.advance(5)

    assert not await waiter
    waiter = asyncio.create_task(clock.wait(future, 5))
    await asyncio.sleep(0)
    future.set_result(None)
    assert await waiter
