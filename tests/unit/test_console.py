"""One line on stderr, the right exit code, and nothing breaks when nobody listens."""

from __future__ import annotations

import io
import sys

import pytest

from omniq.cli import main
from omniq.errors import InvalidTask, SettingsError, StorageError
from omniq.service import console


class Gone(io.StringIO):
    """A pipe whose reader has gone away."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [Gone(), None])
def test_writing_to_nobody_does_nothing(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)

    console.write("hello")
    console.flush()


@pytest.mark.parametrize(
    ("error", "code"),
    [(SettingsError("a\n b"), 2), (InvalidTask("a b"), 2), (StorageError("a  b"), 1)],
)
def test_an_error_is_one_line_and_an_exit_code(capsys, error, code):
    assert console.complain(error) == code
    assert capsys.readouterr().err == "omniq: a b\n"


@pytest.mark.parametrize(("variable", "expected"), [("", True), ("1", False)])
def test_no_color_is_respected(monkeypatch, variable, expected):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("NO_COLOR", variable)

    assert console.is_colourful() is expected


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["--help"], 0, "worker", ""),
        ([], 2, "worker", ""),
        (["nosuch"], 2, "", "omniq: No such command 'nosuch'"),
        (["worker"], 2, "", "omniq: Missing argument"),
    ],
)
def test_the_command_line_leaves_with_the_right_code(capsys, arguments, code, out, err):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    said = capsys.readouterr()

    assert left.value.code == code
    assert out in said.out
    assert said.err.startswith(err)
    assert said.err.count("\n") == (1 if err else 0)
