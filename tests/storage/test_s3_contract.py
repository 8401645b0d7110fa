"""The S3 backend fulfils the whole contract."""

from __future__ import annotations

import pytest

from omniq.storage import open_storage
from omniq.testing.contract import StorageContract, opener
from tests.storage.rate_wakeups import RateWakeupTests


class TestS3(RateWakeupTests, StorageContract):
    @pytest.fixture
    async def open_another(self, clock, s3_url):
        def make(max_pending=None, **options):
            bound = "" if max_pending is None else f"&max_pending={max_pending}"
            return open_storage(s3_url + bound, clock=clock, **options)

        async with opener(make) as open_another:
            yield open_another
