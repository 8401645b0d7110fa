"""Errors are classified as transient, permanent or partial, by themselves or by rules."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest

from omniq import (
    ErrorCategory,
    ErrorRules,
    InvalidTask,
    PartialError,
    PermanentError,
    SettingsError,
    TaskError,
    TransientError,
)
from omniq.tasks.error_rules import FailedStep, explain, path_of_rule, rules_at

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CLAIM = ("t1", 1)
HTTP = ErrorRules(http=True)
RULES = ErrorRules(permanent=(KeyError,))

TRANSIENT, PERMANENT, PARTIAL, UNCLASSIFIED = ErrorCategory


def record_of(error: BaseException, *rules: ErrorRules) -> TaskError:
    return explain(error, rules, NOW, CLAIM)


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


class Response(SimpleNamespace):
    """The response that exceptions of httpx and requests have."""


class StatusError(Exception):
    """An error like those of httpx and requests."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"status {status}")
        self.response = Response(status_code=status, headers=dict(headers))


class ClientResponseError(Exception):
    """An error like those of aiohttp."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers = status, headers


def http_error(status: int, retry_after: str | None = None) -> HTTPError:
    headers = Message()
    if retry_after is not None:
        headers["Retry-After"] = retry_after
    return HTTPError("http://localhost/", status, "no", headers, io.BytesIO())


def test_an_error_is_transient_unless_it_says_otherwise():
    record = record_of(ValueError("boom"))

    assert (record.category, record.retry_after) == (TRANSIENT, None)
    assert (record.error_type, record.message, record.timestamp) == ("ValueError", "boom", NOW)


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (TransientError("x"), TRANSIENT),
        (PermanentError("x"), PERMANENT),
        (PartialError("x"), PARTIAL),
        (TaskError("x", category="permanent"), PERMANENT),
    ],
)
def test_the_category_of_an_error_overrides_every_rule(error, category):
    says_otherwise = ErrorRules(permanent=(TransientError, PartialError), transient=(TaskError,))

    assert record_of(error, says_otherwise).category is category


def test_an_error_has_the_category_of_its_cause():
    cause = TaskError("slow down", category="permanent", retry_after=5, failed_step="upload")
    record = record_of(raised_from(RuntimeError("outer"), raised_from(ValueError(), cause)))

    assert (record.category, record.retry_after) == (PERMANENT, 5)
    assert (record.error_type, record.message, record.failed_step) == (
        "RuntimeError",
        "outer",
        "upload",
    )


def test_the_context_of_an_error_does_not_set_its_category():
    with pytest.raises(ValueError, match="while cleaning up") as caught:  # noqa: PT012
        try:
            raise PermanentError("first")
        except PermanentError:
            raise ValueError("while cleaning up")  # noqa: B904

    assert record_of(caught.value).category is TRANSIENT


def test_an_exception_group_is_permanent_if_one_of_its_errors_is():
    passing, lasting = TransientError("a", retry_after=5), PermanentError("b")
    FailedStep(CLAIM, "upload", ["fetch"]).attach_to(lasting)
    one = record_of(ExceptionGroup("tasks", [ValueError(), passing]))
    both = record_of(ExceptionGroup("tasks", [passing, ExceptionGroup("more", [lasting])]))

    assert (one.category, one.retry_after) == (TRANSIENT, 5)
    assert (both.category, both.failed_step) == (PERMANENT, "upload")
    assert record_of(ExceptionGroup("tasks", [KeyError()]), RULES).category is PERMANENT


def test_circular_causes_do_not_loop_forever():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first

    assert record_of(first, RULES).category is TRANSIENT


def test_rules_match_by_type_and_by_predicate():
    rules = ErrorRules(
        transient=(LookupError,), permanent=(lambda error: "never" in str(error), OverflowError)
    )

    assert record_of(KeyError("later"), rules).category is TRANSIENT
    assert record_of(KeyError("never"), rules).category is PERMANENT
    assert record_of(OverflowError(), rules).category is PERMANENT
    assert record_of(raised_from(RuntimeError(), OverflowError()), rules).category is PERMANENT


def test_rules_of_the_task_override_those_of_the_worker():
    of_task, of_worker = ErrorRules(transient=(KeyError,)), ErrorRules(permanent=(KeyError,))

    assert record_of(KeyError(), of_task, of_worker).category is TRANSIENT
    assert record_of(KeyError(), of_worker, of_task).category is PERMANENT


@pytest.mark.parametrize(
    ("status", "category"),
    [
        *((status, TRANSIENT) for status in (408, 425, 429, 500, 502, 503, 504, 599)),
        *((status, PERMANENT) for status in (400, 401, 403, 404, 410, 422)),
        *((status, None) for status in (200, 301, 399)),
    ],
)
@pytest.mark.parametrize("make", [StatusError, ClientResponseError, http_error])
def test_http_errors_are_classified_by_status_for_every_library(make, status, category):
    assert HTTP.category_of(make(status)) is category


@pytest.mark.parametrize(
    "error",
    [
        StatusError(503, **{"Retry-After": "120"}),
        StatusError(429, **{"retry-after": "120"}),
        ClientResponseError(503, {"Retry-After": "120"}),
        http_error(503, "120"),
        http_error(429, format_datetime(NOW + timedelta(minutes=2), usegmt=True)),
    ],
    ids=["requests", "lower case", "aiohttp", "urllib", "a date"],
)
def test_retry_after_is_read_as_seconds_and_as_a_date(error):
    record = record_of(raised_from(RuntimeError("upload failed"), error), HTTP)

    assert (record.category, record.retry_after) == (TRANSIENT, 120.0)


@pytest.mark.parametrize("text", ["", "soon", "-5", "nan", "inf", "Tue, 99 Foo 2026", "1e400"])
def test_a_malformed_retry_after_is_ignored(text):
    assert record_of(http_error(503, text), HTTP).retry_after is None


def test_a_retry_after_in_the_past_is_ignored():
    past = format_datetime(NOW - timedelta(minutes=2), usegmt=True)

    assert record_of(http_error(503, past), HTTP).retry_after is None


def test_a_status_is_ignored_without_a_rule_for_it():
    assert record_of(http_error(404, "120")).category is TRANSIENT
    assert record_of(http_error(503, "120"), RULES).retry_after is None


def test_only_transient_errors_are_retried_when_that_is_the_rule():
    rules = ErrorRules(transient=(KeyError,), http=True, only_transient=True)
    worth = [KeyError(), TimeoutError(), ConnectionResetError(), http_error(500)]

    assert {record_of(error, rules).category for error in worth} == {TRANSIENT}
    assert record_of(ValueError(), rules).category is UNCLASSIFIED
    assert record_of(http_error(404), rules).category is PERMANENT
    assert record_of(PartialError("x"), rules).category is PARTIAL


def test_a_task_may_retry_what_its_worker_does_not():
    lenient, strict = ErrorRules(only_transient=False), ErrorRules(only_transient=True)

    assert record_of(ValueError(), lenient, strict).category is TRANSIENT
    assert record_of(ValueError(), ErrorRules(), strict).category is UNCLASSIFIED


def test_no_error_has_no_category():
    assert HTTP.category_of(None) is None


def test_a_failing_rule_and_a_hostile_error_are_ignored():
    class Hostile(Exception):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("leave me alone")

        def __str__(self) -> str:
            raise RuntimeError("and do not read me")

    def fails(error: BaseException) -> bool:
        raise LookupError

    assert record_of(Hostile(), HTTP).error_type.endswith("Hostile")
    assert record_of(ValueError("boom"), ErrorRules(permanent=(fails,))).message == "boom"


@pytest.mark.parametrize("rule", [int, "ValueError", 404])
def test_an_invalid_rule_is_refused(rule):
    with pytest.raises(InvalidTask, match="neither an exception type nor a function"):
        ErrorRules(permanent=(rule,))


def test_a_single_rule_needs_no_tuple():
    assert ErrorRules(transient=KeyError).transient == (KeyError,)  # type: ignore[arg-type]


def test_a_failed_step_is_recorded_for_its_own_claim_only():
    error = ValueError("boom")
    FailedStep(CLAIM, "upload", ["fetch"]).attach_to(error)
    record, other = record_of(error), explain(error, (), NOW, ("t1", 2))

    assert (record.category, record.failed_step) == (PARTIAL, "upload")
    assert (other.category, other.failed_step) == (TRANSIENT, None)


def test_a_failed_step_named_by_the_error_is_not_replaced():
    error = PermanentError("x", failed_step="inner", recovery_hint="call us")
    FailedStep(CLAIM, "upload", ["fetch"]).attach_to(error)
    record = record_of(error)

    assert (record.category, record.failed_step) == (PERMANENT, "inner")
    assert record.recovery_hint == "call us"


def test_a_recovery_hint_has_a_maximum_length():
    mark = FailedStep(CLAIM, "upload", [f"step-{n}" for n in range(10_000)])

    assert len(mark.hint) < 1100
    assert mark.hint.endswith("a retry continues with upload")


def test_a_setting_names_rules_by_their_path():
    assert rules_at(f"{__name__}.RULES") is RULES
    for path in (f"{__name__}.NOW", f"{__name__}.missing", "no.such.module.RULES"):
        with pytest.raises(SettingsError, match="errors="):
            rules_at(path)


def test_a_rule_that_a_child_process_could_not_find_is_refused():
    assert path_of_rule(KeyError) == "builtins:KeyError"
    assert path_of_rule(StatusError) == f"{__name__}:StatusError"
    with pytest.raises(InvalidTask, match="in a module"):
        path_of_rule(lambda error: True)
