"""`omniq tasks` and `omniq explain`."""

from __future__ import annotations

import pytest

from omniq.models import Task, TaskStatus
from omniq.outcomes import Released, Succeeded
from omniq.tasks.task_output import StoredChunk, encode_log
from omniq.testing.builders import a_result, an_output


def test_the_newest_tasks_are_listed_first_up_to_the_limit(omniq, queue):
    ids = [queue.enqueue("clitasks.add", number).id for number in range(5)]
    completed = omniq("tasks", "list", "--limit", "3")

    assert [line.split()[0] for line in completed.out.splitlines()] == ["id", *reversed(ids[2:])]


def test_json_is_one_object_a_line_with_every_field(omniq, queue):
    queue.enqueue("clitasks.add", 1)
    (record,) = omniq("tasks", "list", "--json").lines

    assert record.keys() == set(Task.__struct_fields__) | {"failures"}
    assert record["status"] == "pending"


def test_filters_select_tasks(omniq, queue, dead_task):
    dead = dead_task()
    mine = queue.options(queue="web").enqueue("clitasks.add", 1).id
    queue.enqueue("other.func", 1)

    def chosen(*arguments: str) -> list[str]:
        return [record["id"] for record in omniq("tasks", "list", "--json", *arguments).lines]

    assert chosen("--status", "failed") == [dead]
    assert chosen("--queue", "web") == [mine]
    assert chosen("--func", "clitasks.add") == [mine]
    assert chosen("--status", "running") == []


@pytest.mark.parametrize("group", ["tasks", "dead", "queues", "schedules", "workers"])
def test_a_group_without_a_command_lists(omniq, queue, dead_task, group):
    dead_task()
    queue.enqueue("clitasks.add", 1)

    alone, listed = omniq(group, "--json"), omniq(group, "list", "--json")
    assert alone.code == 0
    assert [line.keys() for line in alone.lines] == [line.keys() for line in listed.lines]
    assert omniq(group).code == 0
    assert "Usage:" in omniq(group, "--help").out


def test_options_without_a_command_are_those_of_the_list(omniq, queue, dead_task):
    dead = dead_task()
    queue.enqueue("clitasks.add", 1)
    assert [record["id"] for record in omniq("tasks", "-s", "failed", "--json").lines] == [dead]


def test_the_beginning_of_an_id_stands_for_the_id(omniq, queue, dead_task):
    dead = dead_task()
    first = queue.options(task_id="report-2026-01").enqueue("clitasks.add", 1).id
    second = queue.options(task_id="report-2026-02").enqueue("clitasks.add", 1).id

    assert omniq("tasks", "show", f"{first[:-1]}1", "--json").json["task"]["id"] == first
    assert omniq("explain", dead[:-2], "--json").json["task_id"] == dead
    assert omniq("dead", "show", dead[:-2]).code == 0
    assert omniq("tasks", "cancel", "report-2026-01").code == 0
    assert queue.get_task(second).status is TaskStatus.PENDING

    several = omniq("tasks", "cancel", "report-2026")
    assert several.code != 0
    assert "the beginning of several ids, such as report-2026-01 and report-2026-02" in several.err
    assert queue.get_task(second).status is TaskStatus.PENDING
    assert omniq("tasks", "show", "repor").code == 3
    assert omniq("dead", "retry", dead[:-2]).code == 0


def test_a_page_continues_after_the_previous_one(omniq, queue):
    ids = [queue.enqueue("clitasks.add", number).id for number in range(5)]
    page = omniq("tasks", "list", "--json", "--after", ids[1], "--limit", "2").lines
    every = omniq("tasks", "list", "--json", "--all").lines

    assert [record["id"] for record in page] == ids[2:4]
    assert [record["id"] for record in every] == ids


def test_an_empty_list_prints_a_note_on_stderr_only(omniq, queue):
    for command in (("tasks", "list"), ("dead", "list"), ("schedules", "list"), ("workers",)):
        completed = omniq(*command)
        assert (completed.code, completed.out) == (0, "")
        assert completed.err.startswith("no ")


def test_a_task_is_shown_with_its_arguments_and_what_happened(omniq, queue):
    handle = queue.options(metadata={"by": "ann"}).enqueue("clitasks.add", [1, "x"], b={"k": None})
    completed = omniq("tasks", "show", handle.id)

    assert completed.code == 0
    for text in (handle.id, "pending", '[[1, "x"]]', '{"b": {"k": null}}', "ann", "enqueued"):
        assert text in completed.out
    assert f"omniq explain {handle.id}" in completed.out


def test_a_failed_task_is_shown_with_its_traceback_and_what_to_do(omniq, dead_task):
    dead = dead_task("no route to host")
    completed = omniq("tasks", "show", dead)

    assert "RuntimeError: no route to host" in completed.out
    assert "Traceback" in completed.out
    assert f"omniq dead retry {dead}" in completed.out


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
        "pending_hook",
        "output",
    ]
    assert record["attempts"][0]["error"]["error_type"] == "RuntimeError"


def test_finished_steps_are_shown(omniq, queue):
    handle = queue.enqueue("tests.cli.stepping.stumble")
    with queue.worker(poll_interval=0.05):
        assert queue.get_result(handle.id, timeout=30).status is TaskStatus.FAILED
    completed = omniq("tasks", "show", handle.id)
    (step,) = omniq("tasks", "show", handle.id, "--json").json["steps"]

    assert step == {"name": "upload", "result": "https://a.example/1"}
    assert "https://a.example/1" in completed.out


@pytest.mark.parametrize("command", ["tasks show", "explain", "tasks cancel", "tasks retry"])
def test_a_task_that_is_not_on_record_is_not_found(omniq, queue, command):
    completed = omniq(*command.split(), "missing")

    assert completed.code == 3
    assert completed.err == "omniq: task missing: no such task on record\n"


def test_cancelling_is_done_once(omniq, queue):
    handle = queue.enqueue("clitasks.add", 1)
    first, second = (omniq("tasks", "cancel", handle.id) for _ in range(2))

    assert (first.code, first.out) == (0, "cancelled: 1\n")
    assert second.code == 1
    assert "ended already: cancelled" in second.err
    assert handle.status() is TaskStatus.CANCELLED


def test_cancelling_many_needs_confirmation_and_cancels_only_matching_tasks(omniq, queue):
    web = [queue.options(queue="web").enqueue("clitasks.add", 1) for _ in range(3)]
    mail = queue.options(queue="mail").enqueue("clitasks.add", 1)

    unconfirmed = omniq("tasks", "cancel", "--all", "--queue", "web")
    assert unconfirmed.code == 2
    assert "Cancel 3 tasks? Add --yes" in unconfirmed.err
    assert web[0].status() is TaskStatus.PENDING

    done = omniq("tasks", "cancel", "--all", "--queue", "web", "--yes", "--json")
    assert done.json == {"done": 3, "refused": {}}
    assert mail.status() is TaskStatus.PENDING


@pytest.mark.parametrize(
    "arguments", [("cancel",), ("cancel", "a", "--all"), ("cancel", "a", "--queue", "web")]
)
def test_neither_ids_nor_all_is_a_usage_error(omniq, queue, arguments):
    assert omniq("tasks", *arguments).code == 2


def test_retrying_a_failed_task_enqueues_it_again(omniq, queue, dead_task):
    dead = dead_task()
    completed = omniq("tasks", "retry", dead)

    assert (completed.code, completed.out) == (0, "back in the queue: 1\n")
    assert queue.get_task(dead).status is TaskStatus.PENDING
    assert "is pending, not a dead letter" in omniq("tasks", "retry", dead).err


def test_explain_lists_all_reasons_and_what_to_do(omniq, queue):
    handle = queue.options(queue="mail", delay=3600).enqueue("clitasks.add", 1)
    omniq("queues", "pause", "mail")
    completed = omniq("explain", handle.id)
    record = omniq("explain", handle.id, "--json").json

    assert [reason["code"] for reason in record["reasons"]] == [
        "not_due",
        "queue_paused",
        "no_worker",
    ]
    assert "1. The task is not due yet; until" in completed.out
    assert "→ omniq queues resume mail" in completed.out
    assert "→ start one, with the module of the function: omniq worker MODULE" in completed.out


def test_delete_all_deletes_finished_tasks_only(omniq, queue, dead_task):
    dead = dead_task()
    waiting = queue.enqueue("clitasks.add", 1).id
    completed = omniq("tasks", "delete", "--all", "--yes")

    assert completed.code == 0
    assert [record["id"] for record in omniq("tasks", "list", "--json").lines] == [waiting]
    assert omniq("tasks", "show", dead).code == 3


def test_deleting_a_waiting_task_is_refused_with_the_reason(omniq, queue):
    waiting = queue.enqueue("clitasks.add", 1).id
    completed = omniq("tasks", "delete", waiting)

    assert "has not ended: pending" in completed.out + completed.err
    assert queue.get_task(waiting) is not None


@pytest.fixture
def talkative(queue):
    """A task whose first run was released, and whose second one has ended; returns its id."""
    handle = queue.enqueue("clitasks.add", 1)

    async def talk() -> None:
        storage = queue.storage
        (task,) = await storage.reserve(1)
        line = StoredChunk(0, encode_log("begins password=hunter2", "warning", {"size": 3}))
        await storage.append_output([an_output(handle.id, task.token, line, "half a ", first=4)])
        await storage.record([Released(handle.id, task.token)])
        (task,) = await storage.reserve(1)
        batch = an_output(
            handle.id, task.token, "Once ", "upon", {"api_key": "k"}, "end", attempt=2
        )
        await storage.append_output([batch])
        await storage.record([Succeeded(handle.id, task.token, a_result(task))])

    queue._portal.run(talk())
    return handle.id


@pytest.mark.parametrize("how", [(), ("--follow",)])
def test_the_output_of_a_task_is_printed_run_by_run(omniq, talkative, how):
    assert omniq("tasks", "output", talkative, *how).out.splitlines() == [
        "-- attempt 1",
        "-- 3 earlier chunks are not shown",
        "00:00:00Z warning begins password=*** size=3",
        "half a ",
        "-- attempt 2",
        "Once upon",
        '{"api_key": "[redacted]"}',
        "end",
    ]


@pytest.mark.parametrize("how", [(), ("--follow",)])
def test_the_output_of_a_task_as_json_is_one_chunk_a_line(omniq, talkative, how):
    chunks = omniq("tasks", "output", talkative, "--json", "--tail", "3", *how).lines

    assert [chunk["value"] for chunk in chunks] == ["upon", {"api_key": "k"}, "end"]
    assert (chunks[0]["attempt"], chunks[0]["number"], chunks[0]["missed"]) == (2, 2, 1)


def test_a_task_is_shown_with_the_end_of_its_output(omniq, talkative):
    assert "Once upon" in omniq("tasks", "show", talkative).out
    assert len(omniq("tasks", "show", talkative, "--json").json["output"]) == 6


def test_the_output_of_a_task_that_has_none_or_is_unknown(omniq, queue):
    silent = queue.enqueue("clitasks.add", 1).id

    assert (omniq("tasks", "output", silent).code, omniq("tasks", "output", silent).out) == (0, "")
    assert omniq("tasks", "output", "unknown-task").code == 3


def test_a_dry_run_shows_how_many_match_and_changes_nothing(omniq, queue):
    ids = [queue.enqueue("clitasks.add", number).id for number in range(7)]
    queue.enqueue("clitasks.boom", "x")
    command = ("tasks", "cancel", "--all", "--func", "clitasks.add", "--dry-run")
    done = omniq(*command)

    assert done.out.splitlines() == [
        "7 tasks would be cancelled",
        *(f"  {each}" for each in sorted(ids)[:5]),
        "  and 2 more",
    ]
    assert omniq(*command, "--json").json == {"matches": 7, "first": sorted(ids)[:5]}
    assert omniq("tasks", "cancel", "--dry-run").code == 2
    assert queue.stats().by_status["pending"] == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cancel",), "cancelled: 1\n"),
        (("change", "--priority", "3"), "changed: 1\n"),
        (("run",), "due now: 1\n"),
    ],
)
def test_a_search_selects_what_is_changed_and_a_second_call_finds_nothing(
    omniq, queue, arguments, said
):
    queue.options(delay=3600).enqueue("clitasks.add", 1, b=17)
    queue.options(delay=3600).enqueue("clitasks.add", 1, b=18)
    command = ("tasks", *arguments, "--all", "--search", "arg.b:17", "--yes")

    assert omniq(*command).out == said
    assert omniq(*command).out == said.replace("1", "0")


def test_failed_tasks_are_retried_by_filter(omniq, queue, dead_task):
    dead_task("card refused")
    dead_task("no such mailbox")

    assert omniq("tasks", "retry", "--all", "--search", "error:card", "--yes").code == 0
    assert omniq(
        "dead", "delete", "--all", "--search", "error:mailbox", "--dry-run"
    ).out.startswith("1 dead letter would be deleted\n")
    assert len(queue.dead.list()) == 1


def test_an_empty_search_does_not_select_everything(omniq, queue):
    queue.enqueue("clitasks.add", 1)
    for group in ("tasks", "dead"):
        refused = omniq(group, "delete", "--all", "--search", "", "--yes")

        assert refused.code == 2
        assert "--search is empty" in refused.err


def test_a_change_of_many_reports_its_progress_as_json_lines(omniq, queue, monkeypatch):
    monkeypatch.setattr("omniq.operations.bulk_selection.STEP", 2)
    queue.enqueue_many([("clitasks.add", (number,)) for number in range(5)])
    done = omniq("tasks", "cancel", "--all", "--yes", "--json")

    assert done.lines == [
        {"progress": 2, "total": 5},
        {"progress": 4, "total": 5},
        {"done": 5, "refused": {}},
    ]
