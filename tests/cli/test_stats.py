"""`omniq stats`, once and live."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from omniq.operations.overview import Overview
from omniq.storage.run_counts import FunctionCounts, PeriodCounts, RunCounts
from tests.cli.terminal import TIMEOUT, Terminal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def watch(folder, url):
    """Run `omniq stats --watch` in a separate terminal."""
    opened: list[Terminal] = []

    def run(*arguments: str, **options) -> Terminal:
        opened.append(
            Terminal(folder, "stats", "--watch", "-i", "0.1", "--url", url, *arguments, **options)
        )
        return opened[-1]

    yield run
    for each in opened:
        each.close()


def test_stats_shows_everything_once(omniq, queue, dead_task):
    dead = dead_task("no route")
    queue.options(queue="mail").enqueue("clitasks.add", 1)
    with queue.worker(concurrency=2, queues=["web"]):
        completed = omniq("stats")
        record = omniq("stats", "--json").json

    for text in ("pending 1", "failed 1", "dead letters", "mail", "web", "0/2", dead):
        assert text in completed.out
    assert list(record) == list(Overview.__struct_fields__)
    assert record["rates"] is None
    assert record["by_status"]["pending"] == 1


def test_watch_prints_once_in_a_pipe(omniq, queue):
    completed = omniq("stats", "--watch")

    assert completed.code == 0
    assert completed.out.count("omniq on sqlite") == 1


def test_the_live_view_refreshes_and_q_restores_the_terminal(watch, queue):
    view = watch()
    view.wait_for("pending 0")
    queue.enqueue("clitasks.add", 1)
    view.wait_for("pending 1")
    view.wait_for("enqueued   0.0 finished")
    view.press("q")

    assert view.ends() == 0
    assert view.is_as_it_was
    view.wait_for("q quits")
    assert view.raw.rstrip().endswith("\x1b[?1049l")


def test_ctrl_c_ends_the_live_view_without_output(watch, queue):
    view = watch()
    view.wait_for("pending 0")
    view.process.send_signal(signal.SIGINT)

    assert view.ends() == 0
    assert view.is_as_it_was
    assert "Traceback" not in view.text


def test_the_live_view_fits_a_small_window(watch, queue, dead_task):
    dead_task("an error that goes on and on " * 20)
    view = watch(columns=40, rows=12)
    view.wait_for("pending 0")
    view.press("q")

    assert view.ends() == 0


def test_watch_with_json_prints_one_line_per_refresh(queue, url, folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "omniq", "stats", "--watch", "--json", "-i", "0.1", "--url", url],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(TIMEOUT) == 0

    assert first["rates"] is None
    assert second["rates"]["enqueued"] == 0


def test_a_range_shows_how_runs_ended(omniq, queue):
    line = FunctionCounts("shop.say", "mail", RunCounts(succeeded=8, retried=2, run=[0, 0, 10]))
    start = int(queue.storage.clock.now().timestamp()) // 60 * 60 - 120
    minute = PeriodCounts(start, RunCounts(succeeded=8, retried=2, run=[0, 0, 10]), [line])
    queue._portal.run(queue.storage.add_run_counts([minute]))
    shown = omniq("stats", "--range", "1h").out
    of_queue = omniq("stats", "--range", "24h", "--queue", "mail", "--json").json
    of_another = omniq("stats", "--range", "24h", "--queue", "web", "--json").json

    assert "8 succeeded" in shown
    assert "shop.say" in shown
    assert of_queue["total"]["retried"] == 2
    assert of_queue["functions"]["shop.say"]["runs"] == 10
    assert of_another["total"]["runs"] == 0


def test_a_wrong_range_is_an_error_that_names_the_right_ones(omniq, queue):
    assert "15m, 1h, 6h" in omniq("stats", "--range", "2y").err
    assert "need --range" in omniq("stats", "--queue", "mail").err
