"""Output on a terminal is plain text: at any width, with any colour setting, from any user."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from omniq.cli import output
from omniq.text.escaping import visible
from tests.cli.terminal import Terminal

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07[red]markup[/red]\r\nnext\x9b31m \u202egnp.exe\u2028 :boom: \x00\x7f"
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def terminal(folder, url):
    """Run `omniq …` on the test's storage in a separate terminal."""
    opened: list[Terminal] = []

    def run(*arguments: str, **options) -> Terminal:
        opened.append(Terminal(folder, *arguments, "--url", url, **options))
        return opened[-1]

    yield run
    for each in opened:
        each.close()


@pytest.fixture
def hostile_task(queue, dead_task) -> str:
    """A dead letter with hostile text in every field that a user can set."""
    return str(dead_task(HOSTILE, metadata={HOSTILE: HOSTILE}, unique="key \x1b[5m"))


def assert_harmless(text: str) -> None:
    forbidden = [
        character for character in text if not (character.isprintable() or character in "\n")
    ]
    assert forbidden == []


@pytest.mark.parametrize(
    "command", ["tasks list", "tasks show ID", "dead list", "dead show ID", "explain ID", "stats"]
)
def test_hostile_text_stays_text(omniq, hostile_task, command):
    completed = omniq(*command.replace("ID", hostile_task).split())

    assert completed.code == 0
    assert_harmless(completed.out)


@pytest.mark.parametrize(
    "command", ["tasks list", "tasks show ID", "dead show ID", "dead export", "explain ID", "stats"]
)
def test_hostile_text_is_complete_and_harmless_in_json(omniq, hostile_task, command):
    arguments = command.replace("ID", hostile_task).split()
    completed = omniq(*arguments, *([] if "export" in command else ["--json"]))

    assert_harmless(completed.out)
    assert completed.lines


def test_escaped_json_decodes_to_the_original_text(omniq, queue):
    handle = queue.enqueue("clitasks.add", HOSTILE)

    assert omniq("tasks", "show", handle.id, "--json").json["task"]["args"] == [HOSTILE]


@pytest.mark.parametrize("text", [HOSTILE, "a\x1b[31mb", "\u2066", "\ud800"])
def test_errors_are_one_harmless_line(omniq, queue, text):
    completed = omniq("tasks", "show", text)

    assert completed.code == 2
    assert completed.err.count("\n") == 1
    assert_harmless(completed.err)


def test_markup_is_shown_as_it_is(omniq, queue):
    handle = queue.enqueue("clitasks.add", "[bold]not bold[/bold] [link=x]y[/link] :smile:")

    shown = omniq("tasks", "show", handle.id).out
    assert "[bold]not bold[/bold] [link=x]y[/link] :smile:" in shown


def test_visible_escapes_control_characters():
    assert visible("plain äöü 漢字") == "plain äöü 漢字"
    assert visible("a\x1bb\nc") == r"a\x1bb\nc"
    assert visible("a\nb\x07", keep="\n") == "a\nb\\x07"


def test_a_terminal_gets_colours_and_NO_COLOR_disables_them(terminal, queue):
    queue.enqueue("clitasks.add", 1)
    colourful, plain = terminal("tasks", "list"), terminal("tasks", "list", NO_COLOR="1")

    assert (colourful.ends(), plain.ends()) == (0, 0)
    colourful.wait_for("clitasks.add")
    plain.wait_for("clitasks.add")
    assert "\x1b[33mpending" in colourful.raw
    assert "\x1b" not in plain.raw


def test_a_pipe_gets_whole_lines_without_colours(omniq, queue):
    name = "a." + "very_" * 40 + "long_name"
    queue.enqueue(name, 1)
    completed = omniq("tasks", "list")

    assert_harmless(completed.out)
    assert len(completed.out.splitlines()) == 2
    assert "priority" in completed.out


@pytest.mark.parametrize(("columns", "has_queue"), [(200, True), (80, True), (36, False)])
def test_a_narrow_terminal_omits_the_last_columns(terminal, queue, columns, has_queue):
    handle = queue.enqueue("clitasks.add", 1)
    shown = terminal("tasks", "list", columns=columns)

    assert shown.ends() == 0
    shown.wait_for(handle.id if columns == 200 else handle.id[:12])
    assert max(len(line) for line in shown.text.splitlines()) <= columns
    assert ("queue" in shown.text) == has_queue
    assert "clitasks.add" in shown.text


def test_80_columns_show_the_error_of_a_dead_letter(terminal, dead_task):
    dead = dead_task()
    shown = terminal("dead", columns=80)

    assert shown.ends() == 0
    shown.wait_for("error")
    assert dead[:12] in shown.text
    assert "boom" in shown.text


def test_short_ids_differ(terminal, queue):
    ids = [f"report-of-the-year-{year}-{number}" for year in (2025, 2026) for number in (1, 2)]
    for task_id in ids:
        queue.options(task_id=task_id).enqueue("clitasks.add", 1)
    shown = terminal("tasks", columns=80)

    assert shown.ends() == 0
    assert all(task_id in shown.text for task_id in ids)


def test_a_very_narrow_terminal_stacks_everything(terminal, queue):
    handle = queue.enqueue("clitasks.add", 1)
    shown = terminal("tasks", "list", columns=30)

    assert shown.ends() == 0
    shown.wait_for("priority 0")
    lines = shown.text.split("\r\n")
    assert lines[0] == handle.id
    assert "  status pending" in lines
    assert "  queue default" in lines


def test_a_long_task_shows_a_bar_on_a_terminal(terminal, dead_task, queue):
    for _ in range(3):
        dead_task()
    shown = terminal("dead", "retry", "--all", "--yes")

    assert shown.ends() == 0
    shown.wait_for("back in the queue: 3")
    assert "retrying" in shown.text
    assert "3/3" in shown.text


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 1), ("\x04", 1, 1)])
def test_a_user_at_a_terminal_is_asked_for_confirmation(
    terminal, dead_task, queue, answer, code, left
):
    dead = dead_task()
    shown = terminal("dead", "delete", dead)
    shown.wait_for("Delete 1 dead letter for good? [y/N]")
    shown.press(answer)

    assert shown.ends() == code
    assert queue.stats().dead == left


def test_a_reader_that_closes_the_pipe_early_causes_no_error(queue, url, folder):
    queue.enqueue_many("clitasks.add", [(number,) for number in range(2000)])
    command = f"{sys.executable} -m omniq tasks list --all --json --url '{url}'"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1


def test_a_reader_that_closes_the_pipe_of_a_long_text_causes_no_error(folder):
    command = f"{sys.executable} -m omniq schema sql --url postgresql://localhost/none"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_a_character_that_the_encoding_lacks_is_escaped(queue, url, folder):
    handle = queue.enqueue("clitasks.add", "漢")
    done = subprocess.run(
        [sys.executable, "-m", "omniq", "tasks", "show", handle.id, "--url", url],
        cwd=folder,
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        timeout=30,
    )

    assert done.returncode == 0, done.stderr
    assert rb"\u6f22" in done.stdout


def test_no_progress_bar_is_shown_without_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with output.progress_bar("working") as progress:
        progress(1, 2)

    assert stream.getvalue() == ""
