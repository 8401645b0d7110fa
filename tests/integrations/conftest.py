"""Fixtures that start programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integrations.programs import Program

EXAMPLES = Path(__file__).parents[2] / "examples"

Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program in a folder of the examples; its tasks are stored in the test's folder."""
    programs: list[Program] = []

    def start(folder: str, *command: str, **environment: str) -> Program:
        environment = {"OMNIQ_URL": f"sqlite:///{tmp_path}/tasks.db", **environment}
        programs.append(Program(command, EXAMPLES / folder, **environment))
        return programs[-1]

    yield start
    running = [program for program in programs if program.is_running]
    assert all(program.stop() in (0, -15) for program in running), [
        program.output for program in running
    ]
