"""The pages as they are without JavaScript."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from omniq import AsyncTaskQueue
from omniq.dashboard import Access, Role, create_app
from omniq.models import Progress, TaskError, TaskStatus
from omniq.outcomes import Failed, Released
from omniq.storage.memory import MemoryStorage
from omniq.tasks.task_output import StoredChunk, encode_log
from omniq.testing.builders import an_output
from omniq.testing.faults import FaultyStorage
from tests.browser.served import PAGES, bearer, dashboard_client, sign_in


@pytest.mark.parametrize("path", PAGES)
async def test_every_page_opens_on_an_empty_queue(client, path):
    answer = await client.get(path, headers=bearer())

    assert answer.status_code == 200
    assert "<h1>" in answer.text


async def test_the_overview_lists_problems(queue, client, dead):
    await dead("x")
    await queue.options(queue="mail").enqueue("shop.say", "y")
    await queue.storage.pause_queue("mail")
    text = (await client.get("/", headers=bearer())).text

    assert "queue mail is paused and has 1 task" in text
    assert "1 dead letter to retry or delete" in text
    assert "Boom: boom" in text


async def test_a_task_page_shows_its_history(queue, client, dead):
    task_id = await dead("an argument", error="the mailbox is full")
    text = (await client.get(f"/tasks/{task_id}", headers=bearer())).text

    for part in ("an argument", "the mailbox is full", "Traceback", "Timeline", "enqueued"):
        assert part in text
    assert "How it ended" in text


async def test_a_task_and_a_dead_letter_show_their_type(queue, client, dead):
    call = queue.options(task_type="summarize", timeout=None, max_retries=0)
    typed, other = (await call.enqueue("shop.say", "x")).id, await dead("y")
    page = (await client.get(f"/tasks/{typed}", headers=bearer())).text
    (task,) = await queue.storage.reserve(1)
    await queue.storage.record([Failed(typed, task.token, TaskError("no"), "permanent")])
    listed = (await client.get("/dead?type=summarize", headers=bearer())).text

    assert "<dt>Type</dt><dd>summarize</dd>" in page
    assert "<dt>Timeout</dt><dd>none</dd>" in page
    assert f"{typed} · summarize" in listed
    assert f'value="{other}"' not in listed


async def test_a_waiting_task_says_why_it_does_not_run(queue, client):
    handle = await queue.options(queue="mail").enqueue("shop.say", "x")
    await queue.storage.pause_queue("mail")
    text = (await client.get(f"/tasks/{handle.id}", headers=bearer())).text

    assert "Why it is not running" in text
    assert "Its queue mail is paused" in text
    assert "No worker is alive" in text


async def test_a_task_page_shows_the_output_of_each_attempt_without_its_secrets(queue, client):
    handle = await queue.enqueue("shop.say", "x")
    (task,) = await queue.storage.reserve(1)
    line = StoredChunk(0, encode_log("login password=hunter2", "warning", {"api_key": "k-2f9e"}))
    first = an_output(
        handle.id, task.token, "Once up", "on a time", line, {"token": "t-1"}, first=3
    )
    await queue.storage.append_output([first])
    await queue.storage.record([Released(handle.id, task.token)])
    (again,) = await queue.storage.reserve(1)
    await queue.storage.append_output([an_output(handle.id, again.token, "<b>", attempt=2)])
    await queue.storage.record([Failed(handle.id, again.token, TaskError("no"), "permanent")])
    page = (await client.get(f"/tasks/{handle.id}", headers=bearer())).text

    assert "<pre>Once upon a time</pre>" in page
    assert "2 earlier chunks are not shown" in page
    assert "login password=***" in page
    assert not any(secret in page for secret in ("hunter2", "k-2f9e", "t-1"))
    assert "Attempt 1" in page
    assert "Attempt 2" in page
    assert "<pre>&lt;b&gt;</pre>" in page


async def test_the_page_of_a_task_without_output_has_no_such_part(queue, client):
    handle = await queue.enqueue("shop.say", "x")

    assert "<h2>Output</h2>" not in (await client.get(f"/tasks/{handle.id}", headers=bearer())).text


async def test_a_worker_shows_its_tasks_and_their_progress(queue, client):
    await queue.storage.renew(concurrency=4)
    handle = await queue.enqueue("shop.say", "x")
    (task,) = await queue.storage.reserve(1)
    report = Progress(task_id=task.id, token=task.token, fraction=0.5, message="half way")
    await queue.storage.report_progress([report])
    text = (await client.get("/workers", headers=bearer())).text

    assert "1 of 4 slots in use" in text
    assert handle.id in text
    assert "half way" in text


async def test_a_worker_that_waits_for_its_last_tasks_is_stopping(queue, client):
    await queue.storage.renew(concurrency=4, stopping=True)
    text = (await client.get("/workers", headers=bearer())).text

    assert ">stopping<" in text


async def test_a_schedule_shows_its_next_times_and_its_last_runs(queue, client):
    schedule = await queue.schedules.add("hourly", "shop.refresh_prices", cron="0 * * * *")
    text = (await client.get("/schedules", headers=bearer())).text

    assert "hourly" in text
    assert schedule.next_at.isoformat() in text
    assert "not fired yet" in text


async def test_forms_work_without_javascript(queue, client, dead):
    task_id = await dead("x")
    token = await sign_in(client)
    answer = await client.post(
        "/act/tasks/retry-edited",
        data={
            "token": token,
            "back": f"/tasks/{task_id}",
            "id": task_id,
            "args": '["new"]',
            "kwargs": "{}",
        },
    )
    after = await client.get(answer.headers["location"])

    assert answer.headers["location"] == f"/tasks/{task_id}"
    assert "1 task retried" in after.text
    assert (await queue.get_task(task_id)).args == ("new",)


async def test_a_form_does_not_redirect_to_another_site(queue, client):
    token = await sign_in(client)
    answer = await client.post(
        "/act/queues/pause",
        data={"token": token, "back": "//evil.example/", "queue": "mail"},
    )

    assert answer.headers["location"] == "/"


async def test_the_result_of_an_action_is_shown_once(queue, client):
    token = await sign_in(client)
    await client.post("/act/queues/pause", data={"token": token, "back": "/", "queue": "mail"})

    assert 'role="status">Queue mail paused' in (await client.get("/queues")).text
    assert 'role="status">Queue mail' not in (await client.get("/queues")).text


async def test_an_unknown_task_is_a_404_page_with_its_id(client):
    answer = await client.get("/tasks/nowhere", headers=bearer())

    assert answer.status_code == 404
    assert "nowhere" in answer.text


async def test_a_storage_that_does_not_respond_is_a_503_page():
    storage = FaultyStorage(MemoryStorage())
    async with AsyncTaskQueue(storage) as queue, dashboard_client(queue) as client:
        storage.fail("read", times=None)
        answer = await client.get("/", headers=bearer())

    assert answer.status_code == 503
    assert "does not respond" in answer.text


async def test_the_surrounding_application_may_assign_roles(queue):
    def authorize(scope):
        names = dict(scope["headers"])
        return {b"ada": Role.OPERATOR, b"bob": Role.VIEWER}.get(names.get(b"x-user", b""))

    async with dashboard_client(queue, Access(authorize=authorize)) as client:
        codes = [
            (await client.get("/", headers={"x-user": name})).status_code
            for name in ("ada", "bob", "eve")
        ]
        viewer = await client.get("/queues", headers={"x-user": "bob"})

    assert codes == [200, 200, 401]
    assert "Purge" not in viewer.text


async def test_read_only_hides_every_button_and_refuses_every_change(queue, dead):
    await dead("x")
    secret = "twelve characters"
    async with dashboard_client(queue, Access(operator=secret, read_only=True)) as client:
        page = await client.get("/dead", headers=bearer(secret))
        tried = await client.post(
            "/api/queues/pause", json={"queue": "mail"}, headers=bearer(secret)
        )

    assert "Retry" not in page.text
    assert tried.status_code == 403


async def test_mounted_below_a_path_all_links_stay_there(queue, dead):
    task_id = await dead("x")
    secret = "twelve characters"
    inner = create_app(queue, access=Access(operator=secret))
    outer = Starlette(routes=[Mount("/ops/queue", inner)])
    transport = httpx.ASGITransport(app=outer)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        signed = await client.post("/ops/queue/login", data={"secret": secret})
        page = await client.get(f"/ops/queue/tasks/{task_id}")
        client.cookies.clear()
        unauthenticated = await client.get("/ops/queue/tasks")
    await inner.state.dashboard.sampler.close()

    assert signed.headers["location"] == "/ops/queue/"
    assert "Path=/ops/queue" in signed.headers["set-cookie"]
    assert page.status_code == 200
    assert 'href="/tasks' not in page.text
    assert 'action="/act' not in page.text
    assert unauthenticated.status_code == 401


async def test_every_status_has_a_tab(queue, client):
    await queue.enqueue("shop.say", "x")
    text = (await client.get("/tasks", headers=bearer())).text

    for status in TaskStatus:
        assert f"?status={status}" in text


async def test_forms_pause_a_worker_and_delete_a_task(queue, client):
    token = await sign_in(client)
    await queue.storage.renew(concurrency=2)
    worker = queue.storage.owner
    ended = await queue.enqueue("shop.say", "x")
    await ended.cancel()
    before = (await client.get("/workers")).text
    await client.post("/act/workers/pause", data={"token": token, "id": worker, "back": "/workers"})
    after = (await client.get("/workers")).text
    page = (await client.get(f"/tasks/{ended.id}")).text
    await client.post("/act/tasks/delete", data={"token": token, "ids": ended.id, "back": "/tasks"})

    assert "/act/workers/pause" in before
    assert "/act/workers/resume" in after
    assert ">paused<" in after
    assert "/act/tasks/delete" in page
    assert await queue.get_task(ended.id) is None
