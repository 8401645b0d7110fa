"""Failpoints act as the environment configures them, at the configured hit, and not otherwise."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from omniq import failpoints
from omniq.errors import SettingsError


@pytest.fixture(autouse=True)
def _reset_failpoints():
    yield
    failpoints.reset()


def run_with(text: str, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"from omniq.failpoints import hit\n{code}"],
        env={**os.environ, failpoints.VARIABLE: text},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_nothing_happens_and_nothing_is_counted_when_unset():
    assert failpoints.hit("claim.begin") is False
    assert failpoints.hits() == {}


def test_a_failpoint_without_an_entry_is_only_counted():
    failpoints.configure("claim.begin=skip")

    assert failpoints.hit("record.begin") is False
    assert failpoints.hits() == {"record.begin": 1}


def test_raise_fails_with_the_named_errno():
    failpoints.configure("record.before_write=raise:ENOSPC")

    with pytest.raises(OSError, match=r"record\.before_write") as caught:
        failpoints.hit("record.before_write")
    assert caught.value.errno == errno.ENOSPC


def test_skip_tells_the_caller_to_skip_the_step():
    failpoints.configure("a=skip")

    assert failpoints.hit("a") is True


def test_count_only_counts():
    failpoints.configure("a=count")

    assert [failpoints.hit("a") for _ in range(3)] == [False, False, False]
    assert failpoints.hits() == {"a": 3}


def test_the_nth_hit_acts_and_no_other():
    failpoints.configure("a=skip@3")

    assert [failpoints.hit("a") for _ in range(5)] == [False, False, True, False, False]


def test_a_probability_acts_on_about_that_share_of_hits():
    failpoints.configure("a=skip:0.5")

    assert 300 < sum(failpoints.hit("a") for _ in range(1000)) < 700


def test_delay_takes_milliseconds(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("omniq.failpoints.time.sleep", slept.append)
    failpoints.configure("a=delay:50")
    failpoints.hit("a")

    assert slept == [0.05]


def test_the_star_stands_for_every_failpoint_without_an_entry():
    failpoints.configure("*=skip, b=count")

    assert (failpoints.hit("a"), failpoints.hit("b")) == (True, False)


def test_several_entries_work_together():
    failpoints.configure("claim.after_write=kill:0.02, record.before_write=raise:EIO:0.5@2,a=skip")

    assert failpoints.hit("a") is True


def test_configuring_again_replaces_everything_and_counts_from_0():
    failpoints.configure("a=skip")
    failpoints.hit("a")
    failpoints.configure("b=skip")

    assert failpoints.hit("a") is False
    assert failpoints.hits() == {"a": 1}


def test_reset_removes_all_rules():
    failpoints.configure("a=skip")
    failpoints.reset()

    assert failpoints.hit("a") is False
    assert failpoints.hits() == {}


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "=kill",
        "A B=kill",
        "a=explode",
        "a=kill:2",
        "a=kill:0",
        "a=kill:often",
        "a=kill:0.5:0.5",
        "a=raise",
        "a=raise:EWHAT",
        "a=raise:strerror",
        "a=delay",
        "a=delay:-1",
        "a=delay:nan",
        "a=skip@0",
        "a=skip@first",
        "a=skip, a=kill",
    ],
)
def test_a_malformed_text_is_refused_and_changes_nothing(text):
    failpoints.configure("before=skip")

    with pytest.raises(SettingsError, match="OMNIQ_FAILPOINTS"):
        failpoints.configure(text)
    assert failpoints.hit("before") is True


def test_kill_ends_the_process_at_once():
    child = run_with("a=kill@2", "hit('a'); print('one', flush=True); hit('a'); print('two')")
    output, _ = child.communicate(timeout=30)

    assert child.returncode == -signal.SIGKILL
    assert output == "one\n"


def test_exit_leaves_without_clean_up():
    child = run_with("a=exit", "try:\n    hit('a')\nfinally:\n    print('clean-up')")
    output, _ = child.communicate(timeout=30)

    assert child.returncode == failpoints.EXIT_STATUS
    assert output == ""


def test_stop_suspends_the_process_until_it_is_continued():
    child = run_with("a=stop", "hit('a'); print('on again')")
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    stopped = os.WIFSTOPPED(status)
    os.kill(child.pid, signal.SIGCONT)
    output, _ = child.communicate(timeout=30)

    assert stopped
    assert output == "on again\n"


def test_a_bad_environment_is_an_error_at_the_start():
    child = run_with("nonsense", "pass")
    _, errors = child.communicate(timeout=30)

    assert child.returncode == 1
    assert "SettingsError: OMNIQ_FAILPOINTS: 'nonsense'" in errors
