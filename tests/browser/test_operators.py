"""Roles, rights and names of operators, their notes and mutes, and forms that keep what was typed."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta

import pytest

from omniq.dashboard import Access, Identity, Role
from omniq.models import TaskResult, TaskStatus
from omniq.outcomes import Succeeded
from tests.browser.served import SECRET, bearer, dashboard_client, sign_in

SUPPORT = "a secret of the support"


@pytest.fixture
async def support(queue):
    """A client of a dashboard on which support may sign in."""
    access = Access(operator=SECRET, support=SUPPORT)
    async with dashboard_client(queue, access) as client:
        yield client


async def act(client, path, secret=SECRET, **fields):
    return await client.post(f"/api/{path}", json=fields, headers=bearer(secret))


async def test_support_repeats_single_tasks_and_changes_nothing_else(support, dead):
    task_id = await dead()

    retried = await act(support, "tasks/retry", SUPPORT, ids=[task_id])
    refused = [
        (await act(support, path, SUPPORT, **fields)).status_code
        for path, fields in (
            ("queues/pause", {"queue": "mail"}),
            ("tasks/delete", {"ids": [task_id]}),
            ("dead/retry", {"error": "boom"}),
            ("workers/stop", {"id": "w"}),
        )
    ]

    assert retried.json()["done"] == 1
    assert refused == [403] * 4


async def test_pages_show_only_the_buttons_that_a_user_may_use(support, dead):
    task_id = await dead()
    await sign_in(support, SECRET)
    whole = (await support.get(f"/tasks/{task_id}")).text
    await support.post("/login", data={"secret": SUPPORT})
    page = (await support.get(f"/tasks/{task_id}")).text

    assert "act/tasks/delete" in whole
    assert "act/tasks/retry" in page
    assert "act/tasks/delete" not in page
    assert "act/tasks/retry-edited" not in page


async def test_an_application_limits_the_actions_of_a_user_and_names_the_user(queue):
    known = Identity(role=Role.OPERATOR, name="ada", actions=("queues/*",))
    access = Access(authorize=lambda scope: known)
    async with dashboard_client(queue, access) as client:
        await queue.enqueue("shop.say", "x")
        page = (await client.get("/queues/default")).text
        token = page.split('name="token" value="')[1].split('"')[0]
        paused = await client.post(
            "/act/queues/pause", data={"token": token, "queue": "default", "note": "deployment"}
        )
        refused = await client.post(
            "/act/tasks/enqueue", data={"token": token, "function": "shop.say"}
        )
        audit = (await client.get("/audit")).text
        shown = (await client.get("/queues/default")).text

    assert (paused.status_code, refused.status_code) == (303, 403)
    assert "ada (operator)" in audit
    assert "by ada (operator)" in shown
    assert "deployment" in shown


async def test_the_name_of_the_sign_in_is_in_the_audit_log(client, queue):
    await client.post("/login", data={"secret": SECRET, "name": " Ada\nL. "})
    page = (await client.get("/schedules/new")).text
    token = page.split('name="token" value="')[1].split('"')[0]
    await client.post("/act/queues/pause", data={"token": token, "queue": "mail"})

    entries, _ = await queue.storage.audit_log()
    assert [each.by for each in entries] == ["Ada L. (operator)"]


async def test_a_refused_form_keeps_what_was_typed_and_says_what_is_wrong(client, queue):
    token = await sign_in_for_token(client)
    fields = {"function": "shop.say", "args": '["half', "queue": "mail", "token": token}

    response = await client.post("/act/tasks/enqueue", data=fields)

    assert response.status_code == 400
    assert "args: not JSON" in response.text
    assert "[&#34;half</textarea>" in response.text
    assert 'name="queue" value="mail"' in response.text
    assert response.text.index("aria-invalid") < response.text.index("[&#34;half")
    assert await queue.list_tasks() == []


async def test_a_muted_group_is_last_until_the_mute_ends(client, queue, dead):
    await dead(1, error="database is down")
    await dead(2, error="no such mailbox")
    token = await sign_in_for_token(client)
    groups = (await client.get("/api/dead/groups")).json()["groups"]
    newest = groups[0]
    fields = {"token": token, "group": newest["id"], "days": "7", "note": "known, fixed on Monday"}

    before = (await client.get("/dead")).text
    await client.post("/act/dead/mute", data=fields)
    after = (await client.get("/dead")).text
    group = (await client.get(f"/dead?group={newest['id']}")).text
    await client.post("/act/dead/unmute", data=fields)
    ended = (await client.get("/dead")).text

    assert before.index(newest["message"]) < before.index(groups[1]["message"])
    assert after.index(groups[1]["message"]) < after.index(newest["message"])
    assert "muted until" in after
    assert "fixed on Monday" in group
    assert "muted until" not in ended


async def test_a_note_is_shown_on_its_page_with_its_author(client, queue):
    handle = await queue.enqueue("shop.say", "x")
    token = await sign_in_for_token(client)
    path = f"/tasks/{handle.id}"

    await client.post(
        "/act/notes/add",
        data={"token": token, "about": path, "note": "the customer has called", "back": path},
    )
    page = (await client.get(path)).text

    assert "the customer has called" in page
    assert "operator," in page


async def sign_in_for_token(client):
    """Sign in; returns the token that every change must carry."""
    await client.post("/login", data={"secret": SECRET})
    page = (await client.get("/schedules/new")).text
    return page.split('name="token" value="')[1].split('"')[0]


async def test_the_runs_of_a_task_are_bars_with_their_length_and_host(client, queue, dead):
    task_id = await dead()
    await client.post("/login", data={"secret": SECRET})

    page = (await client.get(f"/tasks/{task_id}")).text

    assert "Waits and runs" in page
    assert "attempt 1: failed" in page


@pytest.mark.parametrize(
    ("sort", "first"), [("waiting", "b"), ("failed", "a"), ("name", "a"), ("unknown", "b")]
)
async def test_queues_are_sorted_as_chosen(client, queue, sort, first):
    await queue.options(queue="b").enqueue_many("shop.say", ["1", "2"])
    await queue.options(queue="a").enqueue("shop.say", "3")
    page = ""
    async with asyncio.timeout(30):
        # The first page may come before the first count.
        while '/queues/a"' not in page:
            page = (await client.get(f"/queues?sort={sort}", headers=bearer())).text
    order = {page.index(f'/queues/{name}"'): name for name in ("a", "b")}

    assert page.count('aria-current="true"') == 1
    assert order[min(order)] == first


async def test_a_function_is_paused_with_a_reason_on_its_page_and_resumed(client, queue):
    await sign_in(client, SECRET)
    paused = await act(
        client, "functions/pause", function="shop.say", reason="no <b>sound</b>", span="2h"
    )
    page = (await client.get("/functions/shop.say")).text
    listed = (await client.get("/functions")).text
    (pause,) = await queue.functions.paused()
    resumed = await act(client, "functions/resume", function="shop.say")

    assert (paused.status_code, resumed.status_code) == (200, 200)
    assert (pause.function, pause.reason) == ("shop.say", "no <b>sound</b>")
    assert pause.until is not None
    assert "no &lt;b&gt;sound&lt;/b&gt;" in page
    assert "act/functions/resume" in page
    assert "shop.say" in listed
    assert await queue.functions.paused() == []
    assert "act/functions/pause" in (await client.get("/functions/shop.say")).text


@pytest.mark.parametrize(
    ("noun", "name", "path"),
    [("queue", "mail", "/queues/mail"), ("function", "shop.say", "/functions/shop.say")],
)
async def test_a_page_shows_who_paused_it_why_and_until_when(client, queue, noun, name, path):
    await queue.options(queue="mail").enqueue("shop.say", "x")
    token = await sign_in(client, SECRET)
    fields = {"token": token, noun: name, "reason": "no power", "span": "2h", "back": path}
    await client.post(f"/act/{noun}s/pause", data=fields)
    page = (await client.get(path)).text
    entries, _ = await queue.storage.audit_log()
    (pause,) = await queue.storage.pauses()

    assert (pause.name, pause.reason) == (name, "no power")
    assert pause.until is not None
    assert (entries[0].subject, entries[0].note) == (name, "no power")
    head = page.partition("</h1>")[2].partition('<div class="acts">')[0]
    assert "by operator" in head
    assert ": no power" in head
    assert "ends" in head
    assert await queue.storage.reserve(1) == []


async def test_a_list_of_tasks_shows_how_each_ended(client, queue, dead):
    await dead("x", error="no such mailbox")
    await queue.enqueue("shop.say", "y")
    (task,) = await queue.storage.reserve(1)
    now = queue.storage.clock.now()
    started = now - timedelta(seconds=7)
    result = TaskResult(
        task_id=task.id,
        status=TaskStatus.SUCCESS,
        attempts=1,
        started_at=started,
        finished_at=now,
    )
    await queue.storage.record([Succeeded(task.id, task.token, result)])
    await sign_in(client, SECRET)
    page = (await client.get("/tasks")).text

    assert "took 7.0 s" in page
    assert "Boom: no such mailbox" in page


async def test_the_slots_of_a_worker_are_changed_on_its_page(queue, client):
    worker = queue.storage.owner
    await queue.storage.renew(lease=60, concurrency=4)
    token = await sign_in(client, SECRET)
    before = (await client.get(f"/workers/{worker}")).text
    fields = {"token": token, "id": worker, "slots": "9", "back": f"/workers/{worker}"}
    changed = await client.post("/act/workers/slots", data=fields)
    after = (await client.get(f"/workers/{worker}")).text
    listed = (await client.get("/workers")).text
    (request,) = await queue.storage.take_requests()

    assert 'name="slots" type="number" min="1" max="10000" step="1" required value="4"' in before
    assert changed.status_code == 303
    assert "asked to run 9 tasks at a time" in after
    assert "asked to run 9 tasks at a time" in listed
    assert (request.action, request.slots) == ("slots", 9)


async def test_a_limit_is_changed_and_held_on_its_page(queue, client):
    await queue.options(max_running=2, limit_key="api").enqueue("shop.say", "x")
    await queue.options(max_running=2, limit_key="api").enqueue("shop.say", "y")
    token = await sign_in(client, SECRET)
    changed = await act(client, "limits/set", key="api", max_running=1, rate="100/5m")
    held = await client.post(
        "/act/limits/hold", data={"token": token, "key": "api", "span": "2h", "reason": "outage"}
    )
    none = await queue.storage.reserve(2)
    page = (await client.get("/limits")).text
    await act(client, "limits/release", key="api")
    one = await queue.storage.reserve(2)
    await act(client, "limits/reset", key="api")
    (second,) = await queue.storage.reserve(2)

    assert (changed.status_code, held.status_code) == (200, 303)
    assert "1 running" in page
    assert "100 starts per 5m" in page
    assert "outage" in page
    assert "act/limits/release" in page
    assert (len(none), len(one), second.args) == (0, 1, ("y",))


async def test_the_next_times_of_a_schedule_are_shown_before_it_is_added(client, queue):
    await sign_in(client, SECRET)
    typed = {
        "id": "month-end",
        "function": "shop.say",
        "cron": "0 3 1 * *",
        "tz": "Europe/Berlin",
        "kwargs": '{"text": "now"}',
        "overlap": "skip",
    }
    page = (await client.get("/schedules/new", params=typed)).text
    wrong = await client.get("/schedules/new", params={"cron": "0 3 1 *", "id": "month-end"})

    assert len(re.findall('datetime="[-0-9]{10}T0[12]:00:00', page)) == 5
    assert "At 03:00 on the first day of every month, Europe/Berlin" in page
    assert 'value="month-end"' in page
    assert "{&#34;text&#34;: &#34;now&#34;}" in page
    assert "<option selected>skip</option>" in page
    assert wrong.status_code == 400
    assert 'role="alert"' in wrong.text
    assert 'value="0 3 1 *"' in wrong.text
    assert await queue.schedules.list() == []
