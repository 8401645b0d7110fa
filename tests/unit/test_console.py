"""One line on stderr, the right exit code, and a closed stream breaks nothing."""

from __future__ import annotations

import io
import sys

import pytest
from loguru import logger

from omniq import log
from omniq.cli import main
from omniq.errors import InvalidTask, ScheduleNotFound, SettingsError, StorageError, TaskNotFound
from omniq.events import WorkerProblem
from omniq.log.console import is_colourful
from omniq.worker.process import console


class ClosedPipe(io.StringIO):
    """A pipe whose reader has closed it."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [ClosedPipe(), None])
def test_writing_to_a_closed_stream_does_nothing(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)

    console.write("hello")
    console.flush()


@pytest.mark.parametrize(
    ("error", "code"),
    [(SettingsError("a\n b"), 2), (InvalidTask("a b"), 2), (StorageError("a  b"), 1)],
)
def test_an_error_is_one_line_and_an_exit_code(capsys, error, code):
    assert console.report_error(error) == code
    assert capsys.readouterr().err == "omniq: a b\n"


@pytest.mark.parametrize("error", [TaskNotFound("a"), ScheduleNotFound("a")])
def test_a_missing_object_has_a_separate_exit_code(capsys, error):
    assert console.report_error(error) == 3


def test_control_characters_in_log_lines_are_escaped(capsys):
    console.start_logging(log.LogConfig())
    try:
        log.write(
            WorkerProblem(activity="recover", error="\x1b[2J {braces}\nforged <red>line</red>")
        )
        logger.info("two\nlines\x07")
    finally:
        logger.remove()
        log.disable()
    event, first, second = capsys.readouterr().err.splitlines()

    assert event.endswith(r"error=\x1b[2J {braces}\nforged <red>line</red>")
    assert first.endswith("two")
    assert second == r"    lines\x07"


@pytest.mark.parametrize(("variable", "expected"), [("", True), ("1", False)])
def test_no_color_is_respected(monkeypatch, variable, expected):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("NO_COLOR", variable)

    assert is_colourful() is expected


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["--help"], 0, "worker", ""),
        ([], 2, "worker", ""),
        (["nosuch"], 2, "", "omniq: no such command: nosuch"),
        (["worker"], 2, "", "omniq: name the modules"),
    ],
)
def test_the_command_line_exits_with_the_right_code(capsys, arguments, code, out, err):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    said = capsys.readouterr()

    assert left.value.code == code
    assert out in said.out
    assert said.err.startswith(err)
    assert said.err.count("\n") == (1 if err else 0)
