"""The pages with the history of runs, and those of single queues, functions and workers."""

from __future__ import annotations

import asyncio
from pkgutil import resolve_name

import httpx
import pytest

from omniq import AsyncTaskQueue
from omniq.models import Version
from omniq.operations.find_tasks import find_tasks
from omniq.storage.memory import MemoryStorage
from omniq.storage.run_counts import FunctionCounts, PeriodCounts, RunCounts
from omniq.testing.clock import ManualClock
from tests.browser.served import bearer, dashboard_client

HOUR = 3_600


async def store_night(storage, hours: int = 24) -> None:
    """The runs of a day; between 10 and 7 hours ago, all runs of `charge_card` failed."""
    now = int(storage.clock.now().timestamp()) // 60 * 60
    for ago in range(5 * 60, hours * HOUR, 300):
        is_down = 7 * HOUR < ago <= 10 * HOUR
        charge = RunCounts(
            succeeded=0 if is_down else 10, retried=10 if is_down else 0, run=[0] * 9 + [10]
        )
        say = RunCounts(succeeded=50, run=[50], wait=[50])
        total = RunCounts()
        total.add(charge)
        total.add(say)
        lines = [
            FunctionCounts("shop.charge_card", "default", charge),
            FunctionCounts("shop.say", "mail", say),
        ]
        await storage.add_run_counts([PeriodCounts(now - ago, total, lines)])
    while await storage.merge_run_counts():
        pass


async def page(client: httpx.AsyncClient, path: str) -> str:
    answer = await client.get(path, headers=bearer())
    assert answer.status_code == 200, answer.text
    return answer.text


async def test_a_restarted_dashboard_shows_the_outage_of_last_night(queue):
    await store_night(queue.storage)
    await queue.storage.note_version(
        Version(code="9f3a1c", omniq="1.0", started_at=queue.storage.clock.now())
    )
    async with dashboard_client(queue) as client:
        overview = await page(client, "/?range=24h")
        function = await page(client, "/functions/shop.charge_card?range=24h")
        other = await page(client, "/functions/shop.say?range=24h")

    assert overview.count('class="retried"') >= 24
    assert "first start of 9f3a1c" in overview
    assert 'class="retried"' in function
    assert '<rect class="retried"' not in other
    assert "data-tip=" in function


@pytest.mark.parametrize("span", ["15m", "1h", "6h", "24h", "3d", "7d", "30d"])
async def test_every_range_opens_on_every_page_of_a_history(queue, client, span):
    await store_night(queue.storage, hours=2)
    assert "Failed runs" in await page(client, f"/?range={span}")
    for path in ("/functions", "/functions/shop.say", "/queues/mail"):
        assert "shop" in await page(client, f"{path}?range={span}")


async def test_an_unknown_range_is_refused(client):
    answer = await client.get("/?range=2y", headers=bearer())

    assert answer.status_code == 400
    assert "15m, 1h" in answer.text


async def test_functions_can_be_sorted_by_their_failures(queue, client):
    await store_night(queue.storage)
    by_runs = await page(client, "/functions?range=24h")
    by_errors = await page(client, "/functions?range=24h&sort=errors")

    assert by_runs.index("shop.say") < by_runs.index("shop.charge_card")
    assert by_errors.index("shop.charge_card") < by_errors.index("shop.say")


async def test_an_idle_queue_stays_listed_and_can_be_paused(queue, client):
    await store_night(queue.storage, hours=2)
    text = await page(client, "/queues")

    assert 'href="/queues/mail"' in text
    assert 'name="queue" value="mail"' in text


async def test_a_queue_says_why_its_tasks_wait(queue, client):
    await queue.options(queue="mail").enqueue_many("shop.say", [str(n) for n in range(20)])
    await queue.options(queue="mail", delay=3600).enqueue("shop.say", "later")
    await queue.storage.pause_queue("mail")
    text = await page(client, "/queues/mail")

    assert "Why tasks wait" in text
    assert "is paused" in text
    assert "<strong>20</strong>" in text


async def test_a_killed_worker_is_not_called_blocked_and_stays_known():
    clock = ManualClock()
    async with (
        MemoryStorage(clock=clock) as storage,
        AsyncTaskQueue(storage) as queue,
        storage.another() as killed,
        dashboard_client(queue) as client,
    ):
        await queue.enqueue("shop.say", "x")
        await killed.renew(lease=60, concurrency=4)
        await killed.reserve(1)
        owner = killed.owner
        clock.advance(20)
        alive = await page(client, "/workers")
        overview = await page(client, "/")
        clock.advance(60)
        await queue.storage.give_back_abandoned()
        client.app.state.dashboard.invalidate()
        gone = await page(client, "/workers")
        one = await page(client, f"/workers/{owner}")

    assert "No heartbeat for 20.0 s" in alive
    assert "event loop is blocked" not in alive
    assert "killed, suspended or cut off, with 1 task" in overview
    assert "lost" in gone
    assert owner in gone
    assert "with 1 task" in one


async def test_workers_are_read_in_a_few_calls_however_many_tasks_run(queue, client):
    await queue.enqueue_many("shop.say", [str(n) for n in range(60)])
    await queue.storage.renew(lease=60, concurrency=60)
    await queue.storage.reserve(60)
    calls: list[str] = []
    storage = queue.storage
    for name in ("get_task", "get_progress", "progress_of", "scan_tasks"):
        real = getattr(storage, name)

        def counted(*args, real=real, name=name, **options):
            calls.append(name)
            return real(*args, **options)

        setattr(storage, name, counted)
    text = await page(client, "/workers")

    assert text.count("shop.say") >= 20
    assert "get_task" not in calls
    assert "get_progress" not in calls
    assert calls.count("progress_of") == 1


async def test_tabs_keep_the_search(queue, client):
    await queue.options(queue="mail").enqueue("shop.say", "x")
    text = await page(client, "/tasks?queue=mail&since=1h")

    assert 'href="/tasks?q=queue%3Amail+since%3A1h&amp;status=failed"' in text


async def test_a_wrong_search_keeps_the_form_and_says_what_is_wrong(client):
    answer = await client.get("/tasks?q=color:red", headers=bearer())

    assert answer.status_code == 400
    assert 'value="color:red"' in answer.text
    assert "is not known" in answer.text


async def test_a_run_that_was_triggered_is_among_the_last_runs_and_its_notice_is_a_link(
    queue, client
):
    await queue.schedules.add("nightly", "shop.say", cron="0 3 * * *")
    await queue.schedules.trigger("nightly")
    text = await page(client, "/schedules")

    assert "not fired yet" not in text
    assert text.count('class="status pending"') == 1


async def test_a_page_does_not_wait_for_a_slow_search_and_is_filled_in_later(
    queue, client, monkeypatch
):
    await queue.enqueue("shop.say", "x")
    gate = asyncio.Event()

    async def wait_for_the_gate(*args, **options):
        await gate.wait()
        return await find_tasks(*args, **options)

    monkeypatch.setattr("omniq.dashboard.searches.find_tasks", wait_for_the_gate)
    early = await page(client, "/tasks?q=fn:say")
    gate.set()
    refreshed = await client.get("/tasks?q=fn:say", headers={**bearer(), "omniq-parts": "x"})
    later = await page(client, "/tasks?q=fn:say")

    assert "Searching…" in early
    assert '<noscript><meta http-equiv="refresh"' in early
    assert "No matching tasks" not in early
    for text in (refreshed.text, later):
        assert "shop.say</a>" in text
        assert "Searching…" not in text


@pytest.mark.parametrize(
    ("path", "read", "shown"),
    [
        ("/flows", "omniq.dashboard.flow_queries.list_flows", "No flows yet"),
        ("/events", "omniq.dashboard.flow_queries.list_open_events", "No task waits for an event"),
        ("/queues/mail", "omniq.dashboard.history_pages.waiting_reasons", "No worker is alive"),
    ],
)
async def test_a_page_does_not_wait_for_a_slow_read_of_many_tasks(
    queue, client, monkeypatch, path, read, shown
):
    await queue.options(queue="mail").enqueue("shop.say", "x")
    gate = asyncio.Event()
    original = resolve_name(read)

    async def wait_for_the_gate(*args, **options):
        await gate.wait()
        return await original(*args, **options)

    monkeypatch.setattr(read, wait_for_the_gate)
    early = await page(client, path)
    gate.set()
    refreshed = await client.get(path, headers={**bearer(), "omniq-parts": "x"})

    assert "Searching…" in early
    assert shown not in early
    assert shown in refreshed.text
    assert "Searching…" not in refreshed.text
