"""Shells complete commands, options, statuses, and names from the storage."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from omniq.cli import main

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def offered(omniq, monkeypatch, capsys):
    """What a shell offers for the last word of the line, which may be empty."""

    def ask(line: str, shell: str = "bash") -> list[str]:
        monkeypatch.setenv("_OMNIQ_COMPLETE", shell)
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(line.split(" "))
        monkeypatch.delenv("_OMNIQ_COMPLETE")
        captured = capsys.readouterr()
        assert (left.value.code, captured.err) == (0, "")
        return str(captured.out).splitlines()

    return ask


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tas", ["tasks"]),
        ("do", ["doctor"]),
        ("tasks sh", ["show"]),
        ("tasks --st", ["--status"]),
        (
            "tasks list --status ",
            ["pending", "running", "retrying", "success", "failed", "cancelled"],
        ),
        ("tasks list --status fa", ["failed"]),
        ("tasks list --status = fa", ["failed"]),
        ("tasks list --status=fa", ["failed"]),
        ("tasks --status s", ["success"]),
        ("tasks list --json --lim", ["--limit"]),
        ("worker m --log-format j", ["json"]),
        ("completion f", ["fish"]),
        ("nonsense ", []),
        ("tasks nonsense ", []),
    ],
)
def test_commands_options_and_choices_are_offered(offered, line, expected):
    assert offered(line) == expected


def test_names_come_from_the_storage(offered, omniq, queue, dead_task):
    dead = dead_task()
    handle = queue.options(queue="mail").enqueue("clitasks.add", 1)
    omniq("schedules", "add", "nightly", "clitasks.add", "1", "--interval", "1h")

    assert offered("queues pause m") == ["mail"]
    assert offered("tasks list --queue m") == ["mail"]
    assert set(offered("tasks show ")) == {dead, handle.id}
    assert offered("dead retry ") == [dead]
    assert offered("tasks cancel x ") == offered("tasks show ")
    assert offered("tasks show x ") == []
    assert offered("schedules pause n") == ["nightly"]
    assert offered("tasks list --func clitasks.a") == ["clitasks.add"]
    assert offered("queues pause m", "fish") == ["mail\t1 waiting"]
    assert offered("queues pause m", "zsh") == ["mail:1 waiting"]


def test_a_storage_that_cannot_be_read_offers_nothing(offered, folder):
    assert offered("tasks show --url sqlite:///missing.db ") == []
    assert offered("tasks show --url nonsense://x ") == []
    assert not (folder / "missing.db").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_works_in_its_shell(omniq, folder, shell):
    script = omniq("completion", shell)
    assert script.code == 0
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"there is no {shell} here")
    (folder / f"omniq.{shell}").write_text(script.out)
    (folder / "omniq").write_text(f'#!/bin/sh\nexec {sys.executable} -m omniq "$@"\n')
    (folder / "omniq").chmod(0o755)
    tries = {
        "bash": "source omniq.bash; COMP_WORDS=(omniq tas); COMP_CWORD=1; _omniq_completion; "
        'echo "${COMPREPLY[@]}"',
        "zsh": "autoload -Uz compinit && compinit -u -d ./dump; source ./omniq.zsh; echo $_comps[omniq]",
        "fish": "source omniq.fish; complete -C 'omniq tas'",
    }
    done = subprocess.run(
        [program, "-c", tries[shell]],
        cwd=folder,
        env={**os.environ, "PATH": f"{Path.cwd()}:{os.environ['PATH']}", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    expected = "_omniq_completion" if shell == "zsh" else "tasks"
    assert expected in done.stdout, done.stderr


def test_an_unknown_shell_is_a_usage_error(omniq, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/tcsh")

    assert omniq("completion").code == 2
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert "complete -o default" in omniq("completion").out
