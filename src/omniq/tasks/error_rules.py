"""Whether a retry may help: an error states its category, or `ErrorRules` decide it.

A `TaskError`, or an error that was raised from one, states its category. For other errors the
`ErrorRules` of the task apply, then those of the worker. Only `raise … from …` is followed: an error
that was raised while another one was handled is a different error.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from omniq.errors import InvalidTask, SettingsError
from omniq.models import ErrorCategory, TaskError

Rule = type[BaseException] | Callable[[BaseException], object]
"""An exception type, or a function that returns whether an exception matches."""

_TRANSIENT_TYPES = (TimeoutError, ConnectionError)
"""Errors that are transient without a rule."""

_BUSY = frozenset({408, 425, 429})
_LONGEST_CHAIN = 20
_ATTRIBUTE = "__omniq_step__"
_MAX_HINT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRules:
    """After which exceptions a retry may help, for those that do not state it themselves.

    `transient` and `permanent` are exception types, or functions that receive the exception.
    `http=True` uses the status of HTTP errors of any library: 5xx, 408, 425 and 429 are transient,
    and a retry waits for their `Retry-After`; every other 4xx is permanent.

    Any other exception is retried. With `only_transient=True` it is not: then only transient
    exceptions are retried, among them timeouts and broken connections, which need no rule. One that
    no rule knows makes the task a dead letter with the reason "unclassified".
    """

    transient: tuple[Rule, ...] = ()
    permanent: tuple[Rule, ...] = ()
    http: bool = False
    only_transient: bool | None = None

    def __post_init__(self) -> None:
        for name in ("transient", "permanent"):
            object.__setattr__(self, name, _checked(name, getattr(self, name)))

    def category_of(self, error: BaseException | None) -> ErrorCategory | None:
        """Return the category of the error by these rules; None when no rule matches.

        >>> ErrorRules(permanent=(LookupError,)).category_of(KeyError("id"))
        <ErrorCategory.PERMANENT: 'permanent'>
        """
        return None if error is None else _classify(list(_chain(error)), (self,), None)[0]


class FailedStep:
    """The step that raised an exception, with its claim and what was finished before."""

    __slots__ = ("claim", "done", "step")

    def __init__(self, claim: tuple[str, int], step: str, done: Sequence[str]) -> None:
        self.claim = claim
        self.step = step
        self.done = done

    @property
    def hint(self) -> str:
        """What to know before the task is retried."""
        if not self.done:
            return "nothing is done yet: safe to retry from beginning"
        done = ", ".join(self.done)
        return f"already done: {done}"[:_MAX_HINT] + f"; a retry continues with {self.step}"

    def attach_to(self, error: BaseException) -> None:
        """Store this on the exception, so that a caller catches the exception as it was raised."""
        # An exception class may define a __setattr__ that refuses.
        with suppress(Exception):
            setattr(error, _ATTRIBUTE, self)

    def add_to(self, record: TaskError) -> None:
        """Set the fields of the record that the error has not set."""
        record.failed_step = record.failed_step or self.step
        record.recovery_hint = record.recovery_hint or self.hint
        if self.done and record.category is ErrorCategory.TRANSIENT:
            record.category = ErrorCategory.PARTIAL


def explain(
    error: BaseException,
    rules: Sequence[ErrorRules],
    now: datetime,
    claim: tuple[str, int],
) -> TaskError:
    """Return the record of an exception that ended a run: its category and its step.

    `rules` are applied in their order.
    """
    record = TaskError.from_exception(error, timestamp=now)
    try:
        chain = list(_chain(error))
        stated = _stated_by(chain)
        if stated is None:
            category, record.retry_after = _classify(chain, rules, now)
            only_transient = next(
                (rule.only_transient for rule in rules if rule.only_transient is not None), False
            )
            fallback = ErrorCategory.UNCLASSIFIED if only_transient else ErrorCategory.TRANSIENT
            record.category = category or fallback
        elif stated is not error:
            known = TaskError.from_exception(stated)
            record.category, record.retry_after = known.category, known.retry_after
            record.failed_step, record.recovery_hint = known.failed_step, known.recovery_hint
        if (step := failed_step_of(error, claim)) is not None:
            step.add_to(record)
    except Exception:
        # Rules are user code, and so are the attributes of the user's exceptions. An error that
        # cannot be classified is recorded all the same.
        return record
    return record


def failed_step_of(error: BaseException, claim: tuple[str, int]) -> FailedStep | None:
    """Return the step of that claim's run in which the exception was raised, if any."""
    for each in _chain(error):
        step = getattr(each, _ATTRIBUTE, None)
        # Another claim: one exception object that is raised again and again.
        if isinstance(step, FailedStep) and step.claim == claim:
            return step
    return None


def rules_at(path: str) -> ErrorRules:
    """Return the rules that a setting names by a dotted path. Raises `SettingsError`."""
    module, _, name = path.rpartition(".")
    try:
        rules = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"errors={path!r}: there are no such rules: {error}") from error
    if not isinstance(rules, ErrorRules):
        raise SettingsError(f"errors={path!r}: expected an ErrorRules, not {type(rules).__name__}")
    return rules


def path_of_rule(rule: Rule) -> str:
    """Return the path by which a child process imports the rule. Raises `InvalidTask` without one."""
    path = f"{rule.__module__}:{getattr(rule, '__qualname__', '')}"
    try:
        found = rule_at(path)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not rule:
        raise InvalidTask(
            f"errors: the rule {rule!r} is not found as {path}; define the rules of a worker in a "
            "module, so that its child processes can import them"
        )
    return path


def rule_at(path: str) -> Any:
    """Import the rule at that path."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def _checked(name: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    several: tuple[Any, ...] = (rules,) if callable(rules) else tuple(rules)
    for rule in several:
        fits = issubclass(rule, BaseException) if isinstance(rule, type) else callable(rule)
        if not fits:
            raise InvalidTask(
                f"{name}: {rule!r} is neither an exception type nor a function that receives an exception"
            )
    return several


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, its cause, and so on; then the members of exception groups."""
    links: list[BaseException | None] = [error]
    for _ in range(_LONGEST_CHAIN):
        link = links.pop(0) if links else None
        if link is None:
            return
        yield link
        if isinstance(link, BaseExceptionGroup):
            links.extend(link.exceptions)
        if link.__cause__ is not None:
            links.insert(0, link.__cause__)


def _stated_by(chain: Sequence[BaseException]) -> TaskError | None:
    """Return the `TaskError` that decides: the first, but in a group a permanent one."""
    found = [error for error in chain if isinstance(error, TaskError)]
    if any(isinstance(error, BaseExceptionGroup) for error in chain):
        found.sort(key=lambda error: error.category is not ErrorCategory.PERMANENT)
    return found[0] if found else None


def _classify(
    chain: Sequence[BaseException], rules: Sequence[ErrorRules], now: datetime | None
) -> tuple[ErrorCategory | None, float | None]:
    """Return the category by the rules, and the seconds to wait that the server named."""
    for level in rules:
        for error in chain:
            if _is_any(error, level.permanent):
                return ErrorCategory.PERMANENT, None
            if _is_any(error, level.transient):
                return ErrorCategory.TRANSIENT, _retry_after(error, now) if level.http else None
    if any(level.http for level in rules):
        for error in chain:
            if (category := _by_status(_status(error))) is not None:
                is_transient = category is ErrorCategory.TRANSIENT
                return category, _retry_after(error, now) if is_transient else None
    if rules and any(isinstance(error, _TRANSIENT_TYPES) for error in chain):
        return ErrorCategory.TRANSIENT, None
    return None, None


def _is_any(error: BaseException, rules: tuple[Rule, ...]) -> bool:
    return any(isinstance(error, rule) if isinstance(rule, type) else rule(error) for rule in rules)


def _by_status(status: int | None) -> ErrorCategory | None:
    if status is None or not 400 <= status <= 599:
        return None
    is_transient = status >= 500 or status in _BUSY
    return ErrorCategory.TRANSIENT if is_transient else ErrorCategory.PERMANENT


def _holders(error: BaseException) -> Iterator[object]:
    """Yield where HTTP libraries put status and headers: the exception, and its response."""
    yield error
    response = getattr(error, "response", None)
    if response is not None:
        yield response


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of httpx, requests, aiohttp, urllib or a similar library."""
    for holder in _holders(error):
        for name in ("status_code", "status"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 100 <= status <= 599:
                return int(status)
    return None


def _retry_after(error: BaseException, now: datetime | None) -> float | None:
    """Return the seconds of the server's `Retry-After` header."""
    for holder in _holders(error):
        headers = getattr(holder, "headers", None)
        if headers is None:
            continue
        text = headers.get("Retry-After") or headers.get("retry-after")
        if text is not None:
            return _seconds_until(str(text).strip(), now)
    return None


def _seconds_until(text: str, now: datetime | None) -> float | None:
    """
    >>> _seconds_until("Thu, 01 Jan 1970 00:02:00 GMT", datetime(1970, 1, 1, tzinfo=UTC))
    120.0
    """
    try:
        seconds = float(text)
    except ValueError:
        # Imported here: it takes longer to import than all of omniq, and dates are rare.
        from email.utils import parsedate_to_datetime

        try:
            instant = parsedate_to_datetime(text)
        except ValueError:
            return None
        if now is None:
            return None
        # The RFC defines a date without a zone as UTC.
        instant = instant if instant.tzinfo else instant.replace(tzinfo=UTC)
        seconds = (instant - now).total_seconds()
    return seconds if 0 <= seconds < math.inf else None
