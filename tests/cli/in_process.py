"""Runs the command in this process: a separate one spends a quarter of a second on imports."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omniq.cli import main


class CommandResult:
    """The output and the exit code of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """One JSON document for each line."""
        return [json.loads(line) for line in self.out.splitlines()]


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> CommandResult:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(arguments)
    out, err = capsys.readouterr()
    return CommandResult(int(left.value.code or 0), out, err)
