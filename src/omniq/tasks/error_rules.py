"""Whether another try may help: what an error says of itself, then rules for those that say nothing.

An error that is a `TaskError`, or was raised from one, is what it says. For others there are
`ErrorRules`: of the task, then of the worker. Only `raise … from …` is followed: what was raised
while another error was handled is news of its own.
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
"""A type of exception, or a function that says whether it is one of these."""

_PASSING = (TimeoutError, ConnectionError)
"""What comes and goes by itself, whoever raises it."""

_BUSY = frozenset({408, 425, 429})
_LONGEST_CHAIN = 20
_MARK = "__omniq_step__"
_MAX_HINT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRules:
    """Which exceptions are worth another try, for those that do not say so themselves.

    `transient` and `permanent` are types of exceptions, or functions that are given the exception.
    `http=True` goes by the status of HTTP errors, whichever library raised them: 5xx, 408, 425 and
    429 are transient, and their `Retry-After` is heeded; every other 4xx is permanent.

    Any other exception is retried. With `only_transient=True` it is not: then only what was found
    to be transient is, and timeouts and broken connections, which need no rule.
    """

    transient: tuple[Rule, ...] = ()
    permanent: tuple[Rule, ...] = ()
    http: bool = False
    only_transient: bool | None = None

    def __post_init__(self) -> None:
        for name in ("transient", "permanent"):
            object.__setattr__(self, name, _checked(name, getattr(self, name)))

    def category_of(self, error: BaseException | None) -> ErrorCategory | None:
        """What these rules take the error for; None when they know nothing of it.

        >>> ErrorRules(permanent=(LookupError,)).category_of(KeyError("id"))
        <ErrorCategory.PERMANENT: 'permanent'>
        """
        return None if error is None else _judge(list(_chain(error)), (self,), None)[0]


class StepMark:
    """Where in a task an exception came from: of which claim, in which step, and what was done."""

    __slots__ = ("claim", "done", "step")

    def __init__(self, claim: tuple[str, int], step: str, done: Sequence[str]) -> None:
        self.claim = claim
        self.step = step
        self.done = done

    @property
    def hint(self) -> str:
        """What a reader should know before the task is run again."""
        if not self.done:
            return "nothing is done yet: safe to retry from beginning"
        done = ", ".join(self.done)
        return f"already done: {done}"[:_MAX_HINT] + f"; a retry goes on with {self.step}"

    def put_on(self, error: BaseException) -> None:
        """Let the exception itself carry it, so that whoever catches it sees what was raised."""
        # An exception with a __setattr__ of its own may refuse.
        with suppress(Exception):
            setattr(error, _MARK, self)

    def tell(self, record: TaskError) -> None:
        """Add to the record what it does not say itself."""
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
    """The record of an exception that ended a run: whether another try may help, and where it was.

    `rules` come in the order in which they are asked.
    """
    record = TaskError.from_exception(error, timestamp=now)
    try:
        chain = list(_chain(error))
        told = _told_by(chain)
        if told is None:
            category, record.retry_after = _judge(chain, rules, now)
            only_transient = next(
                (rule.only_transient for rule in rules if rule.only_transient is not None), False
            )
            fallback = ErrorCategory.PERMANENT if only_transient else ErrorCategory.TRANSIENT
            record.category = category or fallback
        elif told is not error:
            known = TaskError.from_exception(told)
            record.category, record.retry_after = known.category, known.retry_after
            record.failed_step, record.recovery_hint = known.failed_step, known.recovery_hint
        if (mark := step_of(error, claim)) is not None:
            mark.tell(record)
    except Exception:
        # Rules are the user's code, and so are the attributes of the user's exceptions. An error
        # that cannot be judged is an error all the same.
        return record
    return record


def step_of(error: BaseException, claim: tuple[str, int]) -> StepMark | None:
    """In which step of that claim's run the exception was raised, if it was in one."""
    for each in _chain(error):
        mark = getattr(each, _MARK, None)
        # Of another claim: an exception object that is raised again and again.
        if isinstance(mark, StepMark) and mark.claim == claim:
            return mark
    return None


def rules_at(path: str) -> ErrorRules:
    """The rules that a setting names by their dotted path. Raises `SettingsError`."""
    module, _, name = path.rpartition(".")
    try:
        rules = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"errors={path!r}: there are no such rules: {error}") from error
    if not isinstance(rules, ErrorRules):
        raise SettingsError(f"errors={path!r}: expected an ErrorRules, not {type(rules).__name__}")
    return rules


def path_of_rule(rule: Rule) -> str:
    """By which a child process finds the rule again. Raises `InvalidTask` when it could not."""
    path = f"{rule.__module__}:{getattr(rule, '__qualname__', '')}"
    try:
        found = rule_at(path)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not rule:
        raise InvalidTask(
            f"errors: the rule {rule!r} is not found as {path}; rules of a worker must be of a "
            "module, so that its child processes have them as well"
        )
    return path


def rule_at(path: str) -> Any:
    """The rule of that path."""
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
                f"{name}: {rule!r} is neither a type of exception nor a function that is given one"
            )
    return several


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, what it was raised from, and so on; last, what groups among them hold."""
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


def _told_by(chain: Sequence[BaseException]) -> TaskError | None:
    """The one that says what the error is: the first, but of a group a permanent one."""
    told = [error for error in chain if isinstance(error, TaskError)]
    if any(isinstance(error, BaseExceptionGroup) for error in chain):
        told.sort(key=lambda error: error.category is not ErrorCategory.PERMANENT)
    return told[0] if told else None


def _judge(
    chain: Sequence[BaseException], rules: Sequence[ErrorRules], now: datetime | None
) -> tuple[ErrorCategory | None, float | None]:
    """What the rules take an error for, and how long it asks to wait."""
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
    if rules and any(isinstance(error, _PASSING) for error in chain):
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
    """Where HTTP libraries put what the server said: on the exception, or on its response."""
    yield error
    response = getattr(error, "response", None)
    if response is not None:
        yield response


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error of httpx, requests, aiohttp or urllib, or of any like them."""
    for holder in _holders(error):
        for name in ("status_code", "status"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 100 <= status <= 599:
                return int(status)
    return None


def _retry_after(error: BaseException, now: datetime | None) -> float | None:
    """Seconds for which the server asked not to be asked again."""
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
        # It takes longer to import than all of omniq, and few tasks ever meet a date here.
        from email.utils import parsedate_to_datetime

        try:
            instant = parsedate_to_datetime(text)
        except ValueError:
            return None
        if now is None:
            return None
        # A date without a zone is in UTC: so the RFC has it.
        instant = instant if instant.tzinfo else instant.replace(tzinfo=UTC)
        seconds = (instant - now).total_seconds()
    return seconds if 0 <= seconds < math.inf else None
