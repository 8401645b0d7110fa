"""Alerts: what is posted to a webhook, and when."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from omniq import AsyncTaskQueue
from omniq.dashboard.alerts import Alerts
from omniq.dashboard.sampler import Sampler
from omniq.errors import InvalidValue, SettingsError
from omniq.storage.memory import MemoryStorage
from omniq.testing.clock import ManualClock
from tests.browser.served import SECRET, dashboard_client, sign_in


@contextmanager
def webhook(status: int = 200):
    """A server on a free port; yields its URL and the list of the messages that it gets."""
    messages: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            messages.append(json.loads(body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/secret-path", messages
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
async def queue():
    """A queue in memory with a clock that the test moves."""
    async with MemoryStorage(clock=ManualClock()) as storage, AsyncTaskQueue(storage) as queue:
        yield queue


async def checked(alerts: Alerts, sampler: Sampler, times: int = 1) -> None:
    for _ in range(times):
        sampler.invalidate()
        await alerts.check()


async def test_a_problem_that_lasts_is_posted_once_and_again_when_it_ends(queue):
    await queue.enqueue("shop.say", "x")
    sampler = Sampler(queue.storage)
    with webhook() as (url, messages):
        alerts = Alerts(sampler, url)
        await checked(alerts, sampler)
        first = list(messages)
        await checked(alerts, sampler, 3)
        begun = list(messages)
        await queue.storage.renew(lease=3_600, concurrency=1)
        await checked(alerts, sampler, 2)
    await sampler.close()

    assert first == []
    assert [each["began"] for each in begun] == [["no worker is alive: 1 task in 1 queue"]]
    assert begun[0]["text"] == "omniq (memory): no worker is alive: 1 task in 1 queue"
    assert [each["ended"] for each in messages[1:]] == [begun[0]["began"]]


async def test_new_dead_letters_are_posted_at_most_every_15_minutes(queue, dead):
    await queue.storage.renew(lease=86_400, concurrency=1)
    await dead("old")
    sampler = Sampler(queue.storage)
    with webhook() as (url, messages):
        alerts = Alerts(sampler, url)
        await checked(alerts, sampler)
        await dead("one")
        await checked(alerts, sampler)
        await dead("two")
        await dead("three")
        await checked(alerts, sampler)
        within = list(messages)
        queue.storage.clock.advance(901)
        await checked(alerts, sampler)
    await sampler.close()

    assert [each["began"] for each in within] == [["1 new dead letter, 2 in all"]]
    assert messages[-1]["began"] == ["2 new dead letters, 4 in all"]


async def test_a_message_that_was_refused_is_posted_again(queue):
    await queue.enqueue("shop.say", "x")
    sampler = Sampler(queue.storage)
    with webhook(500) as (url, refused):
        alerts = Alerts(sampler, url)
        await checked(alerts, sampler)
        for _ in range(2):
            with pytest.raises(OSError, match="500"):
                await checked(alerts, sampler)
        with pytest.raises(InvalidValue, match="500"):
            await alerts.test()
    await sampler.close()

    assert [each["began"] for each in refused[:2]] == [
        ["no worker is alive: 1 task in 1 queue"]
    ] * 2


async def test_the_page_of_the_storage_posts_a_test(queue, monkeypatch):
    with webhook() as (url, messages):
        monkeypatch.setenv("OMNIQ_DASHBOARD_WEBHOOK", url)
        async with dashboard_client(queue) as client:
            token = await sign_in(client, SECRET)
            page = (await client.get("/storage")).text
            done = await client.post("/act/alerts/test", data={"token": token, "back": "/storage"})
            after = (await client.get("/storage")).text

    assert "127.0.0.1" in page
    assert "secret-path" not in page
    assert done.status_code == 303
    assert "Test message posted to 127.0.0.1" in after
    assert "test" in messages[0]["text"]


async def test_without_a_webhook_there_is_no_test(queue, client):
    token = await sign_in(client, SECRET)
    page = (await client.get("/storage")).text
    refused = await client.post("/act/alerts/test", data={"token": token})

    assert "OMNIQ_DASHBOARD_WEBHOOK" in page
    assert refused.status_code == 400


def test_a_webhook_must_be_a_url_of_the_web():
    with pytest.raises(SettingsError, match="OMNIQ_DASHBOARD_WEBHOOK"):
        Alerts(Sampler(MemoryStorage()), "file:///etc/passwd")
