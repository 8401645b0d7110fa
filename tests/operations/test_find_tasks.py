"""Finding tasks: a page that would take long is short, and its cursor continues the search."""

from __future__ import annotations

import pytest

from omniq.errors import InvalidValue
from omniq.models import TaskError
from omniq.operations.find_tasks import find_tasks
from omniq.operations.search_query import TaskSearch, parse_search
from omniq.outcomes import Failed, Retried
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
    page = await find_tasks(storage, wanted, limit=10, patience=0)
    found, pages = list(page.tasks), 1
    while page.cursor is not None:
        assert page.is_cut
        page = await find_tasks(storage, wanted, limit=10, cursor=page.cursor, patience=0)
        found += page.tasks
        pages += 1
    return found, pages


async def test_a_page_that_would_take_long_is_short_and_has_a_cursor(busy):
    found, pages = await read_all_pages(busy, TaskSearch(metadata={"tenant": "rare"}))

    assert [task.queue for task in found] == ["rare"]
    assert pages == 3


async def test_filters_of_the_storage_find_one_task_among_thousands_on_one_page(busy):
    found, pages = await read_all_pages(busy, TaskSearch(queue="rare"))

    assert len(found) == 1
    assert pages == 1


async def test_a_full_page_is_not_cut(busy):
    page = await find_tasks(busy, TaskSearch(), limit=10)

    assert len(page.tasks) == 10
    assert not page.is_cut
    assert page.cursor is not None


@pytest.mark.parametrize(
    "text",
    [
        "fn:charge",
        "FN:Charge_Card",
        "queue:mail",
        "arg.order:17",
        "arg.0:eu",
        "arg.customer.name:Ada",
        "meta.tenant:acme",
        "type:billing",
        "id:mine",
        "status:pending",
        "since:1h until:2030-01-01",
        '"customer" charge 17',
        "fn:charge queue:mail arg.order:17 meta.tenant:acme",
    ],
)
async def test_a_search_finds_the_task_that_each_qualifier_describes(storage, clock, text):
    await storage.enqueue_many([a_task(f"x{number}") for number in range(5)])
    await storage.enqueue(
        a_task(
            "mine",
            func_path="shop.billing.charge_card",
            queue="mail",
            args=("eu",),
            kwargs={"order": 17, "customer": {"name": "Ada"}},
            metadata={"tenant": "acme"},
            task_type="billing",
        )
    )
    found = [task.id for task in (await search(storage, clock, text)).tasks]

    assert "mine" in found
    assert len(found) == 1 or text.startswith(("status:", "since:"))
    assert (await search(storage, clock, f"{text} fn:nothing")).tasks == ()


async def test_a_task_is_found_by_its_error_and_by_the_worker_that_ran_it(storage, worker, clock):
    other = await worker(concurrency=4)
    await storage.enqueue_many([a_task(name, max_retries=1) for name in "abcd"])
    claimed = {task.id: task for task in await other.reserve(3)}
    boom, other_error = TaskError("card 17 declined"), TaskError("no such mailbox")
    await other.record(
        [
            Failed("a", claimed["a"].token, boom),
            Retried("b", claimed["b"].token, other_error, clock.now()),
        ]
    )

    async def ids(text):
        return sorted(task.id for task in (await search(storage, clock, text)).tasks)

    assert await ids("error:declined") == ["a"]
    assert await ids("error:mailbox") == ["b"]
    assert await ids("error:mailbox status:failed") == []
    assert await ids(f"worker:{other.owner}") == ["a", "b", "c"]
    assert await ids("worker:nobody") == []


async def test_a_search_says_how_far_back_it_looked(busy):
    page = await find_tasks(busy, TaskSearch(words=("nothing",)), limit=10, patience=0)
    assert page.is_cut
    assert page.read == 1_000
    assert page.reached is not None


@pytest.mark.parametrize(
    "text", ["color:red", "meta.api_key:x", "arg.password:x", "status:odd", "since:soon", "x " * 30]
)
def test_a_search_that_makes_no_sense_is_refused(text, clock):
    with pytest.raises(InvalidValue):
        parse_search(text, clock.now())


async def test_hidden_arguments_are_not_searched(storage, clock):
    await storage.enqueue(a_task("a", kwargs={"password": "hunter2", "user": "ada"}))

    assert (await search(storage, clock, "hunter2")).tasks == ()
    assert [task.id for task in (await search(storage, clock, "ada")).tasks] == ["a"]


async def search(storage, clock, text):
    """The first page of a search."""
    return await find_tasks(storage, parse_search(text, clock.now()), limit=10)


def test_a_scan_reads_a_bounded_number_of_records():
    assert inspection.ScanQuery().max_scanned <= 10_000
