"""Programs that are started for real: what they say is read, and they are ended when a test ends."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE = 40.0


class Program:
    """One process. Its output is one stream of lines."""

    def __init__(self, command: Sequence[str], folder: Path, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line from now that has it."""
        while True:
            line = self._lines.get(timeout=PATIENCE)
            assert line is not None, f"it ended: {''.join(self.said)}"
            if match := re.search(pattern, line):
                return match

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> int:
        if self.runs:
            self._process.send_signal(signal.SIGTERM)
        return self.end()

    def end(self) -> int:
        """Wait until it has ended; its exit code."""
        try:
            code = self._process.wait(PATIENCE)
            self._reader.join(PATIENCE)
            return code
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.said.append(line)
                self._lines.put(line)
        self._lines.put(None)


def ask(url: str, *, method: str = "GET", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def ask_json(url: str, *, method: str = "GET") -> Any:
    status, body = ask(url, method=method)
    assert status < 300, body
    return json.loads(body)


def a_free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
