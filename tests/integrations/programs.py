"""Programs as subprocesses: their output is read, and they are stopped when the test ends."""

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

TIMEOUT = 40.0


class Program:
    """A process. Its stdout and stderr are one stream of lines."""

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
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The match in the next line that matches the pattern."""
        while True:
            line = self._lines.get(timeout=TIMEOUT)
            assert line is not None, f"the program ended: {''.join(self.output)}"
            if match := re.search(pattern, line):
                return match

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> int:
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait until the program has ended; returns its exit code."""
        try:
            code = self._process.wait(TIMEOUT)
            self._reader.join(TIMEOUT)
            return code
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.output.append(line)
                self._lines.put(line)
        self._lines.put(None)


def fetch(url: str, *, method: str = "GET", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def fetch_json(url: str, *, method: str = "GET") -> Any:
    status, body = fetch(url, method=method)
    assert status < 300, body
    return json.loads(body)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
