"""`omniq dashboard` as a process: its link, its secrets and its shutdown."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

SECRET = "a secret in the environment"


def own_environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("OMNIQ_")}


@pytest.fixture
def start(tmp_path: Path):
    """Starts the command; returns the process and the first line it printed."""
    running: list[subprocess.Popen[str]] = []

    def run(*options: str, **variables: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "omniq", "dashboard", "--port", "0", *options],
            cwd=tmp_path,
            env={
                **own_environment(),
                "OMNIQ_URL": f"sqlite:///{tmp_path}/tasks.db",
                "COLUMNS": "20",
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline()

    yield run
    for process in running:
        process.kill()
        process.communicate()


class Terminal:
    """The command in a terminal."""

    def __init__(self, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "omniq", "dashboard", "--port", "0"],
            cwd=folder,
            env={**own_environment(), "OMNIQ_URL": f"sqlite:///{folder}/tasks.db", "COLUMNS": "20"},
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(theirs)

    def read_link(self) -> str:
        text = b""
        while b"token=" not in text or not text.endswith(b"\n"):
            assert select.select([self._ours], [], [], 60)[0]
            text += os.read(self._ours, 4096)
        return text.decode().strip()

    def press_enter(self) -> None:
        os.write(self._ours, b"\n")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._ours)


@pytest.fixture
def terminal(tmp_path: Path):
    found = Terminal(tmp_path)
    yield found
    found.close()


@pytest.mark.timeout(120)
def test_the_link_is_alone_on_its_line_works_once_and_enter_prints_the_next(terminal):
    line = terminal.read_link()
    with httpx.Client(follow_redirects=True, timeout=30) as browser:
        opened = browser.get(line)
        inside = browser.get(opened.url.join("/tasks"))
    with httpx.Client(follow_redirects=True, timeout=30) as other:
        again = other.get(line)
        terminal.press_enter()
        next_one = other.get(terminal.read_link())
    terminal.process.send_signal(signal.SIGTERM)
    _, err = terminal.process.communicate(timeout=30)

    assert line.startswith("http://127.0.0.1:")
    assert len(line.split()) == 1
    assert (opened.status_code, inside.status_code) == (200, 200)
    assert "token=" not in str(opened.url)
    assert (again.status_code, next_one.status_code) == (403, 200)
    assert terminal.process.returncode == 0, err


@pytest.mark.timeout(120)
def test_without_a_terminal_and_a_secret_no_link_is_printed(start):
    process, line = start()
    out, err = process.communicate(timeout=30)

    assert line + out == ""
    assert process.returncode == 2
    assert "OMNIQ_DASHBOARD_OPERATOR" in err
    assert "token" not in err


@pytest.mark.timeout(120)
def test_with_a_secret_users_sign_in_and_the_secret_is_never_printed(start):
    process, line = start("--host", "0.0.0.0", OMNIQ_DASHBOARD_OPERATOR=SECRET)
    port = line.strip().rstrip("/").rpartition(":")[2]
    address = f"http://127.0.0.1:{port}"
    authenticated = httpx.get(
        f"{address}/api/overview", headers={"authorization": f"Bearer {SECRET}"}
    )
    unauthenticated = httpx.get(f"{address}/api/overview")
    changed = httpx.post(
        f"{address}/api/queues/pause",
        json={"queue": "mail"},
        headers={"authorization": f"Bearer {SECRET}"},
    )
    arguments = Path(f"/proc/{process.pid}/cmdline")
    seen = arguments.read_text() if arguments.exists() else ""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)

    codes = [each.status_code for each in (authenticated, unauthenticated, changed)]
    assert codes == [200, 401, 200]
    assert SECRET not in seen + out + err + line
    assert "operator.acted action=queues/pause subject=mail" in err


@pytest.mark.timeout(120)
def test_a_port_in_use_is_one_line_of_error(start):
    _, line = start(OMNIQ_DASHBOARD_OPERATOR=SECRET)
    port = line.split("/")[2].rpartition(":")[2]
    second, nothing = start("--port", port, OMNIQ_DASHBOARD_OPERATOR=SECRET)
    _, err = second.communicate(timeout=30)

    assert nothing == ""
    assert second.returncode != 0
    assert "cannot listen" in err
    assert err.count("\n") == 1


@pytest.mark.timeout(120)
def test_a_webhook_that_is_no_url_is_one_line_of_error_without_its_text(start):
    process, _ = start(OMNIQ_DASHBOARD_OPERATOR=SECRET, OMNIQ_DASHBOARD_WEBHOOK="hooks.test/k-1")
    _, err = process.communicate(timeout=30)

    assert process.returncode == 2
    assert "OMNIQ_DASHBOARD_WEBHOOK" in err
    assert "k-1" not in err


@pytest.mark.timeout(120)
def test_an_open_stream_does_not_prevent_shutdown(start):
    process, line = start(OMNIQ_DASHBOARD_OPERATOR=SECRET)
    headers = {"authorization": f"Bearer {SECRET}"}
    with httpx.stream("GET", f"{line.strip()}api/stream", headers=headers, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=30)

    assert code == 0
