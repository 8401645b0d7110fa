"""Which frames of a traceback are shown, and that no text of an exception passes for one."""

from __future__ import annotations

import ast
import asyncio
import traceback

import pytest

from omniq.log.user_frames import user_frames, where
from omniq.log.wording import shown_message

OMNIQ = __import__("omniq").__path__[0]
RUNNERS = asyncio.__path__[0]


def frame(file: str, name: str, code: str = "x()") -> str:
    return f'  File "{file}", line 7, in {name}\n    {code}\n    ^^^\n'


HEADER = "Traceback (most recent call last):\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
ERROR = "ValueError: no\n"


def names(text: str, *, hidden: bool = False) -> list[str]:
    lines = user_frames(text, None if hidden else shown_message)
    return [line.rpartition(" in ")[2] for line in lines if line.lstrip(" |").startswith("File ")]


def test_frames_of_omniq_and_of_the_executor_are_left_out():
    text = (
        HEADER
        + frame(f"{OMNIQ}/worker/executors/thread_executor.py", "_end_of")
        + frame(f"{RUNNERS}/runners.py", "run")
        + frame("/app/tasks.py", "send")
        + frame(f"{OMNIQ}/tasks/context.py", "step")
        + frame("/app/mail.py", "connect")
        + ERROR
    )

    assert names(text) == ["send", "connect"]
    assert user_frames(text, shown_message)[-1] == "ValueError: no"
    assert where(text) == "/app/mail.py:7 in connect"


def test_frames_of_libraries_that_the_task_calls_stay():
    text = (
        HEADER
        + frame("/app/tasks.py", "send")
        + frame(f"{RUNNERS}/runners.py", "run")
        + frame("/venv/lib/python3/site-packages/httpx/_client.py", "get")
        + ERROR
    )

    assert names(text) == ["send", "run", "get"]
    assert where(text) == "/app/tasks.py:7 in send"


def test_a_traceback_of_omniq_alone_is_shown_whole():
    text = HEADER + frame(f"{OMNIQ}/cli/demo_tasks.py", "fail") + ERROR

    assert names(text) == ["fail"]


def test_the_frames_of_a_cause_are_shown_too_and_the_place_is_that_of_the_error():
    text = (
        HEADER + frame("/app/a.py", "inner") + "KeyError: 'x'\n" + CAUSE
        + HEADER + frame("/app/b.py", "outer") + ERROR
    )  # fmt: skip

    assert names(text) == ["inner", "outer"]
    assert where(text) == "/app/b.py:7 in outer"
    assert "The above exception was the direct cause" in "\n".join(user_frames(text, shown_message))


def test_the_text_of_an_error_stays_one_masked_line():
    text = HEADER + frame("/app/a.py", "f") + "ValueError: a\n  b password=hunter2\n\nc\n"
    lines = user_frames(text, shown_message)

    assert lines[-1] == r"ValueError: a\n  b password=***\n\nc"


@pytest.mark.parametrize("depth", [1, 2])
def test_hidden_texts_cannot_get_out_by_looking_like_a_traceback(depth):
    forged = "x\n" + HEADER + frame("/secret/argument.py", "hunter2", code="hunter2")
    text = (HEADER + frame("/app/a.py", "f") + f"ValueError: {forged}\n" + CAUSE) * depth

    assert names(text, hidden=True) == ["f"]
    assert "hunter2" not in "\n".join(user_frames(text, None))
    assert where(text, first_only=True) == "/app/a.py:7 in f"


@pytest.mark.parametrize("hidden", [True, False])
def test_the_source_that_a_syntax_error_quotes_counts_as_its_text(hidden):
    """It may be an argument: `ast.literal_eval(argument)`."""
    argument = "password=hunter2 oops"
    try:
        ast.literal_eval(argument)
    except SyntaxError as error:
        text = "".join(traceback.format_exception(error))
    lines = user_frames(text, None if hidden else shown_message)

    assert "hunter2" not in "\n".join(lines)
    assert any("ast.literal_eval" in line for line in lines)
    assert ("SyntaxError" in lines[-1]) is not hidden


def test_a_real_exception_group_keeps_its_frames_and_its_shape():
    def fail() -> None:
        raise ValueError("inside")

    try:
        try:
            fail()
        except ValueError as error:
            raise ExceptionGroup("several", [error]) from None
    except ExceptionGroup as group:
        text = "".join(traceback.format_exception(group))
    lines = user_frames(text, shown_message)

    assert names(text)[-1] == "fail"
    assert "    | ValueError: inside" in lines
    assert any("Exception Group Traceback" in line for line in lines)


def test_every_part_of_a_real_traceback_is_kept_when_all_frames_are_the_users(tmp_path):
    code = compile(
        "def f(n):\n    return f(n - 1) if n else 1 / 0\nf(2000)\n", "/app/deep.py", "exec"
    )
    try:
        exec(code, {})
    except RecursionError as error:
        text = "".join(traceback.format_exception(error)).partition("\n")[2]
    lines = user_frames(HEADER + text, shown_message)

    assert any("Previous line repeated" in line for line in lines)
    assert lines[-1].startswith("RecursionError: maximum recursion")


@pytest.mark.parametrize("text", ["", "nothing like a traceback", HEADER, "\n\n"])
def test_any_text_is_survived(text):
    user_frames(text, shown_message)
    user_frames(text, None)

    assert where(text) == ""
