"""Retries are spaced out by pure rules that no number of attempts can break."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniq.errors import InvalidTask
from omniq.retry import (
    LONGEST_DELAY,
    Backoff,
    ExponentialBackoff,
    LinearBackoff,
    ListedDelays,
    may_retry,
    next_delay,
    policy_from_text,
    policy_text,
    retry_delay,
)

attempts = st.integers(min_value=0, max_value=2**70)
draws = st.floats(min_value=0, max_value=1, exclude_max=True)
seconds = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
fractions = st.floats(min_value=0, max_value=1)
caps = st.none() | seconds
backoffs = st.builds(ExponentialBackoff, base=seconds, jitter=fractions, cap=caps) | st.builds(
    LinearBackoff, step=seconds, cap=caps
)


def test_the_first_retry_waits_the_base_and_each_later_one_twice_as_long():
    assert [retry_delay(n, base=3.0) for n in range(4)] == [3.0, 6.0, 12.0, 24.0]


def test_listed_delays_are_waited_in_their_order_and_the_last_one_again():
    listed = ListedDelays((5.0, 0.0, 7.5))

    assert [listed.delay(attempts, 0.9) for attempts in range(5)] == [5.0, 0.0, 7.5, 7.5, 7.5]
    assert next_delay(listed, 0, 30.0, 0.9) == 30.0
    assert ListedDelays((1e300,)).delay(0, 0.0) == LONGEST_DELAY


@pytest.mark.parametrize("stored", [-1.0, math.nan, -math.inf])
def test_a_stored_delay_that_is_none_is_no_delay(stored):
    assert ListedDelays((stored,)).delay(0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("10", (10.0,)),
        ("10s, 1.5m ,2h", (10.0, 90.0, 7200.0)),
        ("linear(step=5)", LinearBackoff(5.0)),
        (" linear ( step = 500ms , cap = 1d ) ", LinearBackoff(0.5, 86_400.0)),
        ("exponential()", ExponentialBackoff()),
        ("exponential(base=2s, jitter=0, cap=10m)", ExponentialBackoff(2.0, 0.0, 600.0)),
        ("0.00001", (0.00001,)),
    ],
)
def test_a_policy_is_read_from_text_and_written_as_text(text, policy):
    assert policy_from_text(text) == policy
    assert policy_from_text(policy_text(policy)) == policy


@pytest.mark.parametrize(
    "text",
    ["", "soon", "1,,2", "-1", "5 years", "linear()", "linear(5)", "linear(step=-1)", "cubic(a=1)"],
)
def test_other_text_is_no_policy(text):
    with pytest.raises(ValueError, match=r"expected|argument"):
        policy_from_text(text)


def test_linear_backoff_waits_one_step_more_each_time():
    assert [LinearBackoff(step=2.0).delay(n, 0.9) for n in range(3)] == [2.0, 4.0, 6.0]


@given(st.integers(min_value=0, max_value=20), draws)
def test_the_default_jitter_adds_at_most_a_tenth(n, draw):
    delay = ExponentialBackoff().delay(n, draw)

    assert 2**n <= delay <= 1.1 * 2**n


@given(backoffs, attempts, draws)
def test_every_delay_is_a_finite_number_within_ten_years_and_the_cap(backoff, n, draw):
    delay = backoff.delay(n, draw)

    assert type(delay) is float
    assert 0 <= delay <= LONGEST_DELAY
    assert backoff.cap is None or delay <= backoff.cap


@given(backoffs, attempts)
def test_delays_never_shrink_with_more_attempts(backoff, n):
    assert backoff.delay(n, 0.0) <= backoff.delay(n + 1, 0.0)


def test_the_largest_base_does_not_overflow_into_no_delay_at_all():
    assert ExponentialBackoff(base=1e300, jitter=0.0).delay(2**70, 0.0) == LONGEST_DELAY


@given(st.integers(min_value=0, max_value=50))
def test_a_task_runs_max_retries_plus_one_times(max_retries):
    failures = 0
    while may_retry(failures, max_retries):
        failures += 1

    assert failures + 1 == max_retries + 1


def test_retry_after_of_the_error_is_a_lower_bound():
    assert next_delay(ExponentialBackoff(), 0, 5.0, 0.0) == 5.0
    assert next_delay(ExponentialBackoff(), 4, 5.0, 0.0) == 16.0


@pytest.mark.parametrize("nonsense", [None, -1.0, math.nan])
def test_an_invalid_retry_after_is_ignored(nonsense):
    assert next_delay(ExponentialBackoff(), 1, nonsense, 0.0) == 2.0


def test_retry_after_is_at_most_ten_years():
    assert next_delay(ExponentialBackoff(), 0, math.inf, 0.0) == LONGEST_DELAY


@given(backoffs)
def test_a_backoff_can_be_encoded_and_decoded(backoff):
    data = msgspec.msgpack.encode(backoff)

    assert msgspec.msgpack.decode(data, type=Backoff) == backoff


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, True, "1"])
def test_invalid_backoff_durations_are_refused(bad):
    with pytest.raises(InvalidTask, match="base"):
        ExponentialBackoff(base=bad)
    with pytest.raises(InvalidTask, match="step"):
        LinearBackoff(step=bad)
    with pytest.raises(InvalidTask, match="cap"):
        LinearBackoff(step=1, cap=bad)


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan, "much"])
def test_a_jitter_that_is_not_a_fraction_is_refused(bad):
    with pytest.raises(InvalidTask, match="jitter"):
        ExponentialBackoff(jitter=bad)


def test_an_invalid_stored_backoff_is_not_decoded():
    with pytest.raises(msgspec.ValidationError, match="step"):
        msgspec.json.decode(b'{"type": "linear", "step": -1}', type=Backoff)
