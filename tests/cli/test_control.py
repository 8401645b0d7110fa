"""Commands that change waiting tasks, workers, queues and breakers, and `omniq events`."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from omniq.models import BreakerRule, TaskError, TaskStatus
from omniq.outcomes import Failed
from tests.cli.terminal import TIMEOUT, Terminal

pytestmark = pytest.mark.timeout(120)


def test_a_waiting_task_is_made_due_now(omniq, queue):
    handle = queue.options(delay=3600).enqueue("clitasks.add", 1)

    completed = omniq("tasks", "run", handle.id[:14])
    assert (completed.code, completed.out) == (0, f"{handle.id}: due now\n")
    due = queue.get_task(handle.id).eta
    assert due is None or due <= datetime.now(UTC)
    assert omniq("tasks", "run", handle.id, "--json").json["id"] == handle.id


def test_the_priority_queue_and_due_time_of_a_waiting_task_change(omniq, queue):
    handle = queue.enqueue("clitasks.add", 1)

    completed = omniq("tasks", "change", handle.id, "-p", "7", "-q", "mail", "--delay", "2h")
    assert completed.code == 0
    assert completed.out.startswith(f"{handle.id}: queue mail, priority 7, due in ")
    task = queue.get_task(handle.id)
    assert (task.queue, task.priority) == ("mail", 7)

    changed = omniq("tasks", "change", handle.id, "--eta", "2099-01-31T12:00Z", "--json").json
    assert changed["eta"].startswith("2099-01-31T12:00:00")


def test_what_cannot_be_changed_is_refused_with_a_reason(omniq, queue, dead_task):
    dead = dead_task()

    refused = omniq("tasks", "change", dead, "--priority", "1")
    assert refused.code == 1
    assert "failed" in refused.err
    assert omniq("tasks", "run", dead).code == 1
    assert omniq("tasks", "run", "missing-task").code == 3
    nothing = omniq("tasks", "change", dead)
    assert (nothing.code, "--priority" in nothing.err) == (2, True)
    assert omniq("tasks", "change", dead, "--eta", "now").code == 2


def test_an_id_that_is_too_short_is_named(omniq, queue):
    queue.options(task_id="report-2026").enqueue("clitasks.add", 1)

    short = omniq("tasks", "show", "rep")
    assert short.code == 3
    assert "give at least 6 characters" in short.err
    assert omniq("tasks", "show", "zzz").code == 3
    queue.options(task_id="rep").enqueue("clitasks.add", 1)
    assert omniq("tasks", "show", "rep").code == 0


def test_a_queue_is_purged_of_its_waiting_tasks(omniq, queue):
    kept = queue.enqueue("clitasks.add", 1)
    gone = [queue.options(queue="mail", delay=60).enqueue("clitasks.add", n) for n in (1, 2)]

    assert omniq("queues", "purge", "mail").code == 2
    assert omniq("queues", "purge", "mail", "--yes").out == "cancelled: 2\n"
    assert {queue.get_task(each.id).status for each in gone} == {TaskStatus.CANCELLED}
    assert queue.get_task(kept.id).status is TaskStatus.PENDING
    assert omniq("queues", "purge", "mail", "-y", "--json").json == {"done": 0, "refused": {}}


def test_an_open_breaker_is_closed(omniq, queue):
    rule = BreakerRule(name="smtp", max_failures=1)
    queue.options(breaker=rule).enqueue("clitasks.add", 1)

    async def fail() -> None:
        (task,) = await queue.storage.reserve(1)
        error = TaskError("down", error_type="ConnectionError")
        await queue.storage.record([Failed(task.id, task.token, error)])

    queue._portal.run(fail())
    assert omniq("breakers", "--json").json["state"] == "open"
    assert omniq("breakers", "close", "smtp").out == "closed: smtp\n"
    assert omniq("breakers", "list", "--json").json["state"] == "closed"
    missing = omniq("breakers", "close", "imap")
    assert (missing.code, "imap" in missing.err) == (3, True)
    assert omniq("breakers", "close", "smtp", "--json").json == {
        "breaker": "smtp",
        "state": "closed",
    }


def test_workers_are_pinged_asked_for_their_functions_and_stopped(omniq, run_worker):
    worker, process = run_worker("clitasks")

    answered = omniq("workers", "ping")
    assert (answered.code, answered.err) == (0, "")
    assert answered.out.startswith(f"{worker}: answered in ")
    assert omniq("workers", "ping", worker[:12], "--json").json["worker"] == worker

    listed = omniq("workers", "functions")
    assert "clitasks.add" in listed.out
    functions = omniq("workers", "functions", worker, "--json").lines
    assert {"function": "clitasks.boom", "workers": [worker]} in functions

    assert omniq("workers", "stop").code == 2
    assert omniq("workers", "stop", worker[:12]).out == f"stopping: {worker}\n"
    assert process.wait(TIMEOUT) == 0
    assert omniq("workers", "stop", worker).code == 3
    assert omniq("workers", "ping", worker).code == 3
    assert "no worker is alive" in omniq("workers", "ping").err
    assert omniq("workers", "stop", "--all", "--yes").out == ""


@pytest.fixture
def run_worker(queue, url, folder):
    """Start `omniq worker`; return the id of the worker, and its process."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*modules: str) -> tuple[str, subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "omniq", "worker", *modules, "--url", url]
        started.append(subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL))
        for _ in range(200):
            if found := queue.workers():
                return found[0].id, started[-1]
            queue._portal.run(queue.storage.clock.sleep(0.1))
        raise AssertionError("no worker has started")

    yield run
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT)


def test_limits_are_listed(omniq, queue):
    assert "no task has named a limit" in omniq("limits").err
    queue.options(max_running=2, limit_key="api").enqueue("clitasks.add", 1)
    (record,) = omniq("limits", "--json").lines

    assert (record["key"], record["waiting"], record["max_running"]) == ("api", 1, 2)
    assert "0/2" in omniq("limits").out


def test_limits_are_changed_held_and_put_back(omniq, queue):
    queue.options(max_running=2, limit_key="api").enqueue("clitasks.add", 1)
    omniq("limits", "set", "api", "--max-running", "5", "--rate", "10/2m")
    omniq("limits", "hold", "api", "--for", "2h", "--reason", "the provider is down")
    (held,) = omniq("limits", "--json").lines
    shown = omniq("limits").out
    omniq("limits", "release", "api")
    omniq("limits", "reset", "api")
    (record,) = omniq("limits", "--json").lines

    assert (held["max_running"], held["rate"], held["per"]) == (5, 10, 120.0)
    assert (held["is_held"], held["reason"]) == (True, "the provider is down")
    assert "held" in shown
    assert (record["max_running"], record["is_changed"], record["is_held"]) == (2, False, False)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("set", "apj", "--max-running", "1"), "apj: no task that runs"),
        (("hold", "apj"), "apj: no task that runs"),
        (("release", "api"), "api: this limit was not held"),
        (("reset", "apj"), "apj: this limit was not changed"),
    ],
)
def test_a_limit_that_no_task_has_is_named(omniq, queue, words, note):
    queue.options(max_running=2, limit_key="api").enqueue("clitasks.add", 1)

    assert note in omniq("limits", *words).err
    assert omniq("limits", "set", "api", "--max-running", "1").err == ""
    assert omniq("limits", "reset", "api").err == ""


def test_events_are_printed_as_they_happen(queue, url, folder):
    command = [sys.executable, "-m", "omniq", "events", "--json", "-i", "0.1", "--url", url]
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        # What is enqueued before its first poll is not reported.
        while not select.select([process.stdout], [], [], 0.2)[0]:
            queue.enqueue("clitasks.add", 1)
        found = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(TIMEOUT) == 0

    assert found["event"] == "task.enqueued"
    assert found["func_path"] == "clitasks.add"


def test_events_end_after_the_given_time(omniq, queue):
    completed = omniq("events", "--duration", "200ms", "--interval", "0.1")

    assert (completed.code, completed.out) == (0, "")


def test_the_list_of_tasks_can_be_watched(queue, url, folder):
    view = Terminal(folder, "tasks", "list", "--watch", "-i", "0.1", "--url", url)
    try:
        view.wait_for("0 tasks")
        queue.enqueue("clitasks.add", 1)
        view.wait_for("1 task ")
        view.wait_for("clitasks.add")
        view.press("q")

        assert view.ends() == 0
        assert view.is_as_it_was
    finally:
        view.close()


def test_watch_prints_the_list_once_in_a_pipe(omniq, queue):
    queue.enqueue("clitasks.add", 1)

    assert "clitasks.add" in omniq("tasks", "list", "--watch").out
    assert omniq("tasks", "list", "--watch", "--json").code == 2
