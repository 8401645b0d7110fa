"""omniq logs nothing until it is enabled, then writes events to the sinks of the application."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from loguru import logger

from omniq import events, log
from omniq.errors import SettingsError

TASK: dict[str, Any] = {"id": "t1", "func_path": "mail.send", "queue": "default", "attempt": 2}
STARTED = events.TaskStarted(**TASK)
CLAIMED = events.TaskClaimed(**TASK, owner="w1", token=3)
DEAD = events.TaskDead(**TASK, reason="{braces} and <red>tags</red>")


@pytest.fixture
def records():
    written = []
    sink = logger.add(lambda message: written.append(message.record), level=0)
    yield written
    log.disable()
    logger.remove(sink)


def test_nothing_is_written_before_it_is_enabled(records):
    log.disable()
    log.write(DEAD)

    assert not log.is_enabled()
    assert records == []


def test_the_name_is_the_message_and_the_facts_are_log_fields(records):
    log.enable()
    log.write(STARTED)
    [record] = records

    assert log.is_enabled()
    assert record["level"].name == "INFO"
    assert record["message"] == "task.started id=t1 func_path=mail.send queue=default attempt=2"
    assert record["extra"] == {"event": "task.started", **TASK}


def test_lines_below_the_level_are_omitted(records):
    log.enable("INFO")
    log.write(CLAIMED)

    assert records == []


def test_debug_shows_routine_events(records):
    log.enable("debug")
    log.write(CLAIMED)

    assert [record["level"].name for record in records] == ["DEBUG"]


def test_a_dead_letter_is_an_error_and_its_text_is_not_a_template(records):
    log.enable("ERROR")
    log.write(STARTED)
    log.write(DEAD)
    [record] = records

    assert record["level"].name == "ERROR"
    assert record["message"].endswith("reason={braces} and <red>tags</red>")


def test_an_unknown_level_is_refused():
    with pytest.raises(SettingsError, match="LOUD"):
        log.enable("LOUD")


def test_importing_and_enabling_do_not_change_the_sinks():
    code = (
        "from loguru import logger\n"
        "before = dict(logger._core.handlers)\n"
        "import omniq, omniq.log\n"
        "omniq.log.enable(); omniq.log.disable()\n"
        "assert dict(logger._core.handlers) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
