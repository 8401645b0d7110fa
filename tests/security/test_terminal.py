"""Stored text cannot send control sequences to the terminal of an operator."""

from __future__ import annotations

import pytest

from omniq import TaskQueue
from omniq.models import TaskError
from omniq.outcomes import Failed
from omniq.tasks.task_output import StoredChunk, encode_log
from omniq.testing.builders import an_output
from tests.cli.in_process import run_command

EVIL = (
    "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b31m\r\n\u202egnp.exe\u2066\x08\x7f\x00\ufeff[bold red]x[/]"
)

COMMANDS = [
    ("tasks", "list"), ("tasks", "show", "{id}"), ("dead", "list"), ("dead", "show", "{id}"), ("stats",),
    ("explain", "{id}"), ("queues", "list"), ("schedules", "list"), ("workers",), ("tasks", "list", "--json"),
    ("tasks", "show", "{id}", "--json"), ("dead", "show", "{id}", "--json"), ("tasks", "show", EVIL.replace("\0", "")),
    ("dead", "retry", EVIL.replace("\0", "")), ("enqueue", EVIL.replace("\0", "")),
    ("tasks", "output", "{id}"), ("tasks", "output", "{id}", "--json"), ("tasks", "output", "{id}", "--follow"),
    ("stats", "--url", EVIL.replace("\0", "")),
]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> tuple[str, str]:
    """A store whose one task failed with everything that a terminal obeys; its URL and the id."""
    url = f"sqlite:///{tmp_path_factory.mktemp('store')}/t.db?durability=os"
    with TaskQueue(url) as queue:
        handle = queue.options(metadata={EVIL: EVIL}, unique=EVIL.replace("\0", "")).enqueue(
            "tests.security.secret_tasks.echo", EVIL, **{EVIL: EVIL}
        )
        queue.schedules.add("daily", "tests.security.secret_tasks.echo", args=(EVIL,), interval=60)

        async def fail() -> None:
            (task,) = await queue.storage.reserve(1)
            line = StoredChunk(0, encode_log(EVIL, "info", {EVIL: EVIL}))
            batch = an_output(task.id, task.token, EVIL, {EVIL: EVIL}, line)
            assert await queue.storage.append_output([batch]) == [True]
            error = TaskError(EVIL, error_type=EVIL, traceback=EVIL, recovery_hint=EVIL)
            await queue.storage.record([Failed(task.id, task.token, error, EVIL.replace("\0", ""))])

        queue._portal.run(fail())
        return url, handle.id


@pytest.mark.security("S21")
@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_no_command_prints_terminal_control_sequences(command, store, monkeypatch, capsys):
    url, task_id = store
    monkeypatch.setenv("OMNIQ_URL", url)
    monkeypatch.setenv("COLUMNS", "200")
    done = run_command(capsys, *(word.replace("{id}", task_id) for word in command))
    said = done.out + done.err

    assert said
    assert "Traceback" not in done.err
    obeyed = {hex(ord(each)) for each in said if not each.isprintable() and each != "\n"}
    assert obeyed == set()
