"""The dashboard in Chromium: pages, forms, live updates, accessibility and script injection."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path

import pytest
import pytest_asyncio

from omniq import AsyncTaskQueue, Flow
from omniq.models import TaskStatus
from omniq.tasks.task_output import StoredChunk, encode_log
from omniq.testing.builders import an_output
from tests.browser import chromium
from tests.browser.served import PAGES, SECRET, served
from tests.security.attacks import ATTACKS

pytestmark = [
    # Starting a browser takes as long as a hundred other tests.
    pytest.mark.deep,
    pytest.mark.skipif(
        bool(chromium.missing()), reason=chromium.missing() or "Chromium is installed"
    ),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(120),
]

WITH_DETAILS = (*PAGES, "/queues/mail", "/functions/shop.send_receipt?range=6h")
CHECKS = (Path(__file__).parent / "accessibility.js").read_text(encoding="utf-8")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium.PATH)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def shop():
    """A queue in memory."""
    async with AsyncTaskQueue("memory://") as queue:
        yield queue


@asynccontextmanager
async def opened(browser, queue, **options):
    """A browser page that has signed in, and the address of the dashboard."""
    async with served(queue) as (address, _):
        context = await browser.new_context(**options)
        context.set_default_timeout(20_000)
        page = await context.new_page()
        await page.goto(f"{address}/login")
        await page.fill("input[name=secret]", SECRET)
        await page.click("main button")
        try:
            yield page, address
        finally:
            await context.close()


async def fail_some(queue, *texts):
    """Enqueue tasks that a worker fails permanently; returns their ids."""
    say = import_module("shop").say
    handles = [await queue.enqueue(say, f"fail {text}") for text in texts]
    async with queue.worker(concurrency=4) as pool:
        await pool.run_until_empty()
    return [handle.id for handle in handles]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1024), ("dark", 390)])
async def test_every_page_opens_in_both_schemes_and_on_a_phone_and_is_accessible(
    browser, shop, scheme, width
):
    (task_id,) = await fail_some(shop, "one")
    said = await shop.options(priority=99).enqueue("shop.say", "x")
    (task,) = await shop.storage.reserve(1)
    line = StoredChunk(0, encode_log("a line of words " * 20, "warning", {"size": 3}))
    spoken = an_output(said.id, task.token, "word " * 500, line, {"a": 1}, first=9)
    await shop.storage.append_output([spoken])
    await shop.schedules.add("nightly", "shop.refresh_prices", cron="0 3 * * *")
    await shop.options(queue="mail").enqueue("shop.say", "x")
    flow = Flow("greet")
    flow.options(after=[flow.add("hello", "shop.say", "x")]).add("goodbye", "shop.say", "y")
    started = await shop.start(flow)
    errors: list[str] = []
    size = {"width": width, "height": 800}
    async with opened(browser, shop, color_scheme=scheme, viewport=size) as (page, address):
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        for path in (
            *WITH_DETAILS,
            f"/tasks/{task_id}",
            f"/tasks/{said.id}",
            f"/flows/{started.id}",
        ):
            await page.goto(address + path)
            faults = await page.evaluate(CHECKS)
            overflow = await page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert faults == [], (path, scheme, faults)
            assert overflow <= 0, (path, width)
    assert errors == []


async def test_counts_update_while_a_worker_runs(browser, shop):
    async with opened(browser, shop) as (page, _):
        await page.wait_for_selector(".live[data-state=on]")
        say = import_module("shop").say
        async with shop.worker(concurrency=4):
            await shop.enqueue_many(say, [f"text {number}" for number in range(20)])
            await page.wait_for_selector(".legend a[href$=success]:text-is('20')")
        shown = await page.inner_text(".legend a[href$=success]")

    assert shown == "20"


async def test_the_output_of_a_running_task_appears_while_its_page_is_open(browser, shop):
    handle = await shop.enqueue("shop.say", "x")
    (task,) = await shop.storage.reserve(1)
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/tasks/{handle.id}")
        await page.wait_for_selector(".live[data-state=on]")
        await shop.storage.append_output([an_output(task.id, task.token, "Once ")])
        await page.wait_for_selector("#output pre:text-is('Once')")
        await shop.storage.append_output([an_output(task.id, task.token, "upon", first=2)])
        await page.wait_for_selector("#output pre:text-is('Once upon')")


async def test_the_page_polls_when_the_stream_is_refused(browser, shop):
    async with served(shop) as (address, _):
        context = await browser.new_context()
        await context.route("**/api/stream", lambda route: route.fulfill(status=503))
        page = await context.new_page()
        await page.goto(f"{address}/login")
        await page.fill("input[name=secret]", SECRET)
        await page.click("main button")
        await page.wait_for_selector(".live[data-state=poll]")
        await shop.enqueue("shop.say", "x")
        await page.wait_for_selector(".legend a[href$=pending]:text-is('1')", timeout=20_000)
        await context.close()


async def test_filters_limit_the_list_of_tasks(browser, shop):
    await shop.options(queue="mail").enqueue("shop.say", "x")
    await shop.enqueue("shop.refresh_prices")
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/tasks")
        await page.fill("input[data-search]", "queue:mail")
        await page.click("button:text-is('Search')")
        by_queue = await page.locator("tbody tr").all_inner_texts()
        await page.goto(f"{address}/tasks?status=success")
        none = await page.inner_text("main")

    assert len(by_queue) == 1
    assert "shop.say" in by_queue[0]
    assert "No matching tasks" in none


async def test_bulk_retry_retries_only_the_selected_tasks(browser, shop):
    first, second, third = await fail_some(shop, "one", "two", "three")
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/tasks?status=failed")
        for task_id in (first, third):
            await page.check(f"input[value='{task_id}']")
        selected = await page.inner_text("[data-selected]")
        await page.click("button:text-is('Retry')")
        notice = await page.inner_text(".notice")
    statuses = [(await shop.get_task(task_id)).status for task_id in (first, second, third)]

    assert selected == "2 selected"
    assert notice == "2 tasks retried"
    assert statuses == [TaskStatus.PENDING, TaskStatus.FAILED, TaskStatus.PENDING]


async def test_a_retry_with_edited_arguments_runs_with_them(browser, shop):
    (task_id,) = await fail_some(shop, "one")
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/tasks/{task_id}")
        await page.fill("textarea[name=args]", '["it works now"]')
        await page.click("text=Retry with these")
        async with shop.worker(concurrency=1):
            await page.wait_for_selector("#task-head .status.success")
    result = await shop.get_result(task_id)

    assert result.result == "it works now"


async def test_no_task_of_a_paused_queue_runs(browser, shop):
    handle = await shop.options(queue="mail").enqueue("shop.say", "x")
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/queues")
        await page.click("tr:has-text('mail') summary:text-is('Pause…')")
        await page.click("details[open] button:text-is('Pause')")
        await page.wait_for_selector("text=Queue mail paused")
        async with shop.worker(concurrency=1) as pool:
            await pool.run_until_empty()
        held = (await shop.get_task(handle.id)).status
        await page.click("tr:has-text('mail') >> text=Resume")
        await page.wait_for_selector("text=Queue mail resumed")
        async with shop.worker(concurrency=1) as pool:
            await pool.run_until_empty()
    done = (await shop.get_task(handle.id)).status

    assert (held, done) == (TaskStatus.PENDING, TaskStatus.SUCCESS)


async def test_a_purge_needs_the_name_of_the_queue(browser, shop):
    handle = await shop.options(queue="mail").enqueue("shop.say", "x")
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/queues")
        await page.click("text=Purge…")
        await page.fill("input[name=confirm]", "mail")
        await page.click("button.danger")
        await page.wait_for_selector("text=1 task cancelled")

    assert (await shop.get_task(handle.id)).status is TaskStatus.CANCELLED


async def test_an_attack_in_every_field_stays_text(browser, shop):
    say = import_module("shop").say
    for attack in ATTACKS[:45]:
        await shop.options(metadata={"x": attack}).enqueue(say, f"fail {attack}")
    async with shop.worker(concurrency=4) as pool:
        await pool.run_until_empty()
    letters = await shop.dead.list()
    async with opened(browser, shop) as (page, address):
        alerts: list[str] = []

        async def record(dialog):
            alerts.append(dialog.message)
            await dialog.dismiss()

        page.on("dialog", record)
        for path in ("/", "/dead", "/tasks", *(f"/tasks/{each.task_id}" for each in letters[:10])):
            await page.goto(address + path)
        foreign = await page.evaluate("document.querySelectorAll('main script, main img').length")

    assert len(letters) == 45
    assert alerts == []
    assert foreign == 0


async def test_the_content_security_policy_blocks_an_injected_script(browser, shop):
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/queues")
        blocked = await page.evaluate(
            """() => new Promise((resolve) => {
                document.addEventListener('securitypolicyviolation',
                    (event) => resolve([event.effectiveDirective, window.owned === undefined]));
                const script = document.createElement('script');
                script.textContent = 'window.owned = 1';
                document.body.append(script);
            })"""
        )

    assert blocked[0].startswith("script-src")
    assert blocked[1] is True


async def test_every_page_can_be_read_without_javascript(browser, shop):
    (task_id,) = await fail_some(shop, "one")
    async with opened(browser, shop, java_script_enabled=False) as (page, address):
        texts = {}
        for path in (*WITH_DETAILS, f"/tasks/{task_id}"):
            await page.goto(address + path)
            texts[path] = await page.inner_text("main")

    assert "shop.say" in texts["/tasks"]
    assert "fail one" in texts[f"/tasks/{task_id}"]
    assert "UTC" in texts[f"/tasks/{task_id}"]
    assert all(len(text) > 20 for text in texts.values())


async def test_the_keyboard_reaches_the_content_and_the_search(browser, shop):
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/tasks")
        await page.keyboard.press("Tab")
        skip = await page.evaluate("document.activeElement.className")
        await page.keyboard.press("Enter")
        await page.keyboard.press("/")
        focused = await page.evaluate("document.activeElement.name")

    assert skip == "skip"
    assert focused == "q"


async def test_a_selected_checkbox_survives_a_refresh(browser, shop):
    handle = await shop.enqueue("shop.say", "x")
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/tasks")
        await page.wait_for_selector(".live[data-state=on]")
        await page.check(f"input[value='{handle.id}']")
        await shop.enqueue("shop.say", "y")
        await page.wait_for_selector(".tabs a:first-child span:text-is('2')")
        is_selected = await page.is_checked(f"input[value='{handle.id}']")
        await asyncio.gather(
            page.click("button:text-is('Cancel')"), page.wait_for_selector(".notice")
        )

    assert is_selected
    assert (await shop.get_task(handle.id)).status is TaskStatus.CANCELLED


async def test_a_link_from_another_site_opens_its_task_after_the_sign_in(browser, shop):
    """A deep link, as a chat or a mail has it, works with and without a session."""
    handle = await shop.enqueue("shop.say", "x")
    async with served(shop) as (address, _):
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(f"{address}/tasks/{handle.id}")
        stranger = await page.content()
        await page.fill("input[name=secret]", SECRET)
        await page.click("main button")
        signed_in = (page.url, await page.inner_text("main"))
        # A page of another site with a link to the task.
        await page.goto(f"data:text/html,<a href='{address}/tasks/{handle.id}'>task</a>")
        await page.click("a")
        followed = await page.inner_text("main")
        cookies = await context.cookies(address)
        await context.close()

    assert "<nav" not in stranger
    assert handle.id not in stranger.replace(f"/tasks/{handle.id}", "")
    assert signed_in[0].endswith(f"/tasks/{handle.id}")
    assert handle.id in signed_in[1]
    assert handle.id in followed
    assert [(each["sameSite"], each["httpOnly"]) for each in cookies] == [("Lax", True)]


async def test_the_message_of_an_action_is_shown_once(browser, shop):
    """The message of an action is in a cookie, which the next page deletes."""
    await shop.options(queue="mail").enqueue("shop.say", "x")
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/queues")
        await page.click("summary:text-is('Pause…')")
        await page.click("details[open] button:text-is('Pause')")
        first = await page.inner_text(".notice")
        await page.goto(f"{address}/queues")
        again = await page.locator(".notice").count()

    assert "paused" in first
    assert again == 0


async def test_all_dead_letters_of_an_error_are_retried_with_two_clicks(browser, shop):
    ids = await fail_some(shop, *(f"order {number}" for number in range(12)))
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/dead")
        await page.click("text=Act…")
        assert "12" in await page.inner_text("main .big")
        await page.click("text=Retry all")
        await page.wait_for_selector("main .status.success")
        text = await page.inner_text("main")

    assert "12 tasks retried" in text
    assert {(await shop.get_task(each)).status for each in ids} == {TaskStatus.PENDING}


async def test_selected_text_survives_a_refresh(browser, shop):
    async with opened(browser, shop) as (page, address):
        await shop.enqueue("shop.say", "x")
        await page.goto(f"{address}/queues")
        await page.wait_for_selector("#queues th a")
        await page.evaluate(
            "getSelection().selectAllChildren(document.querySelector('#queues th a'))"
        )
        for _ in range(5):
            await shop.enqueue("shop.say", "y")
        await page.wait_for_selector("#live-mark[title*='not updated']")
        selected = await page.evaluate("String(getSelection())")
        await page.evaluate("getSelection().removeAllRanges()")
        await page.wait_for_selector("#queues td.num:text-is('6')")

    assert selected == "default"


async def test_a_result_appears_on_the_open_page_of_its_task(browser, shop):
    shop_module = import_module("shop")
    handle = await shop.enqueue(shop_module.say, "hello")
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/tasks/{handle.id}")
        await page.wait_for_selector(".live[data-state=on]")
        assert not await page.is_visible("#result")
        async with shop.worker(concurrency=1):
            await page.wait_for_selector("#result pre")
        text = await page.inner_text("#result")

    assert "Result" in text


async def test_paused_updates_leave_the_page_as_it_is_until_they_are_resumed(browser, shop):
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/tasks")
        await page.wait_for_selector(".live[data-state=on]")
        await page.click("[data-pause-updates]")
        await shop.enqueue("shop.say", "later")
        await page.wait_for_timeout(3_000)
        paused = await page.locator("#rows tbody tr").count()
        mark = await page.inner_text("#live-mark")
        await page.click("[data-pause-updates]")
        await page.wait_for_selector("#rows tbody tr")

    assert (paused, mark) == (0, "updates paused")


async def test_a_preview_of_a_schedule_does_not_send_the_token(browser, shop):
    async with opened(browser, shop) as (page, address):
        await page.goto(f"{address}/schedules/new")
        await page.fill("input[name=cron]", "0 3 * * *")
        await page.click("text=Preview the next times")
        await page.wait_for_selector("text=At 03:00")
        url = page.url
        await page.fill("input[name=id]", "nightly")
        await page.fill("input[name=function]", "shop.say")
        await page.click("button:text-is('Add')")
        await page.wait_for_url("**/schedules")
    (stored,) = await shop.schedules.list()

    assert "cron=" in url
    assert "token" not in url
    assert (stored.id, stored.cron) == ("nightly", "0 3 * * *")
