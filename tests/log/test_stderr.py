"""A stderr that is read slowly, or not at all: the work goes on, and no line is mixed with another."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from omniq import log
from omniq.events import TaskDead
from omniq.log.console import Console
from omniq.log.stderr import PIECE, Stderr, _pieces
from tests.acceptance.command import PATIENCE, clean_environment, wait_until

LINE = "a line of the log with its fields and so on, about as long as those of tasks are {}\n"


@contextmanager
def unread_stderr() -> Iterator[int]:
    """Make stderr a pipe, and yield its other end. In the test itself: pytest sets stderr before it."""
    source, target = os.pipe()
    with open(target, "w") as stderr, redirect_stderr(stderr):
        yield source
    os.close(source)


def read_all(source: int) -> list[str]:
    os.set_blocking(source, False)
    data = b""
    try:
        while found := os.read(source, 1 << 20):
            data += found
    except BlockingIOError:
        pass
    return data.decode().splitlines(keepends=True)


def test_a_reader_that_has_stopped_does_not_stop_the_writer():
    """What fits into memory is written when it reads again, and then how many lines are left out."""
    with unread_stderr() as reader:
        stderr = Stderr("{} lines are left out\n".format)
        lines = [LINE.format(number) for number in range(20_000)]
        began = time.monotonic()
        for line in lines:
            stderr.write(line)
        stderr.finish()
        assert time.monotonic() - began < PATIENCE

        found: list[str] = []
        while stderr.is_behind:
            found += read_all(reader)
            stderr.write("")
        found += read_all(reader)
        shown = "".join(found).splitlines(keepends=True)
        missing = int(shown.pop().removesuffix(" lines are left out\n"))
        assert shown == lines[: len(shown)]
        assert missing == len(lines) - len(shown)
        assert sum(map(len, shown)) > 1 << 20


def test_a_reader_that_is_slow_gets_every_line():
    with unread_stderr() as reader:
        stderr = Stderr("{} lines are left out\n".format)
        lines = [LINE.format(number) for number in range(20_000)]
        found: list[str] = []

        def read() -> None:
            while sum(map(len, found)) < sum(map(len, lines)):
                found.append(os.read(reader, 1 << 16).decode())
                time.sleep(0.002)

        thread = threading.Thread(target=read)
        thread.start()
        for line in lines:
            stderr.write(line)
        stderr.finish()
        thread.join(PATIENCE)
        assert "".join(found) == "".join(lines)


@pytest.mark.parametrize("word", ["x", "\u00fc", "\u20ac", "\U0001f600", "x\u20ac"])
def test_a_piece_fits_into_one_write_to_a_pipe_and_ends_with_a_line(word):
    """Larger writes of several processes may be mixed in the middle of a line."""
    lines = [word * length + "\n" for length in (1, 700, 900, 5_000, 40, 0, 1_000) * 3]
    pieces = list(_pieces("".join(lines)))

    assert "".join(pieces) == "".join(lines)
    assert all(len(piece.encode()) <= PIECE for piece in pieces)
    short = [word * 20 + "\n"] * 1_000
    assert all(piece.endswith("\n") for piece in _pieces("".join(short)))


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_line_about_missing_lines_has_the_format_of_the_log(monkeypatch, log_format):
    with unread_stderr() as reader:
        monkeypatch.setattr("omniq.log.stderr._MOST_WAITING", 2)
        console = Console(log.LogConfig(format=log_format))
        event = TaskDead(
            id="t1", func_path="mail.send", queue="bulk", attempt=2, reason="exhausted"
        )
        for _ in range(1_000):
            console.event(event)
        lines = read_all(reader)
        console.flush()
        while found := read_all(reader):
            lines += found
            console.flush()
        console.close()
        wanted = re.escape("stderr was not read for a while; ") + r"\d+ lines are left out"
        assert re.search(wanted, lines[-1])
        assert ('"level":"WARNING"' if log_format == "json" else " WARNING ") in lines[-1]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_whose_stderr_is_not_read_runs_its_tasks_and_stops(folder, url, queue):
    queue.enqueue_many("shop.noop", [()] * 6_000)
    source, target = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, "-m", "omniq", "worker", "shop", "--url", url, "--concurrency", "50"],
        cwd=folder,
        env=clean_environment(),
        stderr=target,
    )
    try:
        os.close(target)
        wait_until(lambda: sum(queue.stats().by_queue.values()) == 0)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0
    finally:
        worker.kill()
        worker.wait()
        os.close(source)
