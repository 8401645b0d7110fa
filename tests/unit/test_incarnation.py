"""Epochs and the tokens that follow from them."""

from __future__ import annotations

from typing import get_args

from omniq.storage.incarnation import StoreRecord, raised
from omniq.storage.row_rules import Instant, first_token


def test_each_epoch_is_above_the_clock_and_above_what_its_owner_has_met():
    second = 1_000_000

    assert raised(StoreRecord("s"), 0, 50 * second).epoch == 51
    assert raised(StoreRecord("s"), 70, 50 * second).epoch == 71
    assert raised(StoreRecord("s", epoch=90), 70, 50 * second).epoch == 91


def test_a_clock_that_is_centuries_ahead_leaves_numbers_for_tokens():
    record, latest = StoreRecord("s"), get_args(Instant)[1].le
    for _ in range(3):
        before, record = record, raised(record, 0, latest)
        assert record.epoch > before.epoch

    assert first_token(record.epoch + 1) < 2**53
