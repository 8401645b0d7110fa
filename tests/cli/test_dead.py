"""`omniq dead` and `omniq purge`."""

from __future__ import annotations

import json

import pytest

from omniq.models import DeadLetter, TaskStatus


def test_dead_letters_are_listed_with_the_error_in_a_line(omniq, dead_task):
    dead_task("RuntimeError: no route\nto host")
    said = omniq("dead", "list")
    (record,) = omniq("dead", "list", "--json").lines

    assert "RuntimeError: no route" in said.out
    assert "to host" not in said.out
    assert record.keys() == set(DeadLetter.__struct_fields__)


def test_filters_choose_by_function_reason_and_time(omniq, dead_task):
    mine, other = dead_task(), dead_task(func="clitasks.add")

    def chosen(*arguments: str) -> set[str]:
        return {record["task_id"] for record in omniq("dead", "list", "--json", *arguments).lines}

    assert chosen("--type", "clitasks.boom") == {mine}
    assert chosen("--since", "1h") == {mine, other}
    assert chosen("--until", "1h") == set()
    assert chosen("--reason", "crashed") == set()
    assert chosen("--after", min(mine, other)) == {max(mine, other)}


def test_one_is_shown_whole(omniq, dead_task):
    dead = dead_task("no route")
    said = omniq("dead", "show", dead)

    assert '["an argument"]' in said.out
    assert "RuntimeError: no route" in said.out
    assert omniq("dead", "show", dead, "--json").json["dead"]["task_id"] == dead


@pytest.mark.parametrize("command", ["show", "delete --yes", "retry --args []"])
def test_one_that_is_not_there_is_not_found(omniq, queue, command):
    name, *rest = command.split()
    said = omniq("dead", name, "nobody", *rest)

    assert said.code == 3
    assert "no such dead letter" in said.err


def test_a_retry_may_change_the_arguments(omniq, queue, dead_task):
    dead = dead_task()
    said = omniq("dead", "retry", dead, "--args", "[1, 2]", "--kwargs", '{"b": 3}')
    task = queue.get_task(dead)

    assert said.code == 0
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
def test_a_retry_that_makes_no_sense_is_bad_usage(omniq, queue, arguments):
    assert omniq("dead", "retry", *arguments).code == 2


def test_retrying_all_needs_a_yes(omniq, queue, dead_task):
    for _ in range(3):
        dead_task()

    assert omniq("dead", "retry", "--all").code == 2
    assert omniq("dead", "retry", "--all", "--yes").out == "back in the queue: 3\n"
    assert queue.stats().dead == 0


def test_a_retry_that_is_refused_says_which_and_why_and_fails(omniq, queue, dead_task):
    dead = dead_task(unique="key")
    other = dead_task()
    holder = queue.options(unique="key").enqueue("clitasks.add", 1)
    said = omniq("dead", "retry", dead, other)

    assert said.code == 1
    assert f"{dead}: task {holder.id} exists already" in said.err
    assert "1 of 2 could not be done" in said.err
    assert queue.get_task(other).status is TaskStatus.PENDING


def test_deleting_needs_a_yes(omniq, queue, dead_task):
    dead = dead_task()

    assert omniq("dead", "delete", dead).code == 2
    assert omniq("dead", "delete", dead, "--yes").code == 0
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
    said = omniq("dead", "export", "no/such/folder/file")

    assert said.code == 1
    assert said.err == "omniq: cannot write no/such/folder/file: No such file or directory\n"


def test_a_purge_takes_what_ended_and_leaves_the_rest(omniq, queue, dead_task):
    dead_task()
    waiting = queue.enqueue("clitasks.add", 1)

    assert omniq("purge", "--older-than", "0").code == 2
    assert omniq("purge", "--older-than", "1h", "--yes", "--json").json == {"tasks": 0, "dead": 0}
    assert omniq("purge", "--older-than", "0", "--yes").out == "forgotten: 1 task\n"
    assert queue.stats().dead == 1
    assert omniq("dead", "purge", "--older-than", "0", "--yes").code == 0
    assert queue.stats().dead == 0
    dead_task()
    assert omniq("purge", "--dead", "--older-than", "0", "--yes").out == (
        "forgotten: 1 task, 1 dead letter\n"
    )
    assert waiting.status() is TaskStatus.PENDING
