"""What `omniq worker` writes to stderr, with the real command and real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from itertools import takewhile
from typing import Any

import pytest

import omniq
from omniq.events import ProcessEnded
from omniq.log.config import LogConfig
from omniq.log.console import JsonFormat
from tests.acceptance.command import PATIENCE, WorkerCommand, clean_environment, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def stopped(worker: WorkerCommand) -> list[str]:
    """All lines of the worker, which is stopped."""
    worker.send(signal.SIGTERM)
    assert worker.ends() == 0, worker.text
    return worker.lines


def line_with(worker: WorkerCommand, *words: str) -> str:
    (line,) = [line for line in worker.lines if all(word in line for word in words)]
    return line


def objects(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


# Failed runs


def test_a_failed_run_is_one_line_with_error_place_and_next_time_and_its_frames(run_worker, queue):
    handle = queue.enqueue("shop.divide", 0)
    worker = run_worker()
    worker.wait_for("ZeroDivisionError: division by zero", 2)
    lines = stopped(worker)

    at = next(number for number, line in enumerate(lines) if "attempt.failed" in line)
    assert re.search(r" WARNING +\d+ attempt\.failed ", lines[at])
    assert f"id={handle.id} func_path=shop.divide queue=default attempt=1 " in lines[at]
    assert re.search(
        r": ZeroDivisionError: division by zero \(shop\.py:\d+ in one_by\), again in [12](\.\d+)? s$",
        lines[at],
    )
    below = list(takewhile(lambda line: line.startswith("    "), lines[at + 1 :]))
    assert below[0] == "    Traceback (most recent call last):"
    frames = [line for line in below if line.startswith("      File")]
    assert [line.rpartition(" in ")[2] for line in frames] == ["divide", "one_by"]
    assert all('shop.py", line' in line for line in frames)
    assert below[-1] == "    ZeroDivisionError: division by zero"
    assert "omniq/worker" not in worker.text


def test_the_frames_of_a_child_process_are_those_of_the_task(run_worker, queue):
    queue.options(max_retries=0).enqueue("shop.divide_in_a_process", 0)
    worker = run_worker()
    worker.wait_for("task.dead")
    lines = stopped(worker)

    frames = [line.rpartition(" in ")[2] for line in lines if line.startswith("      File")]
    assert frames == ["divide_in_a_process", "one_by"]
    assert "(shop.py:" in line_with(worker, "task.dead")
    assert line_with(worker, "task.dead").endswith("), failed for good (exhausted)")


def test_a_failure_for_good_is_one_line_at_error_whatever_the_level(run_worker, queue):
    handle = queue.options(max_retries=0).enqueue("shop.divide", 0)
    worker = run_worker("--log-level", "ERROR")
    worker.wait_for("task.dead")
    lines = stopped(worker)

    assert [line for line in lines if handle.id in line] == [line_with(worker, "task.dead")]
    assert re.search(
        r" ERROR +\d+ task\.dead .*: ZeroDivisionError: division by zero \(shop\.py:", lines[0]
    )
    assert lines[-1] == "    ZeroDivisionError: division by zero"


def test_a_task_that_continues_after_its_failure_has_one_line_too(run_worker, queue):
    queue.options(max_retries=0, interval=60, reschedule_on_failure=True).enqueue("shop.divide", 0)
    worker = run_worker()
    worker.wait_for("attempt.failed")
    stopped(worker)

    line = line_with(worker, "attempt.failed")
    assert re.search(r", failed \(exhausted\), its next time is in (60|59\.\d+) s$", line)
    assert "task.failed" not in worker.text
    assert "task.dead" not in worker.text


def test_tracebacks_can_be_switched_off(run_worker, queue):
    queue.options(max_retries=0).enqueue("shop.divide", 0)
    worker = run_worker(OMNIQ_LOG_TRACEBACKS="0")
    worker.wait_for("task.dead")
    stopped(worker)

    assert ": ZeroDivisionError: division by zero (shop.py:" in line_with(worker, "task.dead")
    assert "File" not in worker.text


HOSTILE = (
    "no\x1b[2J such\nline 2026-01-01 00:00:00.000 INFO 1 task.succeeded id=forged\u202e "
    "postgresql://me:hunter2@db/app " + "x" * 600
)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_message_of_an_error_is_escaped_masked_and_cut(run_worker, queue, log_format):
    queue.options(max_retries=0).enqueue("shop.fail_with", HOSTILE)
    worker = run_worker("--log-format", log_format)
    worker.wait_for("task.dead")
    lines = stopped(worker)

    assert "hunter2" not in worker.text
    assert not [line for line in lines if not line.isprintable()]
    assert not [line for line in lines if line.lstrip().startswith("line 2026")]
    assert "x" * 500 not in worker.text
    assert r"no\x1b[2J such\nline 2026-01-01" in worker.text.replace("\\\\", "\\")


def test_messages_can_be_hidden_and_then_nothing_of_them_is_written(run_worker, queue):
    queue.options(max_retries=0).enqueue("shop.fail_with", "sesame")
    worker = run_worker(OMNIQ_LOG_ERROR_MESSAGES="false")
    worker.wait_for("task.dead")
    stopped(worker)

    assert re.search(r": RuntimeError \(shop\.py:\d+ in fail_with\)", worker.text)
    assert "raise RuntimeError(message)" in worker.text
    assert "sesame" not in worker.text


def test_no_argument_is_in_the_log_of_a_task_that_does_not_raise_it(run_worker, queue):
    queue.enqueue("shop.noop")
    queue.options(max_retries=0).enqueue("shop.divide", "sesame")
    worker = run_worker("--log-level", "DEBUG")
    worker.wait_for("task.dead")
    stopped(worker)

    assert "TypeError: unsupported operand" in worker.text
    assert "sesame" not in worker.text


# The start


def test_the_start_says_version_storage_queues_functions_schedules_and_how_to_stop(
    run_worker, folder
):
    worker = run_worker("--queues", "default", OMNIQ_URL="redis://unused/0")
    worker.wait_for("worker.started")
    line = line_with(worker, "worker.started")

    for fact in (
        f"version={omniq.__version__}",
        f"storage=sqlite:///{folder}/q.db?durability=os",
        "queues=default",
        "shop.divide",
        "schedules=none",
        "stop=Ctrl-C or SIGTERM",
    ):
        assert fact in line
    assert "worker.advice" not in worker.text


def test_a_relative_url_is_shown_as_an_absolute_path_and_schedules_are_named(run_worker, folder):
    (folder / "nightly.py").write_text(
        "from omniq import task\n\n@task(cron='0 3 * * *')\ndef report():\n    pass\n"
    )
    worker = run_worker("--url", "sqlite:///.omniq/here.db", modules="shop nightly")
    worker.wait_for("worker.started")
    line = line_with(worker, "worker.started")

    assert f"storage=sqlite:///{folder}/.omniq/here.db" in line
    assert "schedules=1 (" in line
    assert "nightly.report" in line


def test_a_module_without_tasks_and_a_queue_that_nothing_fills_are_warned_of(run_worker, queue):
    queue.options(queue="mail").enqueue("shop.noop")
    worker = run_worker("-q", "mail,mial", modules="shop empty json")
    worker.wait_for("worker.advice", 3)
    lines = [line.partition("worker.advice: ")[2] for line in worker.lines if "advice" in line]

    assert all(" WARNING " in line for line in worker.lines if "worker.advice" in line)
    assert lines[0].startswith("module empty has no function that a worker can run; mark one")
    assert lines[1].startswith("functions of json are never run")
    assert lines[2].startswith("queue mial: nothing fills it yet")
    assert lines[2].endswith("did you mean mail?")
    assert len(lines) == 3


def test_the_password_of_a_storage_is_not_in_the_log(run_worker):
    worker = run_worker("--url", "redis://me:hunter2@127.0.0.1:1/0")
    worker.wait_for("storage.failing")

    assert "; trying again until it answers" in line_with(worker, "storage.failing")
    assert "hunter2" not in worker.text


def test_a_terminal_gets_a_summary_in_colours_and_a_file_does_not(folder, url):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "omniq", "worker", "shop", "--url", url],
        cwd=folder,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    shown = ""
    try:
        while "to stop" not in shown:
            assert select.select([ours], [], [], PATIENCE)[0], shown
            shown += os.read(ours, 4096).decode()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
        os.close(ours)

    assert "\x1b[" in shown
    for words in ("omniq ", "runs tasks of sqlite:///", "  queues     all", "  schedules  none"):
        assert words in shown
    assert "  functions  " in shown
    assert "  to stop    Ctrl-C" in shown
    # The line above the table does not say the same once more.
    assert shown.count("Ctrl-C or SIGTERM") == shown.count("sqlite:///") == 1


def test_a_worker_without_the_function_says_so_once_and_starts_nothing(run_worker, queue):
    for _ in range(3):
        queue.enqueue("shop.missing_function")
    worker = run_worker()
    worker.wait_for("function.missing")
    queue.enqueue("shop.noop").result(PATIENCE)
    stopped(worker)

    line = line_with(worker, "function.missing")
    assert " WARNING " in line
    assert "shop has no missing_function; its tasks wait for a worker that has it" in line
    assert "task.started" not in "".join(one for one in worker.lines if "missing_function" in one)


# Lines of user code

FUNCTIONS = ["in_the_loop", "in_a_thread", "in_a_process"]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_lines_of_user_code_carry_task_function_and_attempt(run_worker, queue, processes):
    worker = run_worker("--processes", processes)
    ids = {name: queue.enqueue(f"shop.{name}", name).id for name in FUNCTIONS}
    worker.wait_for("loguru says", 3)

    for name in FUNCTIONS:
        for library in ("stdlib", "loguru"):
            line = line_with(worker, f"{library} says {name}")
            logger = "shop.mail" if library == "stdlib" else "shop"
            assert re.search(
                rf"\.\d+Z INFO +\d+ {logger} id={ids[name]} func_path=shop\.{name} attempt=1: "
                rf"{library} says {name}$",
                line,
            )


def test_pid_is_in_every_json_line_the_process_that_wrote_it():
    json_format = JsonFormat(LogConfig(format="json"))
    event = ProcessEnded(pid=7, how="exit code 1", restart_in=0.10000000000000031)
    line = json.loads(json_format.event(event))

    assert (line["pid"], line["worker_pid"], line["restart_in"]) == (os.getpid(), 7, 0.1)


def test_json_lines_parse_and_carry_the_same_fields(run_worker, queue):
    worker = run_worker("--log-format", "json")
    ids = {name: queue.enqueue(f"shop.{name}", 'a "word"\né') for name in FUNCTIONS}
    failed = queue.options(max_retries=0).enqueue("shop.divide", 0)
    worker.wait_for("loguru says", 3)
    worker.wait_for("task.dead")
    lines = objects(stopped(worker))

    assert all({"time", "level", "pid"} <= set(line) for line in lines)
    said = [line for line in lines if "says" in line.get("message", "")]
    assert {(line["id"], line["func_path"], line["attempt"], line["logger"]) for line in said} == {
        (handle.id, f"shop.{name}", 1, logger)
        for name, handle in ids.items()
        for logger in ("shop.mail", "shop")
    }
    assert {line["message"] for line in said} == {
        'stdlib says a "word"\né',
        'loguru says a "word"\né',
    }
    (failure,) = [line for line in lines if line.get("event") == "task.dead"]
    assert (failure["id"], failure["error"], failure["reason"]) == (
        failed.id,
        "ZeroDivisionError",
        "exhausted",
    )
    assert failure["traceback"].splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert failure["where"].endswith("in one_by")
    (done,) = [
        line
        for line in lines
        if line.get("event") == "task.succeeded" and line["id"] == ids["in_the_loop"].id
    ]
    assert (done["level"], done["queue"], done["attempt"]) == ("INFO", "default", 1)
    assert done["seconds"] > 0
    assert done["owner"]


def test_an_exception_that_user_code_logs_is_written_below_its_line(run_worker, queue):
    worker = run_worker()
    queue.enqueue("shop.log_an_exception").result(PATIENCE)
    lines = stopped(worker)

    for words in (": it went wrong", ": it went wrong again"):
        at = next(number for number, line in enumerate(lines) if line.endswith(words))
        assert " ERROR " in lines[at]
        assert lines[at + 1] == "    Traceback (most recent call last):"
        assert "    KeyError: 'key'" in lines[at + 1 : at + 6]


def test_logging_that_the_application_has_set_up_is_left_alone(run_worker, queue, folder):
    (folder / "own.py").write_text(
        "import logging\n"
        "from omniq import task\n"
        "logging.basicConfig(\n"
        "    filename='own.log', level='DEBUG', format='%(message)s <%(task_id)s %(attempt)s>'\n"
        ")\n\n"
        "@task\n"
        "def speak():\n"
        "    logging.getLogger('own').debug('hello')\n"
    )
    worker = run_worker(modules="own")
    handle = queue.enqueue("own.speak")
    handle.result(PATIENCE)
    stopped(worker)

    assert f"hello <{handle.id} 1>" in (folder / "own.log").read_text().splitlines()
    assert "hello" not in worker.text


# Gathered lines


def test_the_lines_of_every_task_are_written_once_and_in_order(run_worker, queue):
    count = 300
    handles = queue.enqueue_many("shop.noop", [()] * count)
    worker = run_worker("--concurrency", "20")
    worker.wait_for("task.succeeded", count)
    stopped(worker)

    seen: dict[str, list[str]] = {handle.id: [] for handle in handles}
    for line in worker.lines:
        if found := re.search(r" (task\.\w+) id=(\w+) ", line):
            seen[found[2]].append(found[1])
    assert set(map(tuple, seen.values())) == {("task.started", "task.succeeded")}


def test_no_line_is_lost_when_a_task_ends_the_process_after_a_turn(run_worker, queue):
    handle = queue.options(max_crashes=0).enqueue("shop.exit_after_a_turn")
    worker = run_worker()

    assert worker.ends() == 3
    assert f"id={handle.id}" in line_with(worker, "task.started")


def test_a_line_is_written_while_a_task_blocks_the_loop(run_worker, queue):
    """The line that names the blocking task comes from another thread, after the gathered ones."""
    handle = queue.enqueue("shop.block_the_loop", 3.0)
    worker = run_worker()
    worker.wait_for("loop.blocked")

    names = [line.split()[4] for line in worker.lines if f"id={handle.id}" in line]
    assert names[:2] == ["task.started", "loop.blocked"]
    assert "task.succeeded" not in worker.text


def test_a_fork_in_a_task_writes_no_line_twice(run_worker, queue):
    worker = run_worker("--concurrency", "5")
    handles = [queue.enqueue("shop.fork") for _ in range(5)]
    for handle in handles:
        handle.result(PATIENCE)
    stopped(worker)

    assert worker.text.count("from a fork") == 5
    for handle in handles:
        line_with(worker, "task.started", handle.id)


@pytest.mark.parametrize("level", ["WARNING", "ERROR"])
def test_below_the_level_nothing_is_written(run_worker, queue, level):
    worker = run_worker("--log-level", level)
    wait_until(lambda: queue.workers())
    queue.enqueue("shop.in_a_thread", "x").result(PATIENCE)

    assert stopped(worker) == []


def test_a_worker_that_does_not_stop_in_time_says_once_that_it_stops(run_worker, folder, queue):
    (folder / "sleeps.py").write_text(
        "import time\nfrom omniq import task\n@task\ndef sleep(): time.sleep(60)\n"
    )
    queue.enqueue("sleeps.sleep")
    worker = run_worker("--shutdown-timeout", "0.5", "-c", "1", modules="sleeps")
    worker.wait_for("task.started")
    lines = stopped(worker)

    assert len([line for line in lines if "worker.stopping" in line]) == 1
    assert any("worker.recycling" in line for line in lines)
    assert any("worker.stopped" in line and "timed_out=True" in line for line in lines)


# Warnings


def test_a_json_log_has_nothing_but_json(run_worker, folder, queue):
    """Warnings of the settings, of modules that are imported and of tasks are lines of the log."""
    (folder / "warns.py").write_text(
        "import warnings\n"
        "from omniq import task\n"
        "warnings.warn('at import', DeprecationWarning, stacklevel=1)\n"
        "@task\n"
        "def warn(): warnings.warn('in a task', RuntimeWarning, stacklevel=1)\n"
    )
    queue.enqueue("warns.warn")
    worker = run_worker(
        "--log-format", "json", modules="warns", OMNIQ_ULR="x", PYTHONWARNINGS="default"
    )
    worker.wait_for("task.succeeded")
    found = objects(stopped(worker))

    texts = [each["message"] for each in found if each.get("logger") == "omniq"]
    assert [each["level"] for each in found if "logger" in each] == ["WARNING"] * len(texts)
    assert texts[0] == (
        "OMNIQ_ULR is not a setting of omniq and is ignored; did you mean OMNIQ_URL?"
    )
    assert any("warns.py:3: DeprecationWarning: at import" in text for text in texts)
    assert any("warns.py:5: RuntimeWarning: in a task" in text for text in texts)
    assert len([text for text in texts if "OMNIQ_ULR" in text]) == 1
