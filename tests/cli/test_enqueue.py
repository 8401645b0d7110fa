"""`omniq enqueue`."""

from __future__ import annotations

import pytest

from omniq.models import NO_TIMEOUT, TaskStatus


def test_it_prints_the_id_of_a_task_with_these_arguments(omniq, queue):
    completed = omniq("enqueue", "clitasks.add", "-1", "-k", "b=2")
    task = queue.get_task(completed.out.strip())

    assert completed.code == 0
    assert (task.func_path, task.args, task.kwargs) == ("clitasks.add", (-1,), {"b": 2})


def test_any_json_is_an_argument(omniq, queue):
    completed = omniq(
        "enqueue", "some.where", "null", '"text"', "[1, 2.5]", '{"a": true}', "--json"
    )

    assert queue.get_task(completed.json["id"]).args == (None, "text", [1, 2.5], {"a": True})


def test_the_module_need_not_be_importable(omniq, queue):
    completed = omniq("enqueue", "not_here.at.all", "1")

    assert queue.get_task(completed.out.strip()).func_path == "not_here.at.all"
    assert completed.err.startswith("not_here.at.all: its module is not here; enqueued unchecked")


def test_a_module_whose_import_fails_is_reported_and_the_task_is_enqueued(omniq, queue, folder):
    (folder / "clibroken.py").write_text("import a_driver_that_only_workers_have")
    completed = omniq("enqueue", "clibroken.work", "1")

    assert completed.code == 0
    assert "a_driver_that_only_workers_have" in completed.err
    assert queue.get_task(completed.out.strip()).func_path == "clibroken.work"


def test_the_options_of_the_decorator_apply_unless_overridden(omniq, queue):
    plain = omniq("enqueue", "clitasks.boom", "1").out.strip()
    other = omniq("enqueue", "clitasks.boom", "1", "--queue", "web", "--max-retries", "7")

    assert (queue.get_task(plain).queue, queue.get_task(plain).max_retries) == ("mail", 0)
    assert queue.get_task(other.out.strip()).queue == "web"
    assert queue.get_task(other.out.strip()).max_retries == 7


def test_every_option_reaches_the_task(omniq, queue):
    completed = omniq(
        *("enqueue", "clitasks.add", "1", "--id", "my-task", "--priority", "5"),
        *("--eta", "2030-01-31T12:00+01:00", "--timeout", "2m", "--unique", "key"),
        *("--metadata", 'by="ann"', "--interval", "1.5h"),
    )
    task = queue.get_task("my-task")

    assert completed.code == 0
    assert (task.priority, task.timeout, task.unique, task.interval) == (5, 120, "key", 5400)
    assert task.eta.isoformat() == "2030-01-31T11:00:00+00:00"
    assert task.metadata == {"by": "ann"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("clitasks.add", "word"), """not JSON; for text write '"word"'"""),
        (("clitasks.add", "1", "-k", "b"), "expected name=value"),
        (("clitasks.nothing",), "clitasks has no nothing"),
        (("clitasks.add", "1", "2", "3"), "too many positional arguments"),
        (("no-path",), "expected a dotted path"),
        (("os.system", '"ls"'), "never run"),
        (("clitasks.add", "1", "--delay", "soon"), "5m"),
        (("clitasks.add", "1", "--eta", "2030-01-31T12:00"), "with its zone"),
        (("clitasks.add", "1", "--cron", "every day"), "cron"),
        (("clitasks.add", "1", "--delay", "1s", "--eta", "2030-01-01T00:00Z"), "not both"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(omniq, folder, arguments, text):
    completed = omniq("enqueue", *arguments)

    assert completed.code == 2
    assert text in completed.err
    assert completed.err.count("\n") == 1
    assert completed.out == ""


def test_a_duplicate_id_is_a_failure(omniq):
    omniq("enqueue", "clitasks.add", "1", "--id", "mine")
    completed = omniq("enqueue", "clitasks.add", "1", "--id", "mine")

    assert completed.code == 1
    assert "task mine exists already" in completed.err


def test_wait_prints_the_result(omniq, queue):
    with queue.worker(poll_interval=0.05):
        good = omniq("enqueue", "clitasks.add", "20", "22", "--wait", "10")
        bad = omniq("enqueue", "clitasks.boom", '"oh no"', "--wait", "10", "--json")

    assert (good.code, good.out) == (0, "42\n")
    assert (bad.code, bad.json["status"]) == (1, TaskStatus.FAILED)
    assert "RuntimeError: oh no" in bad.err


def test_a_wait_that_is_too_short_points_to_explain(omniq):
    completed = omniq("enqueue", "clitasks.add", "1", "--wait", "50ms")

    assert completed.code == 1
    assert "omniq explain" in completed.err


def test_a_function_that_is_not_marked_is_enqueued_with_a_note(omniq, queue):
    completed = omniq("enqueue", "clitasks.unmarked")

    assert queue.get_task(completed.out.strip()).func_path == "clitasks.unmarked"
    assert "clitasks.unmarked: mark it with @task, or a worker in another process" in completed.err


def test_options_of_retries_types_and_limits_are_stored(omniq, queue):
    flags = ("--retry", "10s,1m", "--task-type", "sum", "--timeout", "none", "--interval", "1h")
    made = omniq("enqueue", "clitasks.add", "1", *flags, "--reschedule-on-failure")
    plain = omniq("enqueue", "clitasks.add", "1").out.strip()
    task = queue.get_task(made.out.strip())
    shown = " ".join(omniq("tasks", "show", task.id).out.split())

    assert (task.retry_delays, task.max_retries, task.task_type) == ((10.0, 60.0), 2, "sum")
    assert (task.timeout, task.reschedule_on_failure) == (NO_TIMEOUT, True)
    assert queue.get_task(plain).timeout is None
    assert "type sum failures 0 of 3 attempts at most retry 10, 60" in shown
    assert "timeout none" in shown
    assert "also after a failure" in shown
    assert [record["id"] for record in omniq("tasks", "list", "--type", "sum", "--json").lines] == [
        task.id
    ]
    listed = omniq("tasks", "list", "--type", "sum", "--json", "--all").lines
    assert [record["id"] for record in listed] == [task.id]


def test_wrong_delays_say_what_is_expected(omniq):
    refused = omniq("enqueue", "clitasks.add", "1", "--retry", "soon")

    assert refused.code == 2
    assert "expected delays such as 10s,30s,1m" in refused.err


def test_the_share_of_a_task_is_stored_and_shown(omniq, queue):
    fair = omniq(
        *("enqueue", "clitasks.add", "1", "--fair-key", "acme", "--fair-weight", "2.5"),
    ).out.strip()
    ageing = omniq("enqueue", "clitasks.add", "1", "--ageing", "1m").out.strip()

    share = queue.get_task(fair).fair
    assert (share.key, share.weight, share.cost) == ("acme", 2.5, 1.0)
    assert queue.get_task(ageing).ageing == 60
    assert "acme (weight 2.5, cost 1)" in omniq("tasks", "show", fair).out
    assert omniq("enqueue", "clitasks.add", "1", "--fair-weight", "2").code != 0
