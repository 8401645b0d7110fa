"""The tutorial works as printed: its files and commands, in their order, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docs import blocks
from tests.integrations.programs import Program

TUTORIAL = blocks.ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(python|console|toml)\n(.*?)^```\n", re.M | re.S)
DATABASE = "postgresql://user@host/database"
SECRET = {"OMNIQ_DASHBOARD_OPERATOR": "0123456789abcdef"}
STARTED = {"worker": "worker.started", "dashboard": r"http://127\.0\.0\.1:\d+"}
"""Commands that run until they are stopped, and what they print when they run."""


@dataclass
class Reader:
    """Somebody who follows the page, in a folder."""

    folder: Path
    url: str
    environment: dict[str, str] = field(default_factory=dict)
    running: dict[str, Program] = field(default_factory=dict)
    last_id: str = ""

    def run(self, line: str) -> str:
        """Run a command; returns what it prints."""
        name, *words = shlex.split(line.replace("TASK_ID", self.last_id))
        match name, words:
            case "pip", _:
                return ""
            case "mkdir", [folder]:
                (self.folder / folder).mkdir()
            case "cd", [folder]:
                self.folder /= folder
            case "export", [assignment]:
                variable, _, _ = assignment.partition("=")
                self.environment[variable] = self.url
            case "omniq", [("worker" | "dashboard") as command, *_]:
                self.restart(command, words)
            case "omniq", _:
                return self.finish(["-m", "omniq", *words])
            case "python", _:
                return self.finish(words)
            case _:
                raise AssertionError(f"the page has a command that this test does not know: {line}")
        return ""

    def restart(self, command: str, words: list[str]) -> None:
        if command in self.running:
            assert self.running.pop(command).stop() == 0
        environment = self.environment
        if command == "dashboard":
            # Without a terminal there is no link to sign in with; and the port may be taken.
            words, environment = [*words, "--port", "0"], {**environment, **SECRET}
        program = Program(["-m", "omniq", *words], self.folder, **environment)
        self.running[command] = program
        program.wait_for(STARTED[command])

    def finish(self, words: list[str]) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        # The server of the tests does not sync, which `doctor` calls bad.
        assert done.returncode == 0 or words[-1] == "doctor", f"{words}: {done.stdout}{done.stderr}"
        if found := re.search(r"\b[0-9A-HJKMNP-TV-Z]{26}\b", done.stdout):
            self.last_id = found[0]
        return done.stdout


@pytest.fixture
def reader(tmp_path: Path, postgres_url: str) -> Iterator[Reader]:
    made = Reader(tmp_path, postgres_url)
    yield made
    for program in made.running.values():
        program.stop()


@pytest.mark.timeout(180)
@pytest.mark.deep
def test_the_tutorial_works_as_printed(reader: Reader) -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    printed: dict[str, str] = {}

    for language, code in BLOCK.findall(text):
        if language == "console":
            for command, expected in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", code, re.M):
                printed[command] = reader.run(command)
                assert printed[command].endswith(expected), f"{command}: {printed[command]}"
        else:
            name = re.match(r"# (\w+\.\w+)\n", code)
            assert name is not None, "a file of the tutorial begins with its name"
            (reader.folder / name[1]).write_text(code.replace(DATABASE, reader.url))

    assert "stolen" in printed["omniq dead list"] or "CardRefused" in printed["omniq dead list"]
    assert "0 6 * * *" in printed["omniq schedules list"]
    assert "not due" in printed["omniq explain TASK_ID"]
