"""`omniq check`: what a person and a pipeline see of the code that is about to be deployed."""

from __future__ import annotations

import sys


def test_code_that_can_run_everything_exits_with_0(omniq, queue):
    queue.enqueue("clitasks.add", 1)
    done = omniq("check", "clitasks")

    assert done.code == 0
    assert "checked 1 task, 0 dead letters, 0 schedules" in done.out
    assert "the code can run all of it" in done.out


def test_what_cannot_run_is_shown_by_function_with_a_count_an_example_and_advice(omniq, queue):
    gone = [queue.enqueue("clitasks.gone", number).id for number in range(2)]
    queue.enqueue("clitasks.add", 1, 2, 3)
    done = omniq("check", "clitasks")
    lines = done.out.splitlines()

    assert done.code == 1
    assert lines[0] == "clitasks.add"
    assert lines[2].startswith("    signature: clitasks.add: too many positional arguments")
    assert lines[4:6] == ["clitasks.gone", f"  2 tasks, such as {gone[0]}"]
    assert lines[6:8] == ["    missing: clitasks has no gone", lines[7]]
    assert lines[7].startswith("    → deploy the function")


def test_a_pipeline_reads_one_json_document(omniq, queue):
    queue.enqueue("clitasks.gone", 1)
    done = omniq("check", "clitasks", "--json")

    assert (done.code, done.json["ok"], done.json["tasks"]) == (1, False, 1)
    assert done.json["problems"][0]["problem"] == "missing"
    assert done.json["problems"][0]["advice"]


def test_dead_letters_can_be_left_out(omniq, dead_task):
    dead_task(func="clitasks.gone")

    assert omniq("check", "clitasks").code == 1
    assert omniq("check", "clitasks", "--ignore-dead").code == 0


def test_the_modules_come_from_the_settings_if_none_are_named(omniq, queue, monkeypatch):
    queue.enqueue("clitasks.add", 1)
    refused = omniq("check")
    monkeypatch.setenv("OMNIQ_MODULES", "clitasks")

    assert refused.code == 2
    assert "omniq check app.tasks" in refused.err
    assert omniq("check").code == 0


def test_a_module_that_cannot_be_imported_and_a_missing_storage_have_codes_of_their_own(
    omniq, folder, queue
):
    (folder / "brokentasks.py").write_text("import nothing_of_that_name")

    assert omniq("check", "brokentasks").code == 2
    assert "brokentasks" not in sys.modules
    assert omniq("check", "clitasks", "--url", f"sqlite:///{folder}/none.db").code == 3
    assert not (folder / "none.db").exists()


def test_a_database_without_tables_is_not_set_up_by_a_check(omniq, folder, postgres_url):
    refused = omniq("check", "clitasks", "--url", postgres_url)

    assert refused.code == 3
    assert "is not set up; run 'omniq schema install'" in refused.err
    assert omniq("schema", "check", "--url", postgres_url).code != 0
