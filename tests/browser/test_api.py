"""The JSON API returns what the pages show, performs their actions, and limits all sizes."""

from __future__ import annotations

import asyncio
import json

import pytest

from omniq.models import TaskError, TaskStatus
from omniq.outcomes import Failed
from tests.browser.served import VIEWER, bearer, sign_in


async def get(client, path, **query):
    answer = await client.get(path, params=query, headers=bearer())
    assert answer.status_code == 200, answer.text
    return answer.json()


async def act(client, path, **parameters):
    return await client.post(f"/api/{path}", json=parameters, headers=bearer())


async def test_pages_of_tasks_are_newest_first_without_gaps_or_duplicates(queue, client):
    handles = await queue.enqueue_many("shop.say", [f"text {number}" for number in range(25)])
    named = await queue.options(task_id="by-hand").enqueue("shop.say", "last")
    seen: list[str] = []
    cursor = None
    while cursor or not seen:
        page = await get(client, "/api/tasks", limit=7, **({"cursor": cursor} if cursor else {}))
        seen += [task["id"] for task in page["tasks"]]
        cursor = page["cursor"]

    assert seen == [named.id, *reversed([handle.id for handle in handles])]


@pytest.mark.timeout(120)
async def test_pages_of_thousands_of_tasks_from_one_call_have_no_gap(queue, client):
    handles = await queue.enqueue_many("shop.say", [str(number) for number in range(1_500)])
    seen: list[str] = []
    cursor = None
    while cursor or not seen:
        page = await get(client, "/api/tasks", limit=250, **({"cursor": cursor} if cursor else {}))
        seen += [task["id"] for task in page["tasks"]]
        cursor = page["cursor"]

    assert seen == sorted((handle.id for handle in handles), reverse=True)


async def test_every_filter_filters(queue, client):
    chosen = await queue.options(queue="mail", metadata={"tenant": "a"}).enqueue("shop.say", "x")
    await queue.enqueue("shop.refresh_prices")
    filters = {
        "queue": "mail",
        "function": "shop.say",
        "id": chosen.id,
        "metadata": "tenant=a",
    }
    for name, text in filters.items():
        page = await get(client, "/api/tasks", **{name: text})
        assert [task["id"] for task in page["tasks"]] == [chosen.id], name

    assert (await get(client, "/api/tasks", status="success"))["tasks"] == []
    assert len((await get(client, "/api/tasks", since="1h"))["tasks"]) == 2
    assert (await get(client, "/api/tasks", until="1h"))["tasks"] == []


async def test_an_id_prefix_finds_all_tasks_with_it(queue, client):
    for name in ("order-1", "order-10", "order-2", "other"):
        await queue.options(task_id=name).enqueue("shop.say", name)

    page = await get(client, "/api/tasks", id="order-1")
    assert [task["id"] for task in page["tasks"]] == ["order-1", "order-10"]


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "501"},
        {"limit": "0"},
        {"limit": "many"},
        {"status": "lost"},
        {"since": "soon"},
        {"metadata": "x"},
        {"cursor": "x"},
        {"unknown": "x"},
        {"id": "../x"},
    ],
)
async def test_an_invalid_query_is_refused(client, query):
    answer = await client.get("/api/tasks", params=query, headers=bearer())

    assert answer.status_code == 400
    assert answer.json()["error"]


async def test_retry_cancel_and_delete_change_only_the_named_tasks(queue, client, dead):
    first, second, third = await dead("a"), await dead("b"), await dead("c")
    waiting = await queue.enqueue("shop.say", "x")
    retried = await act(client, "tasks/retry", ids=[first])
    cancelled = await act(client, "tasks/cancel", ids=[waiting.id, third])
    deleted = await act(client, "tasks/delete", ids=[second])

    assert retried.json()["done"] == deleted.json()["done"] == 1
    assert cancelled.json()["refused"].keys() == {third}
    assert (await queue.get_task(first)).status is TaskStatus.PENDING
    assert (await queue.get_task(waiting.id)).status is TaskStatus.CANCELLED
    assert [letter.task_id for letter in await queue.dead.list()] == [third]


async def test_an_edited_retry_keeps_redacted_values(queue, client, dead):
    task_id = await dead("old", password="hush", nested={"token": "t", "n": 1})
    shown = (await get(client, f"/api/tasks/{task_id}"))["task"]
    answer = await act(
        client,
        "tasks/retry-edited",
        id=task_id,
        args=["new"],
        kwargs={**shown["kwargs"], "extra": 1},
    )
    task = await queue.get_task(task_id)

    assert answer.status_code == 200
    assert shown["kwargs"]["password"] == shown["kwargs"]["nested"]["token"] == "[redacted]"
    assert task.args == ("new",)
    assert task.kwargs == {"password": "hush", "nested": {"token": "t", "n": 1}, "extra": 1}


async def finished_job(client):
    """The newest job, when it has ended."""
    while True:
        job = (await get(client, "/api/jobs"))["jobs"][0]
        if job["state"] != "running":
            return job
        await asyncio.sleep(0.01)


async def test_a_group_of_dead_letters_is_retried_together(queue, client, dead):
    chosen = {await dead("a", error="order 17 is gone"), await dead("b", error="order 4 is gone")}
    other = await dead(func="shop.refresh_prices", error="no such region")
    groups = (await get(client, "/api/dead/groups"))["groups"]
    largest = max(groups, key=lambda group: group["count"])
    answer = await act(client, "dead/retry", group=largest["id"])
    job = await finished_job(client)

    assert sorted(group["count"] for group in groups) == [1, 2]
    assert largest["message"] == "order … is gone"
    assert answer.json()["path"] == f"/jobs/{job['id']}"
    assert (job["state"], job["done"]) == ("done", len(chosen))
    assert [letter.task_id for letter in await queue.dead.list()] == [other]


async def test_dead_letters_are_listed_by_their_last_failure_with_the_newest_first(
    queue, client, dead
):
    ids = [await dead(str(number), error=f"number {number}") for number in range(5)]
    first = await get(client, "/api/dead", limit=2)
    second = await get(client, "/api/dead", limit=2, after=first["after"])
    third = await get(client, "/api/dead", limit=2, after=second["after"])
    found = [letter["task_id"] for page in (first, second, third) for letter in page["dead"]]

    assert found == list(reversed(ids))
    assert third["after"] is None


async def test_all_tasks_that_match_a_search_are_cancelled_and_no_others(queue, client):
    chosen = [await queue.options(queue="mail").enqueue("shop.say", n) for n in range(30)]
    other = await queue.enqueue("shop.say", "x")
    refused = await act(client, "bulk/cancel")
    await act(client, "bulk/cancel", q="queue:mail")
    job = await finished_job(client)

    assert refused.status_code == 400
    assert (job["done"], job["refused"]) == (30, 0)
    assert {(await queue.get_task(each.id)).status for each in chosen} == {TaskStatus.CANCELLED}
    assert (await queue.get_task(other.id)).status is TaskStatus.PENDING


async def test_a_waiting_task_can_be_changed_run_now_and_enqueued_again(queue, client):
    handle = await queue.options(delay=3600).enqueue("shop.say", "x")
    changed = await act(client, "tasks/change", id=handle.id, priority=7, new_queue="mail")
    moved = await queue.get_task(handle.id)
    due = await act(client, "tasks/run-now", ids=[handle.id])
    (task,) = await queue.storage.reserve(1)
    await queue.storage.record([Failed(task.id, task.token, TaskError("boom"))])
    again = await act(client, "tasks/run-again", ids=[handle.id])
    unknown = await act(client, "tasks/run-again", ids=["nothing"])
    (copy,) = [each for each in await queue.list_tasks() if each.id != handle.id]

    assert [each.status_code for each in (changed, due, again, unknown)] == [200] * 4
    assert (moved.priority, moved.queue) == (7, "mail")
    assert unknown.json()["done"] == 0
    assert (copy.args, copy.queue, copy.priority) == (("x",), "mail", 7)
    assert (copy.status, copy.attempts) == (TaskStatus.PENDING, 0)


async def test_tasks_and_schedules_can_be_made_and_deleted(queue, client):
    made = await act(client, "tasks/enqueue", function="shop.say", args=["x"], queue="mail")
    put = await act(client, "schedules/put", id="nightly", function="shop.say", cron="0 3 * * *")
    both = await act(
        client, "schedules/put", id="odd", function="shop.say", cron="0 3 * * *", interval="5m"
    )
    wrong = await act(client, "schedules/put", id="odd", function="shop.say", cron="0 3 * *")
    schedule = await queue.schedules.get("nightly")
    deleted = await act(client, "schedules/delete", id="nightly")
    missing = await act(client, "schedules/delete", id="nightly")

    assert [each.status_code for each in (made, put, deleted)] == [200] * 3
    assert [each.status_code for each in (both, wrong, missing)] == [400, 400, 404]
    assert schedule.cron == "0 3 * * *"
    assert [task.queue for task in await queue.list_tasks()] == ["mail"]
    assert await queue.schedules.list() == []


async def test_an_edited_schedule_keeps_redacted_values(queue, client):
    await queue.schedules.add("s", "shop.say", kwargs={"password": "hush", "n": 1}, interval=60)
    page = (await client.get("/schedules/s/edit", headers=bearer())).text
    put = await act(
        client,
        "schedules/put",
        id="s",
        function="shop.say",
        interval="5m",
        kwargs={"password": "[redacted]", "n": 2},
    )
    schedule = await queue.schedules.get("s")

    assert "hush" not in page
    assert put.status_code == 200
    assert schedule.task.kwargs == {"password": "hush", "n": 2}
    assert schedule.interval == 300


async def test_what_operators_do_is_stored_and_shown(queue, client):
    await act(client, "queues/pause", queue="mail")
    await act(client, "queues/pause", queue="not a name")
    entries = (await get(client, "/api/audit"))["entries"]
    page = (await client.get("/audit", headers=bearer())).text

    assert [(each["action"], each["subject"]) for each in entries][1] == ("queues/pause", "mail")
    assert entries[0]["outcome"].startswith("refused")
    assert "queues/pause" in page


async def test_a_purge_needs_the_name_twice_and_cancels_waiting_tasks(queue, client):
    handle = await queue.options(queue="mail").enqueue("shop.say", "x")
    refused = await act(client, "queues/purge", queue="mail", confirm="mial")
    done = await act(client, "queues/purge", queue="mail", confirm="mail")

    assert (refused.status_code, done.status_code) == (400, 200)
    assert (await queue.get_task(handle.id)).status is TaskStatus.CANCELLED


async def test_schedules_can_be_paused_triggered_and_backfilled(queue, client):
    await queue.schedules.add("hourly", "shop.refresh_prices", cron="0 * * * *")
    paused = await act(client, "schedules/pause", id="hourly")
    triggered = await act(client, "schedules/trigger", id="hourly")
    filled = await act(
        client,
        "schedules/backfill",
        id="hourly",
        start="2026-01-01T00:00:00Z",
        end="2026-01-01T05:00:00Z",
    )
    missing = await act(client, "schedules/pause", id="nightly")

    assert (paused.status_code, triggered.status_code, missing.status_code) == (200, 200, 404)
    assert filled.json()["done"] == 6
    assert (await queue.schedules.get("hourly")).paused


async def test_a_browser_session_may_use_the_api_with_its_token(queue, client):
    token = await sign_in(client)
    without = await client.post("/api/queues/pause", json={"queue": "mail"})
    within = await client.post(
        "/api/queues/pause", json={"queue": "mail"}, headers={"x-omniq-token": token}
    )

    assert (without.status_code, within.status_code) == (403, 200)


async def test_a_viewer_sees_everything_and_changes_nothing(queue, client):
    seen = await client.get("/api/overview", headers=bearer(VIEWER))
    tried = await client.post("/api/queues/pause", json={"queue": "mail"}, headers=bearer(VIEWER))

    assert (seen.status_code, tried.status_code) == (200, 403)
    assert await queue.storage.paused_queues() == frozenset()


async def test_the_openapi_document_has_every_route_of_the_api(client):
    document = await get(client, "/api/openapi.json")
    named = {
        (method.upper(), path) for path, found in document["paths"].items() for method in found
    }
    routed = {
        (method, route.path)
        for route in client.app.routes
        for method in route.methods - {"HEAD"}
        if route.path.startswith("/api/") and route.path != "/api/openapi.json"
    }

    assert named == routed
    assert document["openapi"].startswith("3.")
    assert "$ref" not in json.dumps(document["paths"]["/api/tasks"])


async def test_a_finished_task_is_deleted_and_a_waiting_task_is_not(queue, client):
    waiting = await queue.enqueue("shop.say", "x")
    ended = await queue.enqueue("shop.say", "y")
    await ended.cancel()
    deleted = await act(client, "tasks/delete", ids=[waiting.id, ended.id])

    assert deleted.json()["done"] == 1
    assert deleted.json()["refused"] == {waiting.id: "has not ended: pending"}
    assert await queue.get_task(ended.id) is None
    assert await queue.get_task(waiting.id) is not None


async def test_one_worker_is_paused_and_resumed(queue, client):
    await queue.storage.renew(concurrency=4)
    worker = queue.storage.owner
    paused = await act(client, "workers/pause", id=worker)
    shown = await get(client, "/api/workers")
    is_paused = (await queue.storage.renew(concurrency=4)).paused
    resumed = await act(client, "workers/resume", id=worker)

    assert (paused.status_code, resumed.status_code) == (200, 200)
    assert [each["paused"] for each in shown["workers"]] == [True]
    assert is_paused
    assert not (await queue.storage.renew(concurrency=4)).paused


async def test_an_unknown_worker_cannot_be_paused(client):
    for path in ("workers/pause", "workers/resume"):
        answer = await act(client, path, id="no-such-worker")
        assert answer.status_code == 400
        assert "no-such-worker" in answer.json()["error"]


async def test_a_viewer_cannot_pause_a_worker(queue, client):
    await queue.storage.renew(concurrency=4)
    body = {"id": queue.storage.owner}
    answer = await client.post("/api/workers/pause", json=body, headers=bearer(VIEWER))

    assert answer.status_code == 403
    assert not (await queue.storage.renew()).paused
