"""`omniq dead` and `omniq purge`."""

from __future__ import annotations

import json

import pytest

from omniq.models import DeadLetter, TaskError, TaskStatus
from omniq.outcomes import Failed


def test_dead_letters_are_listed_with_the_error_in_a_line(omniq, dead_task):
    dead_task("RuntimeError: no route\nto host")
    completed = omniq("dead", "list")
    (record,) = omniq("dead", "list", "--json").lines

    assert "RuntimeError: no route" in completed.out
    assert "to host" not in completed.out
    stored = set(DeadLetter.__struct_encode_fields__) - {"own_type"}
    assert record.keys() == stored | {"id", "func_path"}


def test_filters_choose_by_function_reason_and_time(omniq, dead_task):
    mine, other = dead_task(), dead_task(func="clitasks.add")

    def chosen(*arguments: str) -> set[str]:
        return {record["task_id"] for record in omniq("dead", "list", "--json", *arguments).lines}

    assert chosen("--func", "clitasks.boom") == {mine}
    assert chosen("--type", "clitasks.boom") == {mine}
    assert chosen("--since", "1h") == {mine, other}
    assert chosen("--until", "1h") == set()
    assert chosen("--reason", "crashed") == set()
    assert chosen("--after", min(mine, other)) == {max(mine, other)}


def test_a_dead_letter_is_shown_completely(omniq, dead_task):
    dead = dead_task("no route")
    completed = omniq("dead", "show", dead)

    assert '["an argument"]' in completed.out
    assert "RuntimeError: no route" in completed.out
    assert omniq("dead", "show", dead, "--json").json["dead"]["task_id"] == dead


def test_an_error_without_a_traceback_and_a_hint_are_not_cut(omniq, queue):
    message, hint = "very " * 30 + "long", "try " * 40 + "again"
    handle = queue.enqueue("clitasks.boom", "an argument")

    async def fail() -> None:
        (held,) = await queue.storage.reserve(1)
        error = TaskError(message, error_type="TypeError", recovery_hint=hint)
        await queue.storage.record([Failed(held.id, held.token, error)])

    queue._portal.run(fail())
    shown = " ".join(omniq("dead", "show", handle.id).out.split())

    assert f"TypeError: {message}" in shown
    assert f"hint: {hint}" in shown


def test_a_dead_letter_that_is_not_verified_is_shown_as_such(omniq, dead_task, monkeypatch):
    dead = dead_task("no route")
    monkeypatch.setenv("OMNIQ_SIGNING_KEY", "the key of another day")
    edited = omniq("dead", "retry", dead, "--args", "[1]")

    assert "not verified: no route" in omniq("dead", "list").out
    assert "not verified: it was stored without the key" in omniq("dead", "show", dead).out
    assert edited.code != 0
    assert "enqueue a new task instead" in edited.err
    assert not omniq("dead", "show", dead, "--json").json["dead"]["is_verified"]


@pytest.mark.parametrize("command", ["show", "delete --yes", "retry --args []"])
def test_a_missing_dead_letter_is_not_found(omniq, queue, command):
    name, *rest = command.split()
    completed = omniq("dead", name, "missing", *rest)

    assert completed.code == 3
    assert "no such dead letter" in completed.err


def test_a_retry_may_change_the_arguments(omniq, queue, dead_task):
    dead = dead_task()
    completed = omniq("dead", "retry", dead, "--args", "[1, 2]", "--kwargs", '{"b": 3}')
    task = queue.get_task(dead)

    assert completed.code == 0
    assert (task.status, task.args, task.kwargs) == (TaskStatus.PENDING, (1, 2), {"b": 3})


@pytest.mark.parametrize(
    "arguments",
    [
        ("a", "b", "--args", "[]"),
        ("--all", "--args", "[]"),
        ("a", "--args", "{}"),
        ("a", "--kwargs", "[]"),
        ("a", "--args", "word"),
        (),
    ],
)
def test_an_invalid_retry_is_a_usage_error(omniq, queue, arguments):
    assert omniq("dead", "retry", *arguments).code == 2


def test_retrying_all_needs_confirmation(omniq, queue, dead_task):
    for _ in range(3):
        dead_task()

    assert omniq("dead", "retry", "--all").code == 2
    assert omniq("dead", "retry", "--all", "--yes").out == "back in the queue: 3\n"
    assert queue.stats().dead == 0


def test_a_refused_retry_names_the_task_and_the_reason_and_fails(omniq, queue, dead_task):
    dead = dead_task(unique="key")
    other = dead_task()
    holder = queue.options(unique="key").enqueue("clitasks.add", 1)
    completed = omniq("dead", "retry", dead, other)

    assert completed.code == 1
    assert f"{dead}: task {holder.id} exists already" in completed.err
    assert "1 of 2 could not be done" in completed.err
    assert queue.get_task(other).status is TaskStatus.PENDING


def test_deleting_dead_letters_needs_confirmation(omniq, queue, dead_task):
    dead = dead_task()

    assert omniq("dead", "delete", dead).code == 2
    assert omniq("dead", "delete", dead, "--yes").code == 0
    assert queue.stats().dead == 0


def test_dead_letters_are_deleted_by_filter(omniq, queue, dead_task):
    dead_task()
    dead_task("no route")

    assert omniq("dead", "delete").code == 2
    assert omniq("dead", "delete", "--func", "clitasks.add", "--yes").code == 2
    assert omniq("dead", "delete", "--all").code == 2
    assert omniq("dead", "delete", "--all", "--func", "other.function", "--yes").code == 0
    assert queue.stats().dead == 2
    assert omniq("dead", "delete", "--all", "--since", "1h", "--yes").code == 0
    assert queue.stats().dead == 0


def test_an_export_is_json_lines_with_the_call_and_every_attempt(omniq, dead_task, folder):
    dead = dead_task("no route")
    to_stdout = omniq("dead", "export")
    to_file = omniq("dead", "export", "letters.jsonl")

    (record,) = to_stdout.lines
    assert (record["task_id"], record["args"]) == (dead, ["an argument"])
    assert record["attempts"][0]["error"]["message"] == "no route"
    assert to_file.out == ""
    assert to_file.err == "1 dead letter exported\n"
    assert json.loads((folder / "letters.jsonl").read_text()) == record


def test_an_export_that_cannot_be_written_fails_in_one_line(omniq, dead_task):
    dead_task()
    completed = omniq("dead", "export", "no/such/folder/file")

    assert completed.code == 1
    assert completed.err == "omniq: cannot write no/such/folder/file: No such file or directory\n"


def test_purge_deletes_finished_tasks_only(omniq, queue, dead_task):
    dead_task()
    waiting = queue.enqueue("clitasks.add", 1)

    assert omniq("purge", "--older-than", "0").code == 2
    assert "ended more than 7.0 s ago?" in omniq("purge", "--older-than", "7").err
    assert omniq("purge", "--older-than", "1h", "--yes", "--json").json == {"tasks": 0, "dead": 0}
    assert omniq("purge", "--older-than", "0", "--yes").out == "purged: 1 task\n"
    assert queue.stats().dead == 1
    assert omniq("dead", "purge", "--older-than", "0", "--yes").code == 0
    assert queue.stats().dead == 0
    dead_task()
    assert omniq("purge", "--dead", "--older-than", "0", "--yes").out == (
        "purged: 1 task, 1 dead letter\n"
    )
    assert waiting.status() is TaskStatus.PENDING
