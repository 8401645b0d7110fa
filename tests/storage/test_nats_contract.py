"""The NATS backend fulfils the whole contract, in the process that is the host and in all others."""

from __future__ import annotations

from functools import partial

import pytest

from omniq.storage import open_storage
from omniq.testing.contract import StorageContract, opener
from tests.storage.rate_wakeups import RateWakeupTests


def make(url, clock, max_pending=None, **options):
    bound = "" if max_pending is None else f"&max_pending={max_pending}"
    return open_storage(url + bound, clock=clock, **options)


@pytest.mark.deep
class TestNats(RateWakeupTests, StorageContract):
    """The first storage of a test is the host, the others call it."""

    @pytest.fixture
    async def open_another(self, clock, nats_url):
        async with opener(partial(make, f"{nats_url}?host=auto", clock)) as open_another:
            yield open_another


class TestNatsThroughAHost(RateWakeupTests, StorageContract):
    """Each storage calls a host that does nothing else."""

    @pytest.fixture
    async def open_another(self, clock, nats_url):
        async with (
            make(f"{nats_url}?host=only", clock),
            opener(partial(make, f"{nats_url}?host=never", clock)) as open_another,
        ):
            yield open_another
