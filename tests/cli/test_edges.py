"""The edge of the process: exit codes, error lines, help, completion and imports."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from omniq import __version__ as omniq_version
from omniq.cli.app import app
from omniq.cli.command import summary

GROUPS = ("tasks", "dead", "queues", "schedules")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("tasks", "nonsense"),
        ("tasks", "list", "--nonsense"),
        ("tasks", "list", "--status", "nonsense"),
        ("tasks", "list", "--limit", "0"),
        ("tasks", "show"),
        ("explain",),
        ("stats", "--interval", "never"),
    ],
)
def test_a_usage_error_is_one_line_that_names_the_help(omniq, queue, arguments):
    completed = omniq(*arguments)

    assert completed.code == 2
    assert completed.err.count("\n") == 1
    assert "--help" in completed.err
    assert completed.out == ""


def test_version_prints_the_version_and_nothing_else(omniq):
    completed = omniq("--version")

    assert (completed.code, completed.out, completed.err) == (0, f"omniq {omniq_version}\n", "")
    # It is eager: the rest of the line is neither checked nor run.
    assert omniq("--version", "worker", "nonsense").out == f"omniq {omniq_version}\n"


def test_python_m_omniq_prints_the_version_too():
    found = subprocess.run(
        [sys.executable, "-m", "omniq", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )

    assert found.stdout == f"omniq {omniq_version}\n"


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_shows_its_help(omniq, group):
    completed = omniq(group, "--help")

    assert "Usage: omniq" in completed.out + completed.err


def test_a_missing_storage_is_reported_and_not_created(omniq, folder):
    for command in ("tasks list", "stats", "dead list", "workers", "explain x", "schedules list"):
        completed = omniq(*command.split(), "--url", "sqlite:///elsewhere.db")
        assert completed.code == 3, command
        assert f"looked for {folder}/elsewhere.db" in completed.err
    assert not (folder / "elsewhere.db").exists()


@pytest.mark.parametrize("command", ["stats", "doctor", "enqueue a.b", "worker json"])
def test_a_path_that_the_system_refuses_is_one_line(omniq, folder, command):
    completed = omniq(*command.split(), "--url", f"sqlite:///{'x' * 300}/tasks.db")

    assert completed.code == 1
    assert completed.err.count("\n") == 1 + (command == "enqueue a.b")
    assert "File name too long" in completed.err


@pytest.mark.parametrize("command", ["stats", "doctor", "enqueue a.b", "worker json"])
def test_a_current_folder_that_was_removed_is_one_line(omniq, folder, command):
    (folder / "gone").mkdir()
    os.chdir(folder / "gone")
    (folder / "gone").rmdir()

    completed = omniq(*command.split(), "--url", "sqlite:///tasks.db")

    assert (completed.code, completed.out) == (1, "")
    assert completed.err.splitlines()[-1] == (
        "omniq: the current folder no longer exists; change to another one"
    )


def test_a_closed_stdout_is_no_error_and_a_full_disk_is_one_line(omniq, folder):
    def run(redirection: str) -> subprocess.CompletedProcess[str]:
        command = (
            f"{sys.executable} -m omniq enqueue a.b --url sqlite:///{folder}/x.db {redirection}"
        )
        return subprocess.run(
            ["/bin/sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=30, check=False
        )

    closed, full = run(">&-"), run(">/dev/full")

    assert (closed.returncode, full.returncode) == (0, 1)
    assert "Traceback" not in closed.stderr + full.stderr
    assert "No space left on device" in full.stderr.splitlines()[-1]


def test_doctor_says_where_no_storage_can_be_created(omniq, folder):
    completed = omniq("doctor", "--url", "sqlite:////proc/tasks.db")

    assert completed.code == 1
    assert "none can be created in /proc" in completed.err


@pytest.mark.parametrize(
    "command", ["enqueue a.b", "queues pause x", "schedules add s a.b --interval 1h"]
)
def test_a_command_that_writes_creates_the_storage(omniq, folder, command):
    assert omniq(*command.split(), "--url", "sqlite:///fresh.db").code == 0
    assert (folder / "fresh.db").exists()


def test_a_memory_url_is_refused(omniq):
    completed = omniq("enqueue", "a.b", "--url", "memory://")

    assert completed.code == 2
    assert "exists only within one process" in completed.err


@pytest.mark.parametrize(("url", "code"), [("nonsense://x", 2), ("sqlite:///folder", 1)])
def test_the_error_about_a_bad_url_is_one_line(omniq, folder, url, code):
    (folder / "folder").mkdir()
    completed = omniq("stats", "--url", url)

    assert completed.code == code
    assert completed.err.startswith("omniq: ")
    assert completed.err.count("\n") == 1


def test_a_password_in_a_url_is_never_shown(omniq):
    completed = omniq("stats", "--url", "nonsense://me:secret@host/db")

    assert "secret" not in completed.err


def test_debug_shows_the_traceback(omniq, queue):
    assert "Traceback" in omniq("tasks", "show", "missing", "--debug").err
    assert "Traceback" not in omniq("tasks", "show", "missing").err


@pytest.mark.timeout(120)
@pytest.mark.parametrize("storage", ["file", "postgres", "redis"])
def test_every_storage_serves_the_same_commands(omniq, folder, request, storage):
    url = (
        f"file:{folder}/store?durability=os"
        if storage == "file"
        else request.getfixturevalue(f"{storage}_url")
    )

    def ask(*arguments: str):
        completed = omniq(*arguments, "--url", url)
        assert completed.code == 0, completed.err
        return completed

    task_id = ask("enqueue", "clitasks.add", "1", "--delay", "1h").out.strip()
    ask("queues", "pause", "default")
    ask("schedules", "add", "s", "clitasks.add", "1", "--interval", "1h")

    assert ask("tasks", "show", task_id, "--json").json["task"]["args"] == [1]
    assert [task["id"] for task in ask("tasks", "list", "--json").lines] == [task_id]
    reasons = ask("explain", task_id, "--json").json["reasons"]
    assert [reason["code"] for reason in reasons] == ["not_due", "queue_paused", "no_worker"]
    assert ask("tasks", "change", task_id, "--priority", "3", "--json").json["priority"] == 3
    ask("tasks", "run", task_id)
    ask("events", "--duration", "200ms", "--interval", "0.1")
    ask("tasks", "cancel", task_id)
    assert ask("stats", "--json").json["by_status"]["cancelled"] == 1
    assert [schedule["id"] for schedule in ask("schedules", "list", "--json").lines] == ["s"]
    ask("purge", "--older-than", "0", "--yes")
    assert ask("tasks", "list", "--json").lines == []


def test_starting_a_command_imports_nothing_that_only_others_need(folder):
    # Not what the interpreter itself was started with: a coverage run loads sqlite3.
    script = (
        "import sys; before = set(sys.modules); from omniq.cli.app import app; {use}; "
        "print(' '.join(sys.modules.keys() - before))"
    )

    def loaded(use: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-c", script.format(use=use)],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        return set(done.stdout.split())

    heavy = {
        *("sqlite3", "asyncpg", "psycopg", "redis", "starlette", "uvicorn", "jinja2", "pytest"),
        *("typer", "click", "rich", "argparse", "pydantic"),
    }
    modules = {f"omniq.cli.{name}" for name in ("stats", "tasks", "dashboard", "demo", "worker")}
    assert (heavy | modules | {"omniq.queue", "omniq.worker.pool"}).isdisjoint(loaded("0"))
    assert (heavy | modules).isdisjoint(loaded("app.get('enqueue').parameters"))
    assert heavy.isdisjoint(loaded("[app.get(name) for name in app.helps]"))


def test_the_table_of_commands_says_what_their_own_helps_say():
    for name, help in app.helps.items():
        found = app.get(name)
        assert found is not None
        assert summary(found.help) == help
