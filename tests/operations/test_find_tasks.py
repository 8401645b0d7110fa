"""Finding tasks: a page that would take long is short, and its cursor continues the search."""

from __future__ import annotations

import pytest

from omniq.operations.find_tasks import TaskFilter, find_tasks
from omniq.storage import inspection
from omniq.testing.builders import a_task


@pytest.fixture
async def busy(storage, clock):
    """One task that matches, and then many that do not."""
    await storage.enqueue(a_task(clock.new_id(), queue="rare", metadata={"tenant": "rare"}))
    for _ in range(40):
        clock.advance(1)
        await storage.enqueue_many([a_task(clock.new_id()) for _ in range(50)])
    return storage


async def read_all_pages(storage, wanted):
    """Read all pages; return their tasks and the number of pages."""
    page = await find_tasks(storage, wanted, limit=10)
    found, pages = list(page.tasks), 1
    while page.cursor is not None:
        assert page.is_cut
        page = await find_tasks(storage, wanted, limit=10, cursor=page.cursor)
        found += page.tasks
        pages += 1
    return found, pages


async def test_a_page_that_would_take_long_is_short_and_has_a_cursor(busy):
    found, pages = await read_all_pages(busy, TaskFilter(metadata={"tenant": "rare"}))

    assert [task.queue for task in found] == ["rare"]
    assert pages == 2


async def test_filters_of_the_storage_find_one_task_among_thousands_on_one_page(busy):
    found, pages = await read_all_pages(busy, TaskFilter(queue="rare"))

    assert len(found) == 1
    assert pages == 1


async def test_a_full_page_is_not_cut(busy):
    page = await find_tasks(busy, TaskFilter(), limit=10)

    assert len(page.tasks) == 10
    assert not page.is_cut
    assert page.cursor is not None


def test_a_scan_reads_a_bounded_number_of_records():
    assert inspection.ScanQuery().max_scanned <= 10_000
