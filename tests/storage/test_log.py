"""The log backend fulfils the whole contract, also on a log that fails."""

from __future__ import annotations

from functools import partial

import pytest

from omniq.testing.contract import StorageContract, opener
from tests.storage.memory_log import Records, log_storage
from tests.storage.rate_wakeups import RateWakeupTests


class TestLog(RateWakeupTests, StorageContract):
    @pytest.fixture
    async def open_another(self, clock):
        async with opener(partial(log_storage, Records(), clock)) as open_another:
            yield open_another


@pytest.mark.deep
class TestLogWithFaults(StorageContract):
    """Others commit first, and replies and requests are lost."""

    @pytest.fixture
    async def open_another(self, clock):
        make = partial(log_storage, Records(), clock, faults=0.5, snapshot_bytes=2_000)
        async with opener(make) as open_another:
            yield open_another


@pytest.mark.deep
class TestLogOfSnapshots(StorageContract):
    """Each commit is at once replaced by a snapshot, so that every other process must load it."""

    @pytest.fixture
    async def open_another(self, clock):
        make = partial(log_storage, Records(kept=0), clock, snapshot_bytes=1)
        async with opener(make) as open_another:
            yield open_another
