"""Secrets are in no log, message or process list, and in no process that does not need them."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from loguru import logger

from omniq import AsyncTaskQueue, log
from omniq.errors import OmniqError
from omniq.operations.redaction import REDACTED, redacted, restored, without_secrets
from omniq.settings import Settings
from omniq.storage import open_storage
from omniq.storage.memory import MemoryStorage
from omniq.text.masking import mask_url
from tests.acceptance.command import WorkerCommand
from tests.security import secret_tasks

CANARY = "canary-7f3a"
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def lines():
    """Every log line of every level, with all its fields."""
    logged: list[str] = []
    sink = logger.add(
        lambda message: logged.append(repr(message.record)), level=0, format="{message}"
    )
    log.enable("TRACE")
    yield logged
    log.disable()
    logger.remove(sink)


@pytest.mark.security("S15")
@pytest.mark.fault("F84")
async def test_no_log_event_of_any_level_contains_an_argument_or_a_result(lines):
    async with AsyncTaskQueue(MemoryStorage(settings=Settings(base_retry_delay=0.0))) as queue:
        echoed = await queue.options(metadata={"m": CANARY}).enqueue(
            secret_tasks.echo, CANARY, word=CANARY
        )
        failed = await queue.options(max_retries=1).enqueue(secret_tasks.fail, CANARY)
        async with queue.worker() as pool:
            await pool.run_until_empty()
        assert await echoed.result(timeout=30) == [CANARY, CANARY]
        letter = await queue.dead.get(failed.id)

    assert any("task.dead" in line for line in lines)
    assert [line for line in lines if CANARY in line] == []
    assert letter is not None
    # A traceback contains the lines of the code and not the values of variables.
    assert CANARY not in letter.error_details


URLS = [
    f"postgresql://me:{CANARY}@127.0.0.1:1/db",
    f"postgresql://me@127.0.0.1:1/db?password={CANARY}",
    f"postgresql://me:{CANARY}@127.0.0.1:1/db?schema=BAD",
    f"redis://:{CANARY}@127.0.0.1:1/0",
    f"redis://me:{CANARY}@127.0.0.1:1/notanumber",
    f"rediss://me:{CANARY}@127.0.0.1:1/0",
    f"nonsense://me:{CANARY}@host/0",
    f"postgresql://me:{CANARY}@127.0.0.1:1/db?durability=wrong",
    f"redis://me:{CANARY}@127.0.0.1:1/0?max_pending=none",
    f"postgresql://me:{CANARY}@127.0.0.1:1/db?lease=1&lease=2",
    f"postgresql://me:a@{CANARY}@127.0.0.1:1/db",
    f"sqlite://me:{CANARY}@host/x.db",
    f"file://me:{CANARY}@host/x",
]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.security("S15")
@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
async def test_no_error_about_a_url_contains_its_password(url):
    with pytest.raises(OmniqError) as refused:
        async with open_storage(url):
            pass

    text = "".join(traceback.format_exception(refused.value))
    shown = [line for line in text.splitlines() if not line.startswith("  ")]
    assert [line for line in shown if CANARY in line] == []


@pytest.mark.security("S15")
def test_no_representation_of_settings_contains_a_key_or_a_password():
    keys = {"signing_key": CANARY, "encryption_key": CANARY, "old_keys": CANARY}
    settings = Settings(url=URLS[0], **keys)  # type: ignore[arg-type]

    for shown in (repr(settings), str(settings), str(settings.shown()), f"{settings!s}"):
        assert CANARY not in shown
    assert "***" in repr(settings)


@pytest.mark.security("S15")
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@db/app", "postgresql://me:***@db/app"),
        ("redis://:secret@h/0", "redis://:***@h/0"),
        ("postgresql://u@/db?password=secret&host=/x", "postgresql://u@/db?password=***&host=/x"),
        ("redis://h/0?token=secret", "redis://h/0?token=***"),
        ("postgresql://u:p@ss:w/rd@h/db", "postgresql://u:***@h/db"),
    ],
)
def test_a_url_is_shown_without_its_passwords(url, shown):
    assert mask_url(url) == shown


@pytest.mark.security("S15")
def test_values_that_look_like_secrets_are_hidden_at_any_depth_and_restored_on_an_edit():
    call = {
        "user": "ada",
        "password": CANARY,
        "headers": [{"Authorization": CANARY, "Accept": "x"}],
        "database": f"postgresql://me:{CANARY}@db/app",
        "nested": ({"api_key": CANARY}, {"apiKey": CANARY}, {"refresh_token": CANARY}),
    }
    shown = redacted(call)

    assert CANARY not in repr(shown)
    assert shown["user"] == "ada"
    assert shown["password"] == REDACTED
    edited = {**shown, "user": "eve"}
    assert restored(edited, call) == {**call, "user": "eve", "nested": list(call["nested"])}


@pytest.mark.security("S15")
async def test_an_argument_by_position_is_hidden_by_its_parameters_name_or_mark():
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        handle = await queue.enqueue(secret_tasks.pay, "ada", CANARY, CANARY, when=CANARY)
        task = await queue.get_task(handle.id)

    assert task is not None
    assert task.args == ("ada", CANARY, CANARY)
    shown = without_secrets(task)
    assert shown.args == ("ada", REDACTED, REDACTED)
    assert shown.kwargs == {"when": REDACTED}


@pytest.mark.security("S15")
def test_the_command_line_hides_values_that_look_like_secrets(tmp_path):
    environ = {**_clean(), "OMNIQ_URL": f"sqlite:///{tmp_path}/t.db?durability=os"}
    kwargs = ("--kwargs", f'password="{CANARY}"', "--kwargs", 'to="ada"')
    made = _omniq(environ, "enqueue", "tests.security.secret_tasks.send", *kwargs)
    assert made.returncode == 0, made.stderr
    shown = _omniq(environ, "tasks", "show", made.stdout.strip())

    assert shown.returncode == 0, shown.stderr
    assert "ada" in shown.stdout
    assert CANARY not in shown.stdout + shown.stderr


def _clean() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OMNIQ_")}
    return {**clean, "PYTHONPATH": ROOT}


def _omniq(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omniq", *arguments],
        env=environ, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.security("S16")
def test_no_process_of_a_worker_shows_a_key_or_a_url_in_the_process_list(tmp_path):
    """Only the owner of a process can read its environment; every user can read its command line."""
    worker = WorkerCommand(
        Path(ROOT),
        "--processes",
        "2",
        modules=("tests.security.secret_tasks",),
        OMNIQ_URL=f"sqlite:///{tmp_path}/{CANARY}.db?durability=os",
        OMNIQ_SIGNING_KEY=f"{CANARY}-signing-key",
        OMNIQ_ENCRYPTION_KEY=f"{CANARY}-encryption-key",
    )
    try:
        worker.wait_for("worker.started", 2)
        family = _family(worker.process.pid)
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family]
        modes = {os.stat(f"/proc/{pid}/environ").st_mode & 0o077 for pid in family}
    finally:
        worker.send(15)  # type: ignore[arg-type]
        worker.ends(20)
        worker.kill()

    assert len(family) >= 3
    assert [line for line in lines if CANARY.encode() in line] == []
    assert modes == {0}
    assert f"{CANARY}-" not in worker.text


def _family(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    children = [each for thread in threads for each in (thread / "children").read_text().split()]
    return [pid, *(each for child in children for each in _family(int(child)))]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.security("S28")
async def test_a_task_in_a_process_sees_neither_the_keys_nor_the_url_of_the_store(monkeypatch):
    for name in ("SIGNING_KEY", "ENCRYPTION_KEY", "OLD_KEYS", "URL", "DASHBOARD_OPERATOR"):
        monkeypatch.setenv(f"OMNIQ_{name}", f"{CANARY} {CANARY}")
    monkeypatch.setenv("OF_THE_USER", "visible")
    async with AsyncTaskQueue(MemoryStorage()) as queue:
        seen = await queue.enqueue(secret_tasks.environment)
        commands = await queue.enqueue(secret_tasks.command_lines)
        async with queue.worker(concurrency=2):
            environment = await seen.result(timeout=40)
            lines = await commands.result(timeout=40)

    assert environment["OF_THE_USER"] == "visible"
    assert [name for name, value in environment.items() if CANARY in value] == []
    assert not any(CANARY in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.security("S29")
@pytest.mark.fault("F77")
async def test_nothing_is_unpickled_at_the_boundary_to_a_process():
    from tests.security.audit_hook import audited

    async with AsyncTaskQueue(MemoryStorage()) as queue:
        with audited() as events:
            failing = await queue.enqueue(secret_tasks.raise_what_cannot_be_pickled)
            giving = await queue.enqueue(secret_tasks.return_bytes)
            async with queue.worker(concurrency=2):
                failed = await queue.get_result(failing.id, timeout=40)
                value = await giving.result(timeout=40)

    assert failed is not None
    assert failed.error is not None
    assert failed.error.message == "as text"
    assert value == b"\x80\x05cos\nsystem\n."
    assert [event for event in events if event.startswith(("pickle", "marshal"))] == []
