"""Where events go: loguru, `logging`, the console; each line has the same words and fields."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from loguru import logger

from omniq import AsyncTaskQueue, Task, log
from omniq.errors import SettingsError
from omniq.events import (
    AttemptFailed,
    Dispatcher,
    Event,
    HookFailed,
    LoopBlocked,
    TaskDead,
    TaskStarted,
    TaskSucceeded,
    WorkerStarted,
)
from omniq.log.console import Console
from omniq.worker.process import console as process_console
from tests.worker import sample_tasks

TASK = Task(id="t1", func_path="mail.send", queue="bulk", attempts=1, token=3, owner="w1")
FIELDS: dict[str, Any] = {
    "id": "t1",
    "func_path": "mail.send",
    "queue": "bulk",
    "attempt": 2,
    "token": 3,
    "owner": "w1",
}
DEAD = TaskDead(id="t1", func_path="mail.send", queue="bulk", attempt=2, reason="exhausted")


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    yield
    log.disable()
    logger.remove()
    logger.configure(patcher=None)
    logger.add(sys.stderr)


class Collecting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What the logger `omniq` of `logging` gets."""
    handler = Collecting()
    target = logging.getLogger("omniq")
    target.addHandler(handler)
    target.setLevel(1)
    yield handler.found
    target.removeHandler(handler)
    target.setLevel(logging.NOTSET)


# The console


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_the_lines_of_each_task_are_those_of_its_events(capsys, log_format):
    """They are written without events, which must not show."""
    console = log.open_console(log.LogConfig(format=log_format))
    console.started(TASK)
    console.event(TaskStarted(**FIELDS))
    console.succeeded(TASK, 0.25)
    console.event(TaskSucceeded(**FIELDS, seconds=0.25))
    console.flush()
    lines = capsys.readouterr().err.splitlines()

    if log_format == "json":
        lines = [{**json.loads(line), "time": ""} for line in lines]
    else:
        lines = [line.partition(" INFO ")[2] for line in lines]
    assert len(lines) == 4
    assert lines[0] == lines[1]
    assert lines[2] == lines[3]
    assert "0.25" in str(lines[2])


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_names_that_a_stranger_chose_are_escaped_on_the_console(capsys, log_format):
    hostile = "a\n2026-01-01 INFO forged\x1b[2J\x7f\u202e\u2028"
    console = log.open_console(log.LogConfig(format=log_format))
    task = Task(id=hostile, func_path=hostile, queue=hostile, owner="w1", token=1)
    console.started(task)
    console.succeeded(task, 1.0)
    console.flush()
    lines = capsys.readouterr().err.split("\n")

    assert lines.pop() == ""
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    if log_format == "json":
        assert {json.loads(line)["func_path"] for line in lines} == {hostile}


def test_a_text_that_the_application_logs_cannot_begin_a_line(capsys):
    console = log.open_console(log.LogConfig())
    log.take_stdlib()
    logging.getLogger("shop").warning("name: %s", "ann\n2026-01-01 00:00:00.000 ERROR   1 forged")
    logger.warning("name: ann\n2026-01-01 00:00:00.000 ERROR   1 forged")
    console.flush()
    logging.getLogger().handlers[:] = [
        each for each in logging.getLogger().handlers if type(each).__name__ != "ConsoleHandler"
    ]
    lines = capsys.readouterr().err.splitlines()

    forged = [line for line in lines if line.endswith("forged")]
    assert forged
    assert all(line.startswith("    ") for line in forged)


def test_a_warning_about_the_settings_is_one_line_without_a_place_in_omniq(capsys):
    place = process_console.__file__
    process_console.show_warning(UserWarning("OMNIQ_ULR is not a setting"), UserWarning, place, 7)

    assert capsys.readouterr().err == "omniq: OMNIQ_ULR is not a setting\n"


async def test_a_turn_of_the_loop_is_one_write(monkeypatch):
    writes: list[str] = []
    monkeypatch.setattr("omniq.log.stderr.write_stderr", writes.append)
    console = Console(log.LogConfig())
    turns = [
        [lambda: console.started(TASK)] * 3,
        [lambda: console.succeeded(TASK, 1.0)] * 2,
        [lambda: console.event(DEAD)],
        [lambda: console.event(DEAD), lambda: console.started(TASK)],
    ]
    for number, turn in enumerate(turns):
        for write in turn:
            write()
        assert len(writes) == number
        await asyncio.sleep(0)

    assert [text.count("\n") for text in writes] == [3, 2, 1, 2]
    console.close()


async def test_a_line_from_elsewhere_comes_after_the_gathered_ones(monkeypatch):
    writes: list[str] = []
    monkeypatch.setattr("omniq.log.stderr.write_stderr", writes.append)
    console = Console(log.LogConfig())
    console.started(TASK)
    await asyncio.to_thread(console.event, DEAD)

    (text,) = [text for text in writes if "task.dead" in text]
    assert "".join(writes).index("task.started") < "".join(writes).index("task.dead")
    assert text.endswith("reason=exhausted\n")
    console.close()


async def test_a_pool_writes_the_same_lines_to_the_console_and_to_loguru_up_to_the_last_failure(
    capsys,
):
    texts: list[str] = []
    logger.remove()
    log.open_console(log.LogConfig())
    log.enable("INFO")
    logger.add(lambda message: texts.append(message.record["message"]), level="INFO")
    async with AsyncTaskQueue("memory://") as queue:
        await queue.enqueue(sample_tasks.add, 1)
        await queue.options(max_retries=0).enqueue(sample_tasks.fail)
        await queue.worker().run_until_empty()
    log.disable()
    shown = capsys.readouterr().err

    # The console has one line for a failure for good; an application receives three, and chooses.
    (failed,) = [text for text in texts if text.startswith("attempt.failed")]
    dead = "task.dead" + failed.removeprefix("attempt.failed")
    of_both = [text for text in texts if not text.startswith(("attempt.failed", "task.failed"))]
    assert dead.startswith(next(text for text in texts if text.startswith("task.dead")))
    wanted = [
        line
        for text in of_both
        for line in (dead if text.startswith("task.dead") else text).splitlines()
    ]
    lines = [re.sub(r"^\S+ \S+ [A-Z]+ +\d+ ", "", line) for line in shown.splitlines()]
    assert lines == wanted
    assert {"task.started", "task.succeeded", "attempt.failed", "task.dead"} <= {
        text.split()[0] for text in texts
    }


def test_a_worker_that_starts_shows_no_banner_without_a_terminal(capsys):
    console = log.open_console(log.LogConfig())
    console.event(WorkerStarted(owner="w", concurrency=1, version="1", stop="Ctrl-C"))
    log.disable()

    assert len(capsys.readouterr().err.splitlines()) == 1


# The standard library


def test_to_stdlib_writes_every_line_to_the_logger_omniq_with_its_fields(records):
    log.to_stdlib()
    log.write(DEAD)
    log.write(TaskStarted(**FIELDS))
    dead, started = records

    assert (dead.name, dead.levelname) == ("omniq", "ERROR")
    assert dead.getMessage().startswith("task.dead id=t1 func_path=mail.send")
    assert started.levelname == "INFO"
    assert (vars(started)["event"], vars(started)["attempt"]) == ("task.started", 2)


def test_the_level_of_to_stdlib_and_of_the_logger_apply(records):
    log.to_stdlib("ERROR")
    log.write(TaskStarted(**FIELDS))
    logging.getLogger("omniq").setLevel(logging.CRITICAL)
    log.write(DEAD)

    assert records == []


def test_no_field_of_an_event_is_a_field_of_a_log_record():
    taken = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}

    def kinds(kind: type[Event]) -> Iterator[type[Event]]:
        yield kind
        for each in kind.__subclasses__():
            yield from kinds(each)

    fields = {name for kind in kinds(Event) for name in kind.__struct_fields__}
    assert fields & taken == set()
    assert len(fields) > 30


async def test_to_stdlib_and_enable_both_get_the_lines_of_a_pool(records):
    texts: list[str] = []
    logger.remove()
    logger.add(lambda message: texts.append(message.record["message"]))
    log.to_stdlib()
    log.enable()
    async with AsyncTaskQueue("memory://") as queue:
        await queue.enqueue(sample_tasks.add, 1)
        await queue.worker().run_until_empty()

    assert [record.getMessage() for record in records] == texts
    assert [text.split()[0] for text in texts][:3] == [
        "worker.started",
        "task.started",
        "task.succeeded",
    ]


# Settings


def test_the_level_comes_from_the_settings_unless_it_is_given(monkeypatch):
    monkeypatch.setenv("OMNIQ_LOG_LEVEL", "ERROR")
    log.enable()
    assert log.enabled_level() == "ERROR"
    log.enable("DEBUG")
    assert log.enabled_level() == "DEBUG"
    with pytest.raises(SettingsError, match="LOUD"):
        log.to_stdlib("LOUD")


@pytest.mark.parametrize("kind", [AttemptFailed, HookFailed])
def test_what_a_failure_shows_is_a_setting(kind, records, monkeypatch):
    hook: dict[str, Any] = {"hook": "on_dead"} if kind is HookFailed else {"seconds": 1.0}
    event = kind(
        id="t",
        func_path="m.f",
        queue="q",
        error="ValueError",
        error_message="sesame",
        traceback='Traceback (most recent call last):\n  File "/a.py", line 1, in f\n    x\nValueError: sesame\n',
        **hook,
    )
    for tracebacks in (True, False):
        for messages in (True, False):
            monkeypatch.setenv("OMNIQ_LOG_TRACEBACKS", str(tracebacks))
            monkeypatch.setenv("OMNIQ_LOG_ERROR_MESSAGES", str(messages))
            log.to_stdlib()
            log.write(event)
            text = records[-1].getMessage()

            assert ": ValueError" in text
            assert "(/a.py:1 in f)" in text
            assert ("sesame" in str(vars(records[-1]))) is messages
            assert ('File "/a.py"' in text) is tracebacks


def test_a_blocked_loop_is_shown_with_the_place_in_the_users_code_and_what_to_write(
    records, monkeypatch
):
    stack = (
        f'  File "{asyncio.base_events.__file__}", line 640, in run_until_complete\n    self.run()\n'
        '  File "/app/tasks.py", line 7, in fetch\n    time.sleep(5)\n'
    )
    event = LoopBlocked(owner="w1", id="t1", func_path="mail.fetch", stack=stack)
    for tracebacks in (True, False):
        monkeypatch.setenv("OMNIQ_LOG_TRACEBACKS", str(tracebacks))
        log.to_stdlib()
        log.write(event)
        text = records[-1].getMessage()

        assert "(/app/tasks.py:7 in fetch); call it with asyncio.to_thread" in text
        assert "run_until_complete" not in text
        assert ("\n        time.sleep(5)" in text) is tracebacks


# The ids of tasks


class Plain(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.setFormatter(logging.Formatter("%(message)s|%(task_id)s|%(func_path)s|%(attempt)s"))
        self.addFilter(log.TaskFilter())

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


async def test_the_filter_and_the_patcher_give_the_ids_of_the_running_task():
    """In a program of one's own, which sets up its logging itself."""
    handler, extras = Plain(), []
    target = logging.getLogger("tests.log.speaking")
    target.addHandler(handler)
    target.setLevel("INFO")
    logger.configure(patcher=log.add_task)
    logger.remove()
    logger.add(lambda message: extras.append(message.record["extra"]))
    try:
        target.info("outside")
        logger.info("outside")
        async with AsyncTaskQueue("memory://") as queue:
            ids = [
                (await queue.enqueue(f"tests.log.speaking.{name}")).id
                for name in ("in_loop", "in_thread", "with_own_id")
            ]
            await queue.worker(concurrency=1).run_until_empty()
    finally:
        target.removeHandler(handler)

    assert handler.texts == [
        "outside|||",
        f"hello|{ids[0]}|tests.log.speaking.in_loop|1",
        f"hello|{ids[1]}|tests.log.speaking.in_thread|1",
        "hello|mine|tests.log.speaking.with_own_id|1",
    ]
    assert extras == [
        {},
        {"task_id": ids[0], "func_path": "tests.log.speaking.in_loop", "attempt": 1},
        {"task_id": ids[1], "func_path": "tests.log.speaking.in_thread", "attempt": 1},
        {"task_id": "mine", "func_path": "tests.log.speaking.with_own_id", "attempt": 1},
    ]


def test_a_detached_dispatcher_is_silent(records):
    dispatcher = Dispatcher()
    log.to_stdlib()
    detach = log.attach(dispatcher)
    dispatcher.emit(DEAD)
    detach()
    dispatcher.emit(DEAD)

    assert len(records) == 1
