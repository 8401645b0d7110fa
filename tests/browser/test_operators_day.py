"""The daily work of an operator in Chromium, each job with the number of clicks that it takes."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from omniq import AsyncTaskQueue
from omniq.models import TaskError, TaskStatus
from omniq.outcomes import Failed
from tests.browser import chromium
from tests.browser.test_chromium import opened
from tests.browser.test_history_pages import store_night

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(
        bool(chromium.missing()), reason=chromium.missing() or "Chromium is installed"
    ),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(120),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium.PATH)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def queue():
    async with AsyncTaskQueue("memory://") as queue:
        yield queue


class Operator:
    """Somebody who has opened the overview, and whose clicks are counted."""

    def __init__(self, page) -> None:
        self.page = page
        self.clicks = 0

    async def click(self, selector: str) -> None:
        self.clicks += 1
        await self.page.click(selector)
        await self.page.wait_for_load_state()

    async def sees(self, text: str) -> None:
        await self.page.wait_for_selector(f"main :text({text!r})")


@asynccontextmanager
async def at_work(browser, queue):
    async with opened(browser, queue) as (page, _):
        await page.wait_for_selector(".live[data-state=on]")
        yield Operator(page)


async def kill(queue, *numbers, message="no such mailbox"):
    """Enqueue tasks that have failed for good."""
    for number in numbers:
        await queue.options(priority=1000).enqueue("shop.charge_card", number)
        (task,) = await queue.storage.reserve(1)
        traceback = f"Traceback (most recent call last):\nCardError: {message}"
        error = TaskError(message, error_type="CardError", traceback=traceback)
        await queue.storage.record([Failed(task.id, task.token, error)])


async def test_why_a_queue_is_slow_takes_one_click(browser, queue):
    await queue.options(queue="mail").enqueue("shop.say", "x")
    await queue.storage.renew(lease=60, concurrency=1)
    await queue.queues.pause("mail")
    async with at_work(browser, queue) as operator:
        await operator.click("#queue-lines a:text-is('mail')")
        await operator.sees("paused")
        counted = await operator.page.inner_text("#reasons .list")

    assert operator.clicks == 1
    assert "paused" in counted


async def test_a_task_is_found_by_its_argument_with_its_attempts_in_three_clicks(browser, queue):
    await kill(queue, 16, 17, 18)
    async with at_work(browser, queue) as operator:
        await operator.click("nav a:text-is('Tasks')")
        await operator.page.fill("[data-search]", "arg.0:17")
        await operator.click("button:text-is('Search')")
        await operator.sees("Searched all tasks")
        found = await operator.page.locator("#rows tbody tr").count()
        await operator.click("#rows a.func")
        await operator.sees("Attempt 1")

    assert (found, operator.clicks) == (1, 3)


async def test_all_tasks_with_an_error_are_retried_in_three_clicks(browser, queue):
    await kill(queue, *range(60))
    await kill(queue, 99, message="card 99 expired")
    async with at_work(browser, queue) as operator:
        await operator.click("nav a:text('Dead letters')")
        await operator.click("tr:has-text('mailbox') a.button")
        await operator.click("button:text-is('Retry all')")
        await operator.sees("60 tasks retried")
    stats = await queue.stats()

    assert operator.clicks == 3
    assert stats.by_status[TaskStatus.PENDING] == 60
    assert stats.dead == 1


async def test_a_running_task_is_cancelled_in_three_clicks(browser, queue):
    handle = await queue.enqueue("shop.say", "x")
    (task,) = await queue.storage.reserve(1)
    async with at_work(browser, queue) as operator:
        await operator.click("nav a:text-is('Tasks')")
        await operator.click("#rows a.func")
        await operator.click("button:text-is('Cancel')")
        await operator.sees("cancel")

    assert operator.clicks == 3
    assert (await queue.storage.get_task(handle.id)).cancel_requested
    assert task.id == handle.id


async def test_a_queue_is_paused_in_three_clicks_with_a_reason(browser, queue):
    await queue.options(queue="mail").enqueue("shop.say", "x")
    async with at_work(browser, queue) as operator:
        await operator.click("nav a:text-is('Queues')")
        await operator.click("summary:text-is('Pause…')")
        await operator.page.fill("input[name=reason]", "deployment")
        await operator.click("details[open] button:text-is('Pause')")
        await operator.sees("deployment")
    (pause,) = await queue.storage.pauses()

    assert operator.clicks == 3
    assert (pause.queue, pause.reason) == ("mail", "deployment")


async def test_a_worker_is_stopped_in_three_clicks(browser, queue):
    await queue.storage.renew(lease=60, concurrency=1)
    async with at_work(browser, queue) as operator:
        await operator.click("nav a:text-is('Workers')")
        await operator.click("summary:text-is('Stop…')")
        await operator.click("details[open] button:text-is('Stop')")
        await operator.sees("stops at its next heartbeat")
    (request,) = await queue.storage.take_requests()

    assert operator.clicks == 3
    assert request.action == "stop"


async def test_the_night_of_a_function_takes_three_clicks(browser, queue):
    await store_night(queue.storage)
    async with at_work(browser, queue) as operator:
        await operator.click("nav a:text-is('Functions')")
        await operator.click(".ranges a:text-is('24h')")
        await operator.click("a.func:text-is('shop.charge_card')")
        await operator.sees("Failed runs")
        failed = await operator.page.locator("#charts rect.retried").count()

    assert operator.clicks == 3
    assert failed > 10


async def test_a_schedule_is_run_now_in_two_clicks(browser, queue):
    await queue.schedules.add("nightly", "shop.refresh_prices", cron="0 3 * * *")
    async with at_work(browser, queue) as operator:
        await operator.click("nav a:text-is('Schedules')")
        await operator.click("button:text-is('Run now')")
        await operator.sees("enqueued")

    assert operator.clicks == 2
    assert len(await queue.list_tasks()) == 1


async def test_a_limit_is_changed_in_three_clicks(browser, queue):
    await queue.options(max_running=1, limit_key="api").enqueue("shop.say", "x")
    async with at_work(browser, queue) as operator:
        await operator.click("nav a:text-is('Limits')")
        await operator.click("summary:text-is('Change…')")
        await operator.page.fill("input[name=max_running]", "7")
        await operator.click("details[open] button:text-is('Change')")
        await operator.sees("7 running")

    assert operator.clicks == 3
    assert [each.max_running for each in await queue.limits.list()] == [7]
