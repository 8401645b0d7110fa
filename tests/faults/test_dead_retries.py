"""Two operators who retry the same dead letter at the same time enqueue it once."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from omniq import TaskStatus
from omniq.storage import open_storage
from tests.faults.retry_together import create_dead_letters, retry_together
from tests.faults.shared_stores import SHARED, url_of


@pytest.fixture(params=SHARED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, tmp_path, request)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.deep)])
async def test_two_processes_that_retry_a_dead_letter_at_once_enqueue_it_once(url, rounds):
    ids = await create_dead_letters(url, rounds)
    retried = await asyncio.to_thread(retry_together, url, ids)

    winners = [sum(answers) for answers in zip(*retried, strict=True)]
    assert winners == [1] * rounds
    # Each process won some of them, so they did retry at the same time.
    assert min(map(sum, retried)) > 0
    async with open_storage(url) as storage:
        assert (await storage.stats()).dead == 0
        claimed: Counter[str] = Counter()
        while tasks := await storage.reserve(100):
            assert {(task.status, task.attempts) for task in tasks} == {(TaskStatus.RUNNING, 0)}
            claimed.update(task.id for task in tasks)
    assert claimed == Counter(ids)
