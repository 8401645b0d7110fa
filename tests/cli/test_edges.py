"""The edge of the process: exit codes, error lines, help, completion and imports."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from omniq import __version__ as omniq_version

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

    assert (completed.code, completed.out, completed.err) == (0, "omniq 0.1.0\n", "")
    # It is eager: the rest of the line is neither checked nor run.
    assert omniq("--version", "worker", "nonsense").out == "omniq 0.1.0\n"


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
    ask("tasks", "cancel", task_id)
    assert ask("stats", "--json").json["by_status"]["cancelled"] == 1
    assert [schedule["id"] for schedule in ask("schedules", "list", "--json").lines] == ["s"]
    ask("purge", "--older-than", "0", "--yes")
    assert ask("tasks", "list", "--json").lines == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_complete_commands_and_options(folder, shell):
    environ = {
        **os.environ,
        "_OMNIQ_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "omniq tas",
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "omniq tas",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    script = "import sys; sys.argv[0] = 'omniq'; from omniq.cli import main; main([])"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=30
    )

    assert "tasks" in done.stdout


def test_starting_the_command_imports_nothing_that_only_some_commands_need():
    # Not what the interpreter itself was started with: a coverage run loads sqlite3.
    script = (
        "import sys; before = set(sys.modules); import omniq.cli.app; "
        "print(' '.join(sys.modules.keys() - before))"
    )
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
        ).stdout.split()
    )

    heavy = {
        "sqlite3",
        "asyncpg",
        "psycopg",
        "redis",
        "starlette",
        "uvicorn",
        "jinja2",
        "rich.live",
        "rich.progress",
        "rich.table",
        "pygments",
        "pytest",
    }
    assert heavy.isdisjoint(loaded)
