"""`omniq worker` with real processes and real signals."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omniq import TaskQueue, TaskStatus
from omniq.clock import SYSTEM_CLOCK
from tests.acceptance.command import (
    PATIENCE,
    clean_environment,
    is_alive,
    wait_until,
    worker_pids,
)
from tests.cli.in_process import run_command
from tests.timing import at_most

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PENDING, RUNNING, SUCCESS, FAILED = (
    TaskStatus.PENDING,
    TaskStatus.RUNNING,
    TaskStatus.SUCCESS,
    TaskStatus.FAILED,
)


def status(queue: TaskQueue, task_id: str) -> TaskStatus:
    task = queue.get_task(task_id)
    assert task is not None
    return task.status


def wait_for_status(queue: TaskQueue, task_id: str, wanted: TaskStatus) -> float:
    return wait_until(lambda: status(queue, task_id) is wanted, f"{task_id} is {wanted}")


def run_once(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "omniq", *arguments],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


# Running tasks


@pytest.mark.deep_on("2")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_worker_runs_any_function_of_its_modules_from_the_current_folder(
    run_worker, queue, processes
):
    worker = run_worker("--processes", processes)
    first, second = queue.enqueue("tasks.add", 1, 2), queue.enqueue("tasks.double", 4)

    assert (first.result(PATIENCE), second.result(PATIENCE)) == (3, 8)
    worker.send(signal.SIGTERM)
    assert worker.ends() == 0


def test_a_worker_claims_only_from_its_queues(run_worker, queue):
    left = queue.options(queue="other").enqueue("tasks.add", 0, 0)
    taken = [queue.options(queue=name).enqueue("tasks.add", 1, 1) for name in ("mail", "web")]
    run_worker("--queues", "mail,web")

    assert [handle.result(PATIENCE) for handle in taken] == [2, 2]
    assert left.status() is PENDING


def test_a_forbidden_function_never_runs(run_worker, queue, folder):
    touch = f"touch {folder}/owned"
    forbidden = [
        queue.enqueue("os.system", touch),
        queue.enqueue("tasks.system", touch),
        queue.enqueue("tasks.os.system", touch),
        queue.enqueue("tasks.subprocess.getoutput", touch),
    ]
    run_worker()

    assert queue.enqueue("tasks.add", 1, 2).result(PATIENCE) == 3
    assert not (folder / "owned").exists()
    assert {handle.status() for handle in forbidden} <= {PENDING, RUNNING}
    assert {queue.get_task(handle.id).attempts for handle in forbidden} == {0}


@pytest.mark.fault("F74")
def test_a_function_of_another_module_is_left_to_other_workers(run_worker, queue, folder):
    (folder / "others.py").write_text("def touch(path):\n    open(path, 'w').close()\n")
    handle = queue.enqueue("others.touch", str(folder / "touched"))
    worker = run_worker()

    assert queue.enqueue("tasks.add", 1, 2).result(PATIENCE) == 3
    worker.send(signal.SIGTERM)
    assert worker.ends() == 0
    assert handle.status() is PENDING
    assert queue.get_task(handle.id).attempts == 0
    assert not (folder / "touched").exists()


@pytest.mark.fault("F74")
def test_a_rolling_deploy_loses_and_charges_no_task_of_a_new_function(run_worker, queue, folder):
    old = run_worker()
    assert queue.enqueue("tasks.add", 1, 2).result(PATIENCE) == 3
    source = folder / "tasks.py"
    source.write_text(source.read_text() + "\n\ndef triple(number):\n    return number * 3\n")
    handles = [queue.options(max_retries=0).enqueue("tasks.triple", n) for n in range(20)]
    old.wait_for("function.missing")
    assert not any(handle.status().is_final for handle in handles)
    run_worker()

    assert [handle.result(PATIENCE) for handle in handles] == [n * 3 for n in range(20)]
    assert {queue.get_result(handle.id).attempts for handle in handles} == {1}
    assert old.text.count("function.missing") == 1
    assert "tasks.triple" not in "".join(
        line for line in old.text.splitlines() if "task.started" in line
    )


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_worker_process_imports_of_the_command_line_only_what_it_parses_with(
    run_worker, queue, folder, processes
):
    (folder / "inspect_modules.py").write_text(
        "import sys\n\ndef modules():\n    return list(sys.modules)\n"
    )
    run_worker("--processes", processes, modules=("inspect_modules",))
    modules = queue.enqueue("inspect_modules.modules").result(PATIENCE)

    assert "omniq.worker" in modules
    ours = {name.removeprefix("omniq.cli.") for name in modules if name.startswith("omniq.cli.")}
    assert ours <= {"app", "command", "options", "worker", "worker_exec"}
    assert "omniq.cli.app" in modules or processes == "2"


# Errors before anything is claimed


@pytest.mark.deep_on("2")
@pytest.mark.parametrize(
    ("module", "source", "message", "processes"),
    [
        ("missing", None, "there is no module missing", "1"),
        ("missing", None, "there is no module missing", "2"),
        ("tasks.py", None, "give the name of a module, such as tasks", "1"),
        ("./tasks.py", None, "give the name of a module, such as tasks", "1"),
        ("taks", None, "there is no module taks; did you mean tasks?", "1"),
        ("nowhere", None, "start the worker in the folder of your code", "1"),
        ("broken", "import nowhere_to_be_found", "nowhere_to_be_found", "1"),
        ("wrong", "def f(:", "line 1", "1"),
        ("leaving", "raise SystemExit(0)", "SystemExit", "1"),
        ("leaving", "raise SystemExit(0)", "SystemExit", "2"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line_and_exit_2(
    run_worker, queue, folder, module, source, message, processes
):
    if source is not None:
        (folder / f"{module}.py").write_text(source)
    handle = queue.enqueue("tasks.add", 1, 2)
    worker = run_worker("--processes", processes, "--log-level", "error", modules=("tasks", module))

    assert worker.ends() == 2
    assert len(worker.lines) == 1
    assert worker.lines[0].startswith("omniq: ")
    assert message in worker.lines[0]
    assert handle.status() is PENDING


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lease", "0.2"], "cannot be held"),
        (["--lease", "nan"], "lease"),
        (["--poll-interval", "0"], "poll_interval"),
        (["--concurrency", "0"], "--concurrency"),
        (["--processes", "0"], "--processes"),
        (["--queues", "a,,b"], "queue"),
        (["--log-level", "loud"], "log_level"),
        (["--url", "nosuch://x"], "nosuch"),
        (["--url", "memory://", "--processes", "2"], "one process"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_2(folder, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    ended = run_command(capsys, "worker", "tasks", *arguments)
    sys.modules.pop("tasks", None)

    assert (ended.code, ended.out) == (2, "")
    [line] = ended.err.splitlines()
    assert line.startswith("omniq: ")
    assert message in line


def test_a_storage_that_cannot_be_opened_is_one_line_and_exit_1(folder):
    ended = run_once(folder, "worker", "tasks", "--url", "sqlite:////proc/nowhere/tasks.db")

    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert line.startswith("omniq: ")


def test_a_traceback_is_shown_only_when_asked_for(folder):
    plain = run_once(folder, "worker", "missing")
    debug = run_once(folder, "worker", "missing", "--debug")

    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr
    assert plain.returncode == debug.returncode == 2


# Stopping


@pytest.mark.deep_on("2")
@pytest.mark.parametrize(
    ("number", "processes"), [(signal.SIGTERM, "1"), (signal.SIGINT, "1"), (signal.SIGTERM, "2")]
)
def test_an_idle_worker_ends_with_0_within_a_second(run_worker, queue, number, processes):
    worker = run_worker("--processes", processes, "--poll-interval", "60")
    worker.wait_for("worker.started", int(processes))
    worker.send(number)

    assert worker.ends(within=at_most(1.0)) == 0
    assert "Traceback" not in worker.text
    assert queue.workers() == []


@pytest.mark.deep_on("2")
@pytest.mark.parametrize(
    ("function", "processes"),
    [("tasks.wait_for", "1"), ("tasks.await_for", "1"), ("tasks.await_for", "2")],
)
def test_a_running_task_may_finish(run_worker, queue, folder, function, processes):
    worker = run_worker("--processes", processes, "--concurrency", "1")
    handle = queue.enqueue(function, str(folder / "go"))
    wait_for_status(queue, handle.id, RUNNING)
    waiting = queue.enqueue("tasks.add", 1, 2)
    if processes == "2":
        waiting.result(PATIENCE)
    worker.send(signal.SIGTERM)
    worker.wait_for("worker.stopping", int(processes))
    (folder / "go").touch()

    assert worker.ends() == 0
    assert status(queue, handle.id) is SUCCESS
    if processes == "1":
        assert waiting.status() is PENDING


@pytest.mark.deep_on("2")
@pytest.mark.parametrize(
    ("function", "processes"),
    [
        ("wait_for", "1"),
        ("await_for", "1"),
        ("stubborn", "1"),
        ("block_the_loop", "1"),
        ("wait_for", "2"),
        ("block_the_loop", "2"),
    ],
)
@pytest.mark.fault("F08")
def test_a_task_that_does_not_finish_in_time_is_released(
    run_worker, queue, folder, function, processes
):
    arguments = [str(folder / "never")] if function.endswith("for") else []
    worker = run_worker("--shutdown-timeout", "0.5", "--processes", processes)
    handle = queue.enqueue(f"tasks.{function}", *arguments)
    wait_for_status(queue, handle.id, RUNNING)
    began = SYSTEM_CLOCK.monotonic()
    worker.send(signal.SIGTERM)
    wait_for_status(queue, handle.id, PENDING)
    took = SYSTEM_CLOCK.monotonic() - began

    assert worker.ends(within=at_most(2.0)) == 0
    assert took < 0.5 + at_most(1.0)
    assert queue.get_task(handle.id).attempts == 0
    assert "Traceback" not in worker.text


@pytest.mark.parametrize(
    ("function", "number", "processes"),
    [
        ("wait_for", signal.SIGTERM, "1"),
        ("stubborn", signal.SIGINT, "1"),
        ("block_the_loop", signal.SIGTERM, "1"),
        pytest.param("wait_for", signal.SIGINT, "2", marks=pytest.mark.deep),
        pytest.param("block_the_loop", signal.SIGTERM, "2", marks=pytest.mark.deep),
    ],
)
@pytest.mark.fault("F09")
def test_a_second_signal_ends_it_within_a_second(
    run_worker, queue, folder, function, number, processes
):
    arguments = [str(folder / "never")] if function.endswith("for") else []
    worker = run_worker("--processes", processes)
    handle = queue.enqueue(f"tasks.{function}", *arguments)
    wait_for_status(queue, handle.id, RUNNING)
    worker.send(signal.SIGTERM)
    worker.wait_for("worker.stopping", int(processes))
    # An earlier one counts as a part of the first.
    time.sleep(0.35)
    worker.send(number)

    assert worker.ends(within=at_most(1.0)) == 128 + number
    assert "Traceback" not in worker.text
    task = queue.get_task(handle.id)
    # Released if the storage answered within that second, as it does unless the machine is
    # overloaded; otherwise the lease expires.
    assert task.status in (PENDING, RUNNING)
    assert task.attempts == 0


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.deep)])
def test_a_second_signal_names_what_has_not_finished_and_will_run_again(
    run_worker, queue, folder, processes
):
    again = [
        queue.enqueue(f"tasks.{name}", str(folder / "never")) for name in ("wait_for", "await_for")
    ]
    once = queue.options(max_crashes=0).enqueue("tasks.await_for", str(folder / "never"))
    worker = run_worker("--processes", processes)
    for handle in (*again, once):
        wait_for_status(queue, handle.id, RUNNING)
    worker.send(signal.SIGINT)
    worker.wait_for("worker.stopping", int(processes))
    time.sleep(0.35)
    worker.send(signal.SIGINT)

    assert worker.ends() == 128 + signal.SIGINT
    lines = [line for line in worker.lines if "worker.forced" in line]
    assert all(" WARNING " in line for line in lines)
    said = "\n".join(lines)
    assert "will run again" in said
    assert "may run only once and will be dead letters" in said
    for handle, name in zip((*again, once), ("wait_for", "await_for", "await_for"), strict=True):
        assert f"tasks.{name} {handle.id}" in said


def test_a_signal_while_the_modules_are_imported_ends_it_with_0(run_worker, queue, folder):
    (folder / "slow.py").write_text(
        "import pathlib, threading\npathlib.Path('importing').touch()\nthreading.Event().wait(60)\n"
    )
    worker = run_worker(modules=("slow",))
    wait_until((folder / "importing").exists)
    worker.send(signal.SIGTERM)

    assert worker.ends(within=at_most(1.0)) == 0
    assert worker.lines == []


def test_processes_ignore_settings_for_a_storage_of_another_kind(run_worker, queue):
    """The URL is given here: the schema in the environment is for another program's storage."""
    worker = run_worker("--processes", "2", OMNIQ_SCHEMA="jobs")
    handle = queue.enqueue("tasks.add", 1, 2)

    assert handle.result(timeout=60) == 3
    worker.send(signal.SIGTERM)
    assert worker.ends(within=at_most(10.0)) == 0


def test_a_signal_before_the_worker_runs_ends_it_with_0(folder, url):
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'omniq.cli.worker_exec':\n"
        "            open('parsing', 'w').close()\n"
        "            import time\n"
        "            time.sleep(0.5)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "omniq", "worker", "tasks", "--url", url],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stderr=subprocess.PIPE,
    )
    wait_until((folder / "parsing").exists)
    process.send_signal(signal.SIGTERM)

    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"Traceback" not in stderr


def test_a_worker_that_was_started_with_the_signal_blocked_stops_nevertheless(folder, url, queue):
    """As after a restart: the process blocks SIGTERM before it replaces itself."""
    (folder / "run.py").write_text(
        "import signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "from omniq import Worker\n"
        "sys.exit(Worker(sys.argv[1], ['tasks']).run())\n"
    )
    process = subprocess.Popen([sys.executable, "run.py", url], cwd=folder)
    assert queue.enqueue("tasks.add", 1, 2).result(timeout=60) == 3
    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=60) == 0


# Closed pipes and terminals


@pytest.mark.fault("F11")
def test_a_closed_log_pipe_does_not_end_the_worker(folder, url, queue):
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "omniq", "worker", "tasks", "--url", url]
    with subprocess.Popen(
        command, cwd=folder, env=clean_environment(), stdout=writing, stderr=writing
    ) as process:
        os.close(writing)
        try:
            assert queue.enqueue("tasks.add", 1, 2).result(PATIENCE) == 3
            os.close(reading)
            assert queue.enqueue("tasks.add", 3, 4).result(PATIENCE) == 7
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


@pytest.mark.fault("F11")
def test_without_a_terminal_a_hangup_is_ignored(run_worker, queue):
    worker = run_worker()
    worker.wait_for("worker.started")
    worker.send(signal.SIGHUP)

    assert queue.enqueue("tasks.add", 1, 2).result(PATIENCE) == 3
    worker.send(signal.SIGTERM)
    assert worker.ends() == 0


TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
# A test run under nohup ignores SIGHUP, and its children inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_a_closed_terminal_stops_the_worker_like_sigterm(folder, url, queue):
    supervisor, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, "-m", "omniq", "worker", "tasks", "--url", url],
        cwd=folder,
        env=clean_environment(),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as process:
        os.close(terminal)
        try:
            assert queue.enqueue("tasks.add", 1, 2).result(PATIENCE) == 3
            os.close(supervisor)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


# Tasks that hang


@pytest.mark.deep_on("2")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_worker_whose_threads_hang_is_replaced(run_worker, queue, folder, processes):
    hanging = [
        queue.options(timeout=0.2, max_retries=0).enqueue("tasks.wait_for", str(folder / "never"))
        for _ in range(int(processes))
    ]
    worker = run_worker("--processes", processes, "--shutdown-timeout", "1", "-c", "1")
    for handle in hanging:
        wait_for_status(queue, handle.id, FAILED)

    assert queue.enqueue("tasks.add", 1, 2).result(PATIENCE) == 3
    worker.wait_for("worker.recycling", int(processes))
    worker.wait_for("worker.started", 2 * int(processes))
    worker.send(signal.SIGTERM)
    assert worker.ends() == 0


def test_a_worker_whose_loop_hangs_is_replaced_and_only_the_stuck_task_is_charged(
    run_worker, queue, folder
):
    worker = run_worker("--concurrency", "2", "--lease", "2", "--poll-interval", "0.2")
    neighbour = queue.enqueue("tasks.wait_for", str(folder / "go"))
    wait_for_status(queue, neighbour.id, RUNNING)
    culprit = queue.options(timeout=0.2, queue="default").enqueue("tasks.block_the_loop")
    worker.wait_for("worker.stuck")
    wait_until(lambda: queue.get_task(culprit.id).crashes == 1, "charged")
    (folder / "go").touch()

    assert neighbour.result(PATIENCE) == "done"
    assert queue.get_task(neighbour.id).crashes == 0


# Killed processes

LEASE, POLL = 1.5, 0.5


@pytest.mark.fault("F01")
def test_tasks_of_a_killed_process_run_again_and_the_process_is_replaced(run_worker, queue, folder):
    worker = run_worker(
        "--processes", "2", "--lease", str(LEASE), "--poll-interval", str(POLL), "-c", "2"
    )
    worker.wait_for("worker.started", 2)
    handle = queue.enqueue("tasks.await_for", str(folder / "go"))
    wait_for_status(queue, handle.id, RUNNING)
    victim = next(one.pid for one in queue.workers() if handle.id in one.running)
    before = worker_pids(queue)
    token = queue.get_task(handle.id).token
    os.kill(victim, signal.SIGKILL)
    took = wait_until(lambda: queue.get_task(handle.id).token > token, "claimed again")
    (folder / "go").touch()

    assert took < LEASE + POLL + at_most(0.25)
    assert handle.result(PATIENCE) == "done"
    assert queue.get_task(handle.id).crashes == 1
    wait_until(lambda: len(worker_pids(queue) - {victim}) == 2, "two workers again")
    assert len(worker_pids(queue) - before) == 1
    worker.wait_for("process.ended")
    assert "SIGKILL" in worker.text
    worker.send(signal.SIGTERM)
    assert worker.ends() == 0


@pytest.mark.fault("F12")
def test_when_the_supervisor_is_killed_its_processes_release_everything_and_end(
    run_worker, queue, folder
):
    worker = run_worker("--processes", "2")
    worker.wait_for("worker.started", 2)
    handles = [
        queue.enqueue(f"tasks.{function}", str(folder / "go"))
        for function in ("wait_for", "await_for")
    ]
    for handle in handles:
        wait_for_status(queue, handle.id, RUNNING)
    pids = worker_pids(queue)
    worker.process.kill()

    assert wait_until(lambda: not any(is_alive(pid) for pid in pids)) < at_most(1.5)
    for handle in handles:
        assert queue.get_task(handle.id).attempts == 0
    (folder / "go").touch()
    run_worker()
    assert [handle.result(PATIENCE) for handle in handles] == ["done", "done"]


@pytest.mark.fault("F07")
def test_a_task_that_kills_its_worker_is_the_only_one_to_fail(run_worker, queue):
    good = [queue.enqueue("tasks.add", number, 1) for number in range(15)]
    killer = queue.enqueue("tasks.die")
    good += [queue.enqueue("tasks.add", number, 1) for number in range(15, 30)]
    worker = run_worker(
        "--processes", "2", "--concurrency", "4", "--lease", "1", "--poll-interval", "0.2"
    )
    wait_for_status(queue, killer.id, FAILED)

    assert [handle.result(PATIENCE) for handle in good] == list(range(1, 31))
    letter = queue.dead.get(killer.id)
    assert letter.failure_reason == "crashed"
    assert letter.attempt_count == 3
    assert len(queue.dead.list()) == 1
    assert sum("process.ended" in line for line in worker.lines) == 3
    worker.send(signal.SIGTERM)
    assert worker.ends() == 0


@pytest.mark.fault("F29")
def test_every_start_is_a_new_worker(run_worker, queue):
    ids = set()
    for _ in range(2):
        worker = run_worker()
        worker.wait_for("worker.started")
        ids |= {one.id for one in queue.workers()}
        worker.send(signal.SIGTERM)
        worker.ends()

    assert len(ids) == 2


# Output


def test_the_log_names_events_and_never_arguments(run_worker, queue):
    # `tasks.fail` raises its argument: without the texts of exceptions, nothing of it may be there.
    worker = run_worker("--log-level", "INFO", OMNIQ_LOG_ERROR_MESSAGES="0")
    good = queue.enqueue("tasks.add", "sesame", "open")
    bad = queue.options(max_retries=0).enqueue("tasks.fail", "sesame")
    good.result(PATIENCE)
    wait_for_status(queue, bad.id, FAILED)
    worker.send(signal.SIGTERM)
    worker.ends()

    lines = {
        name: next(line for line in worker.lines if f" {name}" in line)
        for name in ("worker.started", "task.started", "task.succeeded")
    }
    assert all("INFO" in line for line in lines.values())
    assert "ERROR" in next(line for line in worker.lines if " task.dead" in line)
    assert " worker.stopped" in worker.text
    assert "sesame" not in worker.text
    assert "DEBUG" not in worker.text


def test_at_debug_level_each_retry_is_logged_with_its_attempt_and_time(run_worker, queue):
    worker = run_worker("--log-level", "debug")
    queue.enqueue("tasks.fail", "sesame")
    worker.wait_for("task.retried")

    line = next(line for line in worker.lines if "task.retried" in line)
    assert "DEBUG" in line
    assert "attempt=1" in line
    assert "retry_at=" in line


def test_plain_text_when_it_is_not_a_terminal(run_worker):
    worker = run_worker()
    worker.wait_for("worker.started")

    assert "\x1b" not in worker.text


def test_help_is_printed_with_exit_code_0(folder):
    ended = run_once(folder, "worker", "--help")

    assert ended.returncode == 0
    for option in ("--url", "--concurrency", "--processes", "--queues", "--shutdown-timeout"):
        assert option in ended.stdout


# Processes that are replaced


@pytest.mark.parametrize(
    ("limit", "processes"),
    [
        (("--max-tasks-per-child", "3"), "1"),
        pytest.param(("--max-tasks-per-child", "3"), "2", marks=pytest.mark.deep),
        pytest.param(("--max-memory-per-child", "1"), "1", marks=pytest.mark.deep),
    ],
)
def test_a_worker_process_is_replaced_between_tasks_and_nothing_is_lost(
    run_worker, queue, folder, limit, processes
):
    handles = [queue.enqueue("tasks.double", number) for number in range(8)]
    worker = run_worker(*limit, "--processes", processes, "-c", "2", "--poll-interval", "0.2")

    assert [handle.result(PATIENCE) for handle in handles] == [number * 2 for number in range(8)]
    worker.wait_for("worker.recycling")
    worker.wait_for("worker.started", 2 if processes == "1" else 3)
    assert [queue.get_task(handle.id).crashes for handle in handles] == [0] * 8
    assert [queue.get_task(handle.id).failures for handle in handles] == [0] * 8
    worker.send(signal.SIGTERM)
    assert worker.ends() == 0


@pytest.mark.deep
def test_a_burst_goes_on_in_the_new_process(run_worker, queue, folder):
    handles = [queue.enqueue("tasks.double", number) for number in range(8)]
    worker = run_worker("--burst", "--max-tasks-per-child", "3", "-c", "1")

    assert worker.ends() == 0
    assert [handle.result(PATIENCE) for handle in handles] == [number * 2 for number in range(8)]
