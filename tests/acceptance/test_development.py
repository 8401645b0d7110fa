"""The development loop: `--reload`, `--burst`, modules from the settings, and modules below a package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omniq import TaskQueue, TaskStatus
from tests.acceptance.command import PATIENCE, clean_environment, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

VERSION = "async def version():\n    return {}\n"


def run_once(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "omniq", *arguments],
        cwd=folder,
        env={**clean_environment(), **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


# --reload


PROCESSES = pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.deep)])


@PROCESSES
def test_a_changed_file_restarts_the_worker_with_the_new_code(run_worker, queue, folder, processes):
    (folder / "versions.py").write_text(VERSION.format(1))
    worker = run_worker("--reload", "--processes", processes, modules=("versions",))
    first = queue.enqueue("versions.version").result(PATIENCE)
    worker.wait_for("worker.started", int(processes))
    pid = worker.process.pid
    (folder / "versions.py").write_text(VERSION.format(2))
    worker.wait_for("versions.py changed: the worker restarts")
    worker.wait_for("worker.started", 2 * int(processes))
    second = queue.enqueue("versions.version").result(PATIENCE)
    worker.send(signal.SIGTERM)

    assert worker.ends() == 0
    assert (first, second) == (1, 2)
    assert worker.process.pid == pid


def test_the_change_of_a_module_that_is_only_imported_counts(run_worker, queue, folder):
    (folder / "library").mkdir()
    (folder / "library" / "numbers_of_ours.py").write_text("ONE = 1\n")
    (folder / "uses.py").write_text(
        "from library.numbers_of_ours import ONE\n\ndef one():\n    return ONE\n"
    )
    worker = run_worker("--reload", modules=("uses",))
    worker.wait_for("worker.started")
    (folder / "library" / "numbers_of_ours.py").write_text("ONE = 7\n")
    worker.wait_for("worker.started", 2)

    assert queue.enqueue("uses.one").result(PATIENCE) == 7


@PROCESSES
def test_a_syntax_error_is_reported_and_the_next_change_starts_the_worker(
    run_worker, queue, folder, processes
):
    (folder / "versions.py").write_text(VERSION.format(1))
    worker = run_worker("--reload", "--processes", processes, modules=("versions",))
    worker.wait_for("worker.started", int(processes))
    (folder / "versions.py").write_text("def version(:\n")
    worker.wait_for("starts again when a file has changed")
    assert "versions.py, line 1" in worker.text
    handle = queue.enqueue("versions.version")
    (folder / "versions.py").write_text(VERSION.format("'mended'"))

    assert handle.result(PATIENCE) == "mended"
    worker.send(signal.SIGTERM)
    assert worker.ends() == 0
    assert "Traceback" not in worker.text


def test_a_worker_that_waits_for_a_change_ends_at_a_signal(run_worker, folder):
    (folder / "versions.py").write_text("def version(:\n")
    worker = run_worker("--reload", modules=("versions",))
    worker.wait_for("starts again when a file has changed")
    worker.send(signal.SIGINT)

    assert worker.ends() == 0
    assert "Traceback" not in worker.text


@PROCESSES
def test_running_tasks_finish_before_a_restart_or_are_released(
    run_worker, queue, folder, processes
):
    worker = run_worker("--reload", "--processes", processes, "--shutdown-timeout", "1.5")
    quick = queue.enqueue("tasks.await_for", str(folder / "go"))
    slow = queue.options(max_retries=0).enqueue("tasks.await_for", str(folder / "later"))
    wait_until(
        lambda: {handle.status() for handle in (quick, slow)} == {TaskStatus.RUNNING}, "running"
    )
    worker.wait_for("worker.started", int(processes))
    (folder / "other.py").write_text("")
    worker.wait_for("worker.stopping", int(processes))
    (folder / "go").touch()
    worker.wait_for("worker.started", 2 * int(processes))
    assert quick.status() is TaskStatus.SUCCESS
    (folder / "later").touch()

    assert slow.result(PATIENCE) == "done"
    assert queue.get_result(slow.id).attempts == 1
    assert queue.get_task(slow.id).crashes == 0


def test_a_signal_during_a_restart_ends_the_worker(run_worker, queue, folder):
    worker = run_worker("--reload", "--shutdown-timeout", "20")
    handle = queue.enqueue("tasks.await_for", str(folder / "go"))
    wait_until(lambda: handle.status() is TaskStatus.RUNNING, "running")
    (folder / "other.py").write_text("")
    worker.wait_for("worker.stopping")
    worker.send(signal.SIGTERM)
    (folder / "go").touch()

    assert worker.ends() == 0
    assert worker.text.count("worker.started") == 1
    assert handle.status() is TaskStatus.SUCCESS


@pytest.mark.deep_on("INT")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_a_signal_while_the_process_is_replaced_ends_it_without_a_traceback(
    run_worker, folder, number
):
    worker = run_worker("--reload")
    worker.wait_for("worker.started")
    (folder / "other.py").write_text("")
    worker.wait_for("worker.stopped")
    # The new program is being loaded.
    time.sleep(0.05)
    worker.send(number)

    assert worker.ends() in (0, 130)
    assert "Traceback" not in worker.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reload", "--burst"], "either burst or reload"),
        (["--reload", "--url", "memory://"], "would be lost"),
    ],
)
def test_a_reload_that_makes_no_sense_is_refused(folder, arguments, message):
    ended = run_once(folder, "worker", "tasks", *arguments)

    assert ended.returncode == 2
    assert message in ended.stderr


# --burst


@PROCESSES
def test_burst_runs_what_is_there_says_what_is_left_and_ends_with_0(run_worker, queue, processes):
    now = [queue.enqueue("tasks.add", number, 1) for number in range(50)]
    later = queue.options(delay=3600).enqueue("tasks.add", 1, 1)
    other = queue.enqueue("elsewhere.add", 1, 1)
    worker = run_worker("--burst", "--processes", processes)

    assert worker.ends() == 0
    assert {handle.status() for handle in now} == {TaskStatus.SUCCESS}
    assert {handle.status() for handle in (later, other)} == {TaskStatus.PENDING}
    assert worker.text.count("worker.drained") == int(processes)
    assert "left=2" in worker.text
    assert "process.ended" not in worker.text


def test_burst_with_nothing_to_do_says_so(run_worker):
    worker = run_worker("--burst")

    assert worker.ends() == 0
    assert "left=0" in worker.text


def test_a_burst_runs_what_a_killed_worker_held(run_worker, queue, folder):
    first = run_worker("--lease", "1")
    handle = queue.enqueue("tasks.await_for", str(folder / "go"))
    wait_until(lambda: handle.status() is TaskStatus.RUNNING)
    first.send(signal.SIGKILL)
    (folder / "go").touch()
    wait_until(lambda: queue.workers() == [])

    second = run_worker("--burst", "--lease", "1")

    assert second.ends() == 0
    assert handle.status() is TaskStatus.SUCCESS


@PROCESSES
def test_a_burst_waits_for_the_lease_of_a_worker_that_was_just_killed(
    run_worker, queue, folder, processes
):
    first = run_worker("--lease", "3")
    handle = queue.enqueue("tasks.await_for", str(folder / "go"))
    wait_until(lambda: handle.status() is TaskStatus.RUNNING)
    first.send(signal.SIGKILL)
    (folder / "go").touch()

    second = run_worker("--burst", "--lease", "3", "--processes", processes)

    assert second.ends() == 0
    assert handle.status() is TaskStatus.SUCCESS
    assert "worker.awaits_leases" in second.text
    assert "left=0 held=0" in second.text


def test_a_burst_counts_what_live_workers_hold_and_ends(run_worker, queue, folder):
    first = run_worker("--lease", "3")
    handle = queue.enqueue("tasks.await_for", str(folder / "go"))
    wait_until(lambda: handle.status() is TaskStatus.RUNNING)

    second = run_worker("--burst")

    assert second.ends() == 0
    assert "left=0 held=1" in second.text
    assert handle.status() is TaskStatus.RUNNING
    (folder / "go").touch()
    assert handle.result(PATIENCE) is not None
    first.send(signal.SIGTERM)
    assert first.ends() == 0


@PROCESSES
def test_a_burst_does_not_wait_for_a_server_that_is_unreachable(folder, processes):
    options = ("--burst", "--processes", processes, "--url", "redis://localhost:1/0")
    ended = run_once(folder, "worker", "tasks", *options)

    assert ended.returncode == 1
    assert "Connection refused" in ended.stderr
    assert "Traceback" not in ended.stderr


@PROCESSES
def test_a_signal_ends_a_burst(run_worker, queue, folder, processes):
    handle = queue.enqueue("tasks.await_for", str(folder / "never"))
    worker = run_worker("--burst", "--processes", processes, "--shutdown-timeout", "0.5")
    wait_until(lambda: handle.status() is TaskStatus.RUNNING, "running")
    worker.send(signal.SIGTERM)

    assert worker.ends() == 0
    assert handle.status() is TaskStatus.PENDING


# Modules from the settings


def test_the_settings_name_the_modules_also_from_a_folder_below(folder, url):
    (folder / "pyproject.toml").write_text('[tool.omniq]\nmodules = ["tasks"]\n')
    below = folder / "docs" / "pages"
    below.mkdir(parents=True)
    with TaskQueue(url) as queue:
        handle = queue.enqueue("tasks.add", 1, 2)
        ended = run_once(below, "worker", "--burst", "--url", url)

        assert (ended.returncode, handle.result(30)) == (0, 3)


def test_a_missing_module_of_the_settings_is_looked_for_where_they_are(folder):
    (folder / "pyproject.toml").write_text('[tool.omniq]\nmodules = ["nowhere"]\n')
    below = folder / "below"
    below.mkdir()
    ended = run_once(below, "worker")

    assert ended.returncode == 2
    assert f"looked in {folder} and among" in ended.stderr


def test_a_variable_names_the_modules_and_arguments_replace_them(folder, url):
    (folder / "others.py").write_text("def work():\n    return 'done'\n")
    with TaskQueue(url) as queue:
        added, worked = queue.enqueue("tasks.add", 1, 2), queue.enqueue("others.work")
        named = run_once(folder, "worker", "--burst", "--url", url, OMNIQ_MODULES="tasks")
        assert (named.returncode, added.result(30)) == (0, 3)
        assert worked.status() is TaskStatus.PENDING
        given = run_once(folder, "worker", "others", "--burst", "--url", url, OMNIQ_MODULES="tasks")

        assert (given.returncode, worked.result(30)) == (0, "done")


def test_a_worker_without_modules_is_told_where_to_name_them(folder):
    ended = run_once(folder, "worker")

    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    for part in ("omniq worker app.tasks", "[tool.omniq] modules", "OMNIQ_MODULES"):
        assert part in line


def test_a_name_is_enqueued_with_its_options_from_the_modules_of_the_settings(folder, url):
    (folder / "named.py").write_text(
        "from omniq import task\n\n@task(name='mail.send', queue='mail')\n"
        "def send(to):\n    return to\n"
    )
    (folder / "pyproject.toml").write_text('[tool.omniq]\nmodules = ["named"]\n')
    wrong = run_once(folder, "enqueue", "mail.send", "--url", url)
    right = run_once(folder, "enqueue", "mail.send", '"you"', "--url", url)
    run_once(folder, "worker", "--burst", "--url", url)
    with TaskQueue(url) as queue:
        task = queue.get_task(right.stdout.strip())

    assert wrong.returncode == 2
    assert "mail.send" in wrong.stderr
    assert task is not None
    assert (task.func_path, task.queue, task.status) == ("mail.send", "mail", TaskStatus.SUCCESS)


def test_a_name_that_is_also_where_the_function_is_imported_is_enqueued(folder, url):
    package(folder, impl="from omniq import task\n\n@task(name='shop.send')\ndef send(): ...\n")
    (folder / "shop" / "__init__.py").write_text("from shop.impl import send\n")
    (folder / "pyproject.toml").write_text('[tool.omniq]\nmodules = ["shop"]\n')
    ended = run_once(folder, "enqueue", "shop.send", "--url", url)
    run_once(folder, "worker", "--burst", "--url", url)
    with TaskQueue(url) as queue:
        task = queue.get_task(ended.stdout.strip())

    assert task is not None
    assert (task.func_path, task.status) == ("shop.send", TaskStatus.SUCCESS)


def test_a_module_of_the_settings_that_is_broken_here_does_not_stop_an_enqueue(folder, url):
    (folder / "broken.py").write_text("import a_driver_that_only_workers_have\n")
    (folder / "pyproject.toml").write_text('[tool.omniq]\nmodules = ["broken"]\n')
    for path in ("broken.work", "not_here.at_all"):
        ended = run_once(folder, "enqueue", path, "--url", url)

        assert ended.returncode == 0
        assert "enqueued unchecked" in ended.stderr


# Modules below a package


def package(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        file = folder / "shop" / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for parent in file.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
        file.write_text(source)


SCHEDULED = "from omniq import task\n\n@task(cron='0 3 * * *')\ndef tidy(): ...\n"
STOP = "from omniq import task\nraise SystemExit('imported')\n@task\ndef f(): ...\n"


def test_modules_below_a_package_are_found_with_their_schedules(run_worker, queue, folder):
    package(folder, jobs=SCHEDULED, deep__er=SCHEDULED, helper="raise SystemExit('imported')\n",
            tests__test_jobs=STOP, test_more=STOP, conftest=STOP)  # fmt: skip
    (folder / "shop" / "__main__.py").write_text(STOP)
    worker = run_worker("--burst", modules=("shop",))

    assert worker.ends() == 0
    declared = {schedule.id for schedule in queue.schedules.list()}
    assert declared == {"shop.jobs.tidy", "shop.deep.er.tidy"}
    for schedule_id in declared:
        assert f"schedule.declared schedule_id={schedule_id} change=added" in worker.text


def test_modules_are_found_in_folders_without_an_init_file(run_worker, queue, folder):
    for name in ("shop/jobs/daily.py", "shop/mail/in_no_package.py", "shop/tests/of_shop.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(STOP if "shop/jobs" not in name else SCHEDULED)
    # Python takes this for `shop.mail`, so that nothing below the folder can be imported.
    (folder / "shop" / "mail.py").write_text("")
    worker = run_worker("--burst", modules=("shop",))

    assert worker.ends() == 0
    assert [schedule.id for schedule in queue.schedules.list()] == ["shop.jobs.daily.tidy"]


@PROCESSES
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SCHEDULED + "import nowhere_to_be_found\n", "nowhere_to_be_found"),
        (SCHEDULED + "def (\n", "line 5"),
        (SCHEDULED + "import os\nos.environ['NOT_SET']\n", "broken.py:6 in <module>"),
    ],
    ids=["import", "syntax", "below"],
)
def test_an_error_in_a_module_below_is_one_line_that_names_it(
    run_worker, queue, folder, source, message, processes
):
    package(folder, jobs=SCHEDULED, broken=source)
    options = ("--processes", processes, "--log-level", "error")
    worker = run_worker(*options, modules=("shop",))

    assert worker.ends() == 2
    [line] = worker.lines
    assert "module shop.broken cannot be imported" in line
    assert message in line


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("tasks:app", "give only the module: tasks"),
        ("tasks.add", "add is defined in the module tasks; give the module: tasks"),
        ("./tasks", "give the name of a module, such as tasks"),
        ("packaged", "it is in {folder}/src: install your project, or set PYTHONPATH=src"),
        ("nowhere", "looked in {folder} and among the installed packages"),
    ],
)
def test_a_wrong_module_gets_a_sentence_that_says_what_to_write(
    run_worker, folder, module, message
):
    (folder / "src" / "packaged").mkdir(parents=True)
    worker = run_worker("--log-level", "error", modules=(module,))

    assert worker.ends() == 2
    [line] = worker.lines
    assert message.format(folder=folder) in line


def test_the_help_shows_the_defaults(folder):
    shown = " ".join(run_once(folder, "worker", "--help").stdout.split())

    for setting, default in (
        ("concurrency", "10"),
        ("poll_interval", "1"),
        ("lease", "30"),
        ("shutdown_timeout", "30"),
    ):
        assert f"Default: the setting {setting}, else {default}." in shown


# What several processes say


@pytest.mark.deep
def test_one_of_several_processes_says_what_the_worker_runs(run_worker, queue, folder):
    (folder / "empty.py").write_text("")
    worker = run_worker("--processes", "3", modules=("tasks", "empty"))
    worker.wait_for("worker.started", 3)
    pid = queue.workers()[0].pid
    os.kill(pid, signal.SIGKILL)
    worker.wait_for("worker.started", 4)
    worker.send(signal.SIGTERM)

    assert worker.ends() == 0
    assert sum("functions=" in line for line in worker.lines) == 1
    assert sum("worker.advice" in line for line in worker.lines) == 1


def test_two_functions_of_one_name_stop_the_start(run_worker, folder):
    for name in ("first", "second"):
        (folder / f"{name}.py").write_text(
            "from omniq import task\n\n@task(name='mail.send')\ndef send(): ...\n"
        )
    worker = run_worker("--log-level", "error", modules=("first", "second"))

    assert worker.ends() == 2
    [line] = worker.lines
    assert "first.send and second.send" in line
