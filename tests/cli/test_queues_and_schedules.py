"""`omniq queues`, `workers`, `breakers` and `schedules`."""

from __future__ import annotations

import pytest

from omniq.models import BreakerRule, TaskError, TaskStatus
from omniq.outcomes import Failed


def test_a_paused_queue_is_listed_and_resumed(omniq, queue):
    queue.options(queue="mail").enqueue("clitasks.add", 1)

    paused = omniq("queues", "pause", "mail", "web")
    assert paused.out == "paused: mail\npaused: web\n"
    assert paused.err == "web: no task and no worker names this queue now\n"
    mail, web = omniq("queues", "list", "--json").lines
    assert (mail["name"], mail["waiting"], mail["paused"]) == ("mail", 1, True)
    assert (web["waiting"], web["paused"]) == (0, True)
    assert "paused" in omniq("queues", "list").out

    resumed = omniq("queues", "resume", "mail", "web", "mial")
    assert resumed.err == "mial: this queue was not paused\n"
    assert [line["paused"] for line in omniq("queues", "list", "--json").lines] == [False]


def test_pausing_and_resuming_print_json_for_programs(omniq, queue):
    with queue.worker():
        worker = queue.workers()[0].id
        found = [
            omniq("queues", "pause", "mail", "web", "--json"),
            omniq("queues", "resume", "mail", "--json"),
            omniq("workers", "pause", worker, "--json"),
            omniq("workers", "resume", worker, "--json"),
        ]
    queue.schedules.add("nightly", "shop.tidy", cron="0 3 * * *")
    next_at = queue.schedules.get("nightly").next_at.isoformat()
    found += [
        omniq("schedules", "pause", "nightly", "--json"),
        omniq("schedules", "resume", "nightly", "--json"),
        omniq("schedules", "delete", "nightly", "--yes", "--json"),
    ]

    assert [(each.lines, each.err) for each in found] == [
        ([{"queue": "mail", "paused": True}, {"queue": "web", "paused": True}], ""),
        ([{"queue": "mail", "paused": False}], ""),
        ([{"worker": worker, "paused": True}], ""),
        ([{"worker": worker, "paused": False}], ""),
        ([{"schedule": "nightly", "paused": True}], ""),
        ([{"schedule": "nightly", "paused": False, "next_at": next_at}], ""),
        ([{"schedule": "nightly", "deleted": True}], ""),
    ]


def test_purging_a_queue_that_nothing_names_says_so(omniq, queue):
    queue.options(queue="mail").enqueue("shop.send")
    completed = omniq("queues", "purge", "mial", "mail", "--yes")

    assert (completed.code, completed.out) == (0, "cancelled: 1\n")
    assert completed.err == "mial: no task and no worker names this queue now\n"


def test_a_bad_queue_name_is_a_usage_error(omniq, queue):
    completed = omniq("queues", "pause", "a queue")

    assert completed.code == 2
    assert completed.err.startswith("omniq: queue 'a queue'")


def test_workers_are_listed_with_their_running_tasks(omniq, queue):
    with queue.worker(concurrency=3, queues=["mail"]):
        completed = omniq("workers")
        (record,) = omniq("workers", "--json").lines

    assert (record["concurrency"], record["queues"], record["running"]) == (3, ["mail"], [])
    assert record["id"] in completed.out
    assert "0/3" in completed.out


def test_a_worker_that_is_stopping_is_shown_as_such(omniq, queue):
    queue._portal.run(queue.storage.renew(concurrency=3, stopping=True))
    (record,) = omniq("workers", "--json").lines

    assert record["stopping"] is True
    assert "stopping" in omniq("workers").out
    assert "stopping" in omniq("stats").out


def test_an_open_breaker_is_shown_with_its_reason(omniq, queue):
    rule = BreakerRule(name="smtp", max_failures=1)
    queue.options(breaker=rule).enqueue("clitasks.add", 1)

    async def fail() -> None:
        (task,) = await queue.storage.reserve(1)
        error = TaskError("down", error_type="ConnectionError")
        await queue.storage.record([Failed(task.id, task.token, error)])

    queue._portal.run(fail())
    (record,) = omniq("breakers", "--json").lines
    assert (record["name"], record["state"], record["reason"]) == (
        "smtp",
        "open",
        "ConnectionError",
    )
    assert "ConnectionError" in omniq("breakers").out
    assert "smtp" in omniq("stats").out


def test_a_schedule_is_added_shown_paused_triggered_and_deleted(omniq, queue):
    added = omniq(
        *("schedules", "add", "nightly", "clitasks.add", "1", "-k", "b=2"),
        *("--cron", "0 3 * * MON-FRI", "--tz", "Europe/Berlin", "--missed", "skip"),
    )
    assert added.code == 0
    assert added.out.startswith("nightly: 0 3 * * MON-FRI Europe/Berlin, next ")

    (record,) = omniq("schedules", "list", "--json").lines
    assert (record["id"], record["missed"], record["paused"]) == ("nightly", "skip", False)
    assert "nightly" in omniq("schedules", "list").out

    omniq("schedules", "pause", "nightly")
    assert queue.schedules.get("nightly").paused
    omniq("schedules", "resume", "nightly")
    assert not queue.schedules.get("nightly").paused

    triggered = omniq("schedules", "trigger", "nightly").out.strip()
    assert queue.get_task(triggered).status is TaskStatus.PENDING
    assert queue.get_task(triggered).kwargs == {"b": 2}

    shown = omniq("schedules", "show", "nightly", "--next", "3")
    assert shown.out.count("next ") == 3
    assert len(omniq("schedules", "show", "nightly", "--json").json["upcoming"]) == 5

    assert omniq("schedules", "delete", "nightly").code == 2
    assert omniq("schedules", "delete", "nightly", "--yes").code == 0
    assert queue.schedules.list() == []


def test_a_backfill_enqueues_each_time_of_the_window_once(omniq, queue):
    omniq("schedules", "add", "hourly", "clitasks.add", "1", "--cron", "0 * * * *")
    window = ("--start", "2026-01-01T00:00Z", "--end", "2026-01-01T05:00Z")

    assert omniq("schedules", "backfill", "hourly", *window).out == "enqueued: 6 tasks\n"
    assert omniq("schedules", "backfill", "hourly", *window, "--json").lines == []


@pytest.mark.parametrize("command", ["show", "pause", "resume", "trigger", "delete"])
def test_a_missing_schedule_is_not_found(omniq, queue, command):
    completed = omniq("schedules", command, "missing")

    assert completed.code == 3
    assert "missing" in completed.err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--cron", "nonsense"),
        ("--interval", "-5"),
        ("--at", "tomorrow"),
        ("--interval", "1h", "--missed", "perhaps"),
    ],
)
def test_an_invalid_schedule_is_a_usage_error(omniq, queue, arguments):
    completed = omniq("schedules", "add", "s", "clitasks.add", "1", *arguments)

    assert completed.code == 2
    assert completed.err.count("\n") == 1
    assert queue.schedules.list() == []


def test_one_worker_is_paused_and_resumed(omniq, queue):
    with queue.worker(concurrency=3):
        (record,) = omniq("workers", "--json").lines
        paused = omniq("workers", "pause", record["id"])
        (shown,) = omniq("workers", "--json").lines
        resumed = omniq("workers", "resume", record["id"])
        (again,) = omniq("workers", "--json").lines

    assert paused.out == f"paused: {record['id']}\n"
    assert resumed.out == f"resumed: {record['id']}\n"
    assert (record["paused"], shown["paused"], again["paused"]) == (False, True, False)


def test_a_worker_that_is_not_alive_is_not_found(omniq, queue):
    for command in ("pause", "resume"):
        completed = omniq("workers", command, "missing")
        assert completed.code == 3
        assert "no live worker has that id" in completed.err


def test_a_paused_function_is_listed_with_reason_and_end_and_explained(omniq, queue):
    task_id = queue.enqueue("shop.send").id
    paused = omniq("functions", "pause", "shop.send", "--reason", "no mails", "--for", "2h")
    (listed,) = omniq("functions", "list", "--json").lines
    shown = omniq("functions", "list").out.splitlines()[1]
    explained = omniq("explain", task_id).out
    problems = queue.health().problems
    resumed = omniq("functions", "resume", "shop.send", "shop.other")

    assert paused.out == "paused: shop.send\n"
    assert (listed["function"], listed["reason"]) == ("shop.send", "no mails")
    assert shown.startswith(("shop.send  in 1h 59m", "shop.send  in 2h 0m"))
    assert "Its function shop.send is paused: no mails; until" in explained
    assert "omniq functions resume shop.send" in explained
    assert "function shop.send is paused: no mails" in problems
    assert resumed.err == "shop.other: this function was not paused\n"
    assert omniq("functions", "list").err == "no function is paused\n"


def test_a_pause_of_a_queue_has_a_reason_and_an_end(omniq, queue):
    task_id = queue.options(queue="mail").enqueue("shop.send").id
    omniq("queues", "pause", "mail", "--reason", "no mails", "--for", "90m")

    assert "Its queue mail is paused: no mails; until" in omniq("explain", task_id).out
