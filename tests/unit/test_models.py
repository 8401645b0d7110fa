"""Models are plain frozen data, and an error of any kind becomes a bounded record."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniq.errors import InvalidTask
from omniq.models import (
    LEGAL_TRANSITIONS,
    MAX_TEXT,
    MAX_TRACEBACK,
    ErrorCategory,
    PartialError,
    PermanentError,
    Task,
    TaskError,
    TaskResult,
    TaskStatus,
    TransientError,
    check_id,
    check_int,
    check_key,
    check_seconds,
    check_task,
)


def test_a_task_needs_a_function_and_nothing_else():
    first, second = Task(func_path="m.f"), Task(func_path="m.f")

    check_task(first)
    assert first.id < second.id
    assert (first.status, first.attempts, first.queue) == (TaskStatus.PENDING, 0, "default")
    assert first.created_at.tzinfo is UTC


def test_models_are_frozen():
    task = Task(func_path="m.f")
    result = TaskResult(task_id="a", status=TaskStatus.SUCCESS)

    with pytest.raises(AttributeError):
        task.priority = 5  # type: ignore[misc]
    with pytest.raises(AttributeError):
        result.result = 5  # type: ignore[misc]
    assert msgspec.structs.replace(task, priority=5).priority == 5


def test_the_defaults_of_two_tasks_are_not_shared():
    first, second = Task(func_path="m.f"), Task(func_path="m.f")
    first.kwargs["k"] = 1
    first.metadata["m"] = 1

    assert (second.kwargs, second.metadata) == ({}, {})


def test_only_a_failed_task_leaves_its_final_state():
    final = {status for status in TaskStatus if status.is_final}

    assert final == {TaskStatus.SUCCESS, TaskStatus.FAILED, TaskStatus.CANCELLED}
    assert set(LEGAL_TRANSITIONS) == set(TaskStatus)
    assert LEGAL_TRANSITIONS[TaskStatus.FAILED] == {TaskStatus.PENDING}
    assert not LEGAL_TRANSITIONS[TaskStatus.SUCCESS] | LEGAL_TRANSITIONS[TaskStatus.CANCELLED]


@given(st.text(alphabet="ABCxyz019._-", min_size=1, max_size=128))
def test_ids_are_file_names_that_cannot_be_hidden(text):
    if text.startswith("."):
        with pytest.raises(InvalidTask):
            check_id(text)
    else:
        check_id(text)


@given(st.text())
def test_no_text_makes_the_id_check_do_anything_but_accept_or_refuse(text):
    try:
        check_id(text)
    except InvalidTask as error:
        assert len(str(error)) < 300  # noqa: PT017 - it may also be a fine id


@pytest.mark.parametrize("seconds", [0, 1, 0.5, 86_400 * 366 * 100])
def test_durations_are_finite_numbers(seconds):
    check_seconds("interval", seconds)


@pytest.mark.parametrize("seconds", [-1, -0.1, math.nan, math.inf, True, "1", 1e12])
def test_other_durations_are_refused_by_name(seconds):
    with pytest.raises(InvalidTask, match=r"^interval "):
        check_seconds("interval", seconds)


@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("priority", 1, True),
        ("priority", 1, 1.0),
        ("max_retries", 0, False),
        ("attempts", 0, None),
        ("queue", "q", ["q"]),
        ("func_path", "a.b", {}),
    ],
)
def test_an_equal_value_of_another_type_is_checked_again(field, right, wrong):
    sound = Task(func_path="a.b", id="a", created_at=datetime.now(UTC))
    check_task(msgspec.structs.replace(sound, **{field: right}))

    with pytest.raises(InvalidTask, match=field):
        check_task(msgspec.structs.replace(sound, **{field: wrong}))


def test_the_message_about_a_hostile_value_is_short():
    with pytest.raises(InvalidTask) as refused:
        check_int("priority", 10**10_000, low=0)

    assert len(str(refused.value)) < 200
    with pytest.raises(InvalidTask) as refused:
        check_seconds("timeout", 10**10_000)
    assert len(str(refused.value)) < 200
    with pytest.raises(InvalidTask) as refused:
        check_key("unique", "x" * 10_000)
    assert len(str(refused.value)) < 200


def test_a_task_error_is_an_exception_and_a_record():
    error = TaskError(
        "no route",
        category="permanent",
        retry_after=5,
        failed_step="upload",
        recovery_hint="check the cable",
        timestamp=datetime(2026, 1, 1, tzinfo=UTC),
    )

    assert isinstance(error, Exception)
    assert error.category is ErrorCategory.PERMANENT
    assert str(error) == "upload: no route (category: permanent)"
    assert TaskError(**error.to_record()) == error
    assert hash(TaskError(**error.to_record())) == hash(error)
    assert error != TaskError("no route")


@pytest.mark.parametrize(
    ("kind", "category"),
    [
        (TaskError, ErrorCategory.TRANSIENT),
        (TransientError, ErrorCategory.TRANSIENT),
        (PermanentError, ErrorCategory.PERMANENT),
        (PartialError, ErrorCategory.PARTIAL),
    ],
)
def test_each_kind_of_error_has_its_category(kind, category):
    error = kind("x")

    assert (error.category, error.error_type) == (category, kind.__name__)


def test_any_exception_becomes_a_record():
    facts: dict[str, int] = {}
    try:
        facts["missing"]
    except KeyError as error:
        record = TaskError.from_exception(error, timestamp=datetime(2026, 1, 1, tzinfo=UTC))

    assert (record.error_type, record.message) == ("KeyError", "'missing'")
    assert "test_models.py" in record.traceback
    assert record.timestamp == datetime(2026, 1, 1, tzinfo=UTC)


def test_a_task_error_keeps_its_facts_when_it_becomes_a_record():
    raised = PermanentError("gone", retry_after=3, failed_step="find")
    record = TaskError.from_exception(raised)

    assert type(record) is TaskError
    assert (record.error_type, record.category) == ("PermanentError", ErrorCategory.PERMANENT)
    assert (record.retry_after, record.failed_step) == (3, "find")


def test_the_record_of_a_huge_or_hostile_exception_has_a_maximum_size():
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text for you")

    huge = TaskError.from_exception(ValueError("x" * 10_000_000))
    hostile = TaskError.from_exception(Hostile())
    surrogate = TaskError.from_exception(ValueError("\ud800"))

    assert len(huge.message) < MAX_TEXT + 100
    assert len(huge.traceback) < MAX_TRACEBACK + 100
    assert hostile.error_type.endswith("Hostile")
    assert hostile.message
    surrogate.message.encode()
    surrogate.traceback.encode()
