"""`omniq tasks` and `omniq explain`."""

from __future__ import annotations

import pytest

from omniq.models import Task, TaskStatus


def test_the_newest_come_first_and_only_so_many(omniq, queue):
    ids = [queue.enqueue("clitasks.add", number).id for number in range(5)]
    said = omniq("tasks", "list", "--limit", "3")

    assert [line.split()[0] for line in said.out.splitlines()] == ["id", *reversed(ids[2:])]


def test_json_is_one_object_a_line_with_every_field(omniq, queue):
    queue.enqueue("clitasks.add", 1)
    (record,) = omniq("tasks", "list", "--json").lines

    assert record.keys() == set(Task.__struct_fields__)
    assert record["status"] == "pending"


def test_filters_choose(omniq, queue, dead_task):
    dead = dead_task()
    mine = queue.options(queue="web").enqueue("clitasks.add", 1).id
    queue.enqueue("other.func", 1)

    def chosen(*arguments: str) -> list[str]:
        return [record["id"] for record in omniq("tasks", "list", "--json", *arguments).lines]

    assert chosen("--status", "failed") == [dead]
    assert chosen("--queue", "web") == [mine]
    assert chosen("--func", "clitasks.add") == [mine]
    assert chosen("--status", "running") == []


def test_pages_go_on_where_the_last_one_ended(omniq, queue):
    ids = [queue.enqueue("clitasks.add", number).id for number in range(5)]
    page = omniq("tasks", "list", "--json", "--after", ids[1], "--limit", "2").lines
    every = omniq("tasks", "list", "--json", "--all").lines

    assert [record["id"] for record in page] == ids[2:4]
    assert [record["id"] for record in every] == ids


def test_nothing_to_list_is_a_word_on_stderr_and_nothing_on_stdout(omniq, queue):
    for command in (("tasks", "list"), ("dead", "list"), ("schedules", "list"), ("workers",)):
        said = omniq(*command)
        assert (said.code, said.out) == (0, "")
        assert said.err.startswith("no ")


def test_a_task_is_shown_with_its_arguments_and_what_happened(omniq, queue):
    handle = queue.options(metadata={"by": "ann"}).enqueue("clitasks.add", [1, "x"], b={"k": None})
    said = omniq("tasks", "show", handle.id)

    assert said.code == 0
    for words in (handle.id, "pending", '[[1, "x"]]', '{"b": {"k": null}}', "ann", "enqueued"):
        assert words in said.out
    assert f"omniq explain {handle.id}" in said.out


def test_a_failed_task_is_shown_with_its_traceback_and_what_to_do(omniq, dead_task):
    dead = dead_task("no route to host")
    said = omniq("tasks", "show", dead)

    assert "RuntimeError: no route to host" in said.out
    assert "Traceback" in said.out
    assert f"omniq dead retry {dead}" in said.out


def test_the_detail_as_json_has_stable_keys(omniq, dead_task):
    record = omniq("tasks", "show", dead_task(), "--json").json

    assert list(record) == [
        "task",
        "result",
        "attempts",
        "dead",
        "progress",
        "steps",
        "timeline",
    ]
    assert record["attempts"][0]["error"]["error_type"] == "RuntimeError"


def test_finished_steps_are_shown(omniq, queue):
    handle = queue.enqueue("tests.cli.stepping.stumble")
    with queue.worker(poll_interval=0.05):
        assert queue.get_result(handle.id, timeout=10).status is TaskStatus.FAILED
    said = omniq("tasks", "show", handle.id)
    (step,) = omniq("tasks", "show", handle.id, "--json").json["steps"]

    assert step == {"name": "upload", "result": "https://a.example/1"}
    assert "https://a.example/1" in said.out


@pytest.mark.parametrize("command", ["tasks show", "explain", "tasks cancel", "tasks retry"])
def test_a_task_that_is_not_on_record_is_not_found(omniq, queue, command):
    said = omniq(*command.split(), "nobody")

    assert said.code == 3
    assert said.err == "omniq: task nobody: no such task on record\n"


def test_cancelling_is_done_once(omniq, queue):
    handle = queue.enqueue("clitasks.add", 1)
    first, second = (omniq("tasks", "cancel", handle.id) for _ in range(2))

    assert (first.code, first.out) == (0, "cancelled: 1\n")
    assert second.code == 1
    assert "ended already: cancelled" in second.err
    assert handle.status() is TaskStatus.CANCELLED


def test_cancelling_many_needs_a_yes_and_takes_only_what_was_chosen(omniq, queue):
    web = [queue.options(queue="web").enqueue("clitasks.add", 1) for _ in range(3)]
    mail = queue.options(queue="mail").enqueue("clitasks.add", 1)

    asked = omniq("tasks", "cancel", "--all", "--queue", "web")
    assert asked.code == 2
    assert "Cancel 3 tasks? Say --yes" in asked.err
    assert web[0].status() is TaskStatus.PENDING

    done = omniq("tasks", "cancel", "--all", "--queue", "web", "--yes", "--json")
    assert done.json == {"done": 3, "refused": {}}
    assert mail.status() is TaskStatus.PENDING


@pytest.mark.parametrize(
    "arguments", [("cancel",), ("cancel", "a", "--all"), ("cancel", "a", "--queue", "web")]
)
def test_neither_ids_nor_all_is_bad_usage(omniq, queue, arguments):
    assert omniq("tasks", *arguments).code == 2


def test_retrying_a_failed_task_puts_it_back(omniq, queue, dead_task):
    dead = dead_task()
    said = omniq("tasks", "retry", dead)

    assert (said.code, said.out) == (0, "back in the queue: 1\n")
    assert queue.get_task(dead).status is TaskStatus.PENDING
    assert "is pending, not a dead letter" in omniq("tasks", "retry", dead).err


def test_explain_gives_a_chain_of_reasons_and_what_to_do(omniq, queue):
    handle = queue.options(queue="mail", delay=3600).enqueue("clitasks.add", 1)
    omniq("queues", "pause", "mail")
    said = omniq("explain", handle.id)
    record = omniq("explain", handle.id, "--json").json

    assert [reason["code"] for reason in record["reasons"]] == [
        "not_due",
        "queue_paused",
        "no_worker",
    ]
    assert "1. is not due yet; until" in said.out
    assert "→ omniq queues resume mail" in said.out
    assert "→ start one: omniq worker clitasks" in said.out


def test_deleting_forgets_what_has_ended_and_nothing_else(omniq, queue, dead_task):
    dead = dead_task()
    waiting = queue.enqueue("clitasks.add", 1).id
    said = omniq("tasks", "delete", "--all", "--yes")

    assert said.code == 0
    assert [record["id"] for record in omniq("tasks", "list", "--json").lines] == [waiting]
    assert omniq("tasks", "show", dead).code == 3


def test_deleting_what_waits_is_refused_with_its_reason(omniq, queue):
    waiting = queue.enqueue("clitasks.add", 1).id
    said = omniq("tasks", "delete", waiting)

    assert "has not ended: pending" in said.out + said.err
    assert queue.get_task(waiting) is not None
