"""Thousands of rows with absurd values beside good tasks, on every kind of storage: see `fuzz_rows`."""

from __future__ import annotations

import pytest

from tests.security.fuzz_rows import fuzz_rows


@pytest.mark.deep_on("file")
@pytest.mark.slow
@pytest.mark.security("S39")
@pytest.mark.timeout(120)
async def test_rows_with_one_absurd_value_each_stop_nothing(store_url):
    made, broken = await fuzz_rows(store_url, 200, seed=1)

    assert made >= 200
    assert broken == []


@pytest.mark.deep
@pytest.mark.security("S39")
@pytest.mark.timeout(900)
async def test_20000_rows_with_one_absurd_value_each_stop_nothing(store_url):
    made, broken = await fuzz_rows(store_url, 20_000, seed=3)

    assert made >= 20_000
    assert broken == []
